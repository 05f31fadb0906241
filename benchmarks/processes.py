#!/usr/bin/env python3
"""The `gpt` step in two processes, beside two threads and beside PyTorch's pipeline over Gloo.      (make bench-processes)

Usage: processes.py --in-turn [--pairs 20]
       processes.py [--rounds 5] [--out FOLDER] [--only TEXT[,TEXT..]]

In turn (`crates/models/examples/processes.rs`): a step on two threads and one in two processes, seconds apart, again and again. In rounds:
five steps each, in programs of their own, with the peer; the median of the last three counts, for the first two still touch memory for the
first time.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys

from rounds import ROOT, Workload, gpipe, interval, machine, main

STEPS, WARM_UP = 5, 2


def configurations():
    """name -> (program, settings)"""
    jobs = {}
    for m in [4, 8, 32]:
        jobs[f"two threads M={m}"] = gpipe(micro_batches=m, steps=STEPS)
        jobs[f"two processes M={m}"] = gpipe(micro_batches=m, steps=STEPS, processes=2)
    jobs["two threads M=8 always"] = gpipe(remat="always", steps=STEPS)
    jobs["two processes M=8 always"] = gpipe(remat="always", steps=STEPS, processes=2)
    jobs["pipelining M=8"] = ("pipelining", {"schedule": "1f1b", "checkpoint": False})
    jobs["pipelining M=8 checkpoint"] = ("pipelining", {"schedule": "1f1b", "checkpoint": True})
    return jobs


PAIRS = [
    ("two processes against two threads", [
        (f"two processes {what}", f"two threads {what}") for what in ["M=4", "M=8", "M=32", "M=8 always"]
    ]),
    ("against torch.distributed.pipelining, whose stages are two processes over Gloo", [
        ("two processes M=8", "pipelining M=8"),
        ("two processes M=8 always", "pipelining M=8 checkpoint"),
    ]),
]

WORKLOAD = Workload(name="gpt", command="make bench-processes", jobs=configurations(), pairs=PAIRS, peer_steps=STEPS,
                    step_ms=lambda found: statistics.median(found["step_ms"][WARM_UP:]),
                    step_is=f"median of steps {WARM_UP + 1} to {STEPS}", sections=[], folder="processes")

# (M, re-materialization)
IN_TURN = [(4, "never"), (8, "never"), (32, "never"), (8, "always")]


def in_turn():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-turn", action="store_true", required=True)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    build = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "gpipe-models", "--example", "processes"]
    subprocess.run(build, cwd=ROOT, check=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = []
    for m, remat in IN_TURN:
        command = [ROOT / "target" / "release" / "examples" / "processes", f"pairs={pairs}", f"micro_batches={m}", f"remat={remat}"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600).stdout
        found.append([json.loads(line) for line in out.splitlines()])
        print(f"M = {m}, {remat} done", file=sys.stderr, flush=True)
    lines = ["# Two processes and two threads, in turn: `gpt`", "", f"{machine()}; commit {commit}; 1F1B; {pairs} pairs of each.", "",
             "```sh", f"python3 benchmarks/processes.py --in-turn --pairs {pairs}", "```", "",
             "Medians, in brackets least and most; of the ratios the interval of at least 95% of their median.", "",
             "| M | re-materialization | two threads, ms | two processes, ms | processes / threads |", "|---|---|---|---|---|"]
    spread = lambda values: f"{statistics.median(values):.0f} [{min(values):.0f} .. {max(values):.0f}]"
    for (m, remat), steps in zip(IN_TURN, found):
        threads, processes = ([step[key] for step in steps] for key in ["threads_ms", "processes_ms"])
        ratios = [two / one for one, two in zip(threads, processes)]
        lines.append(f"| {m} | {remat} | {spread(threads)} | {spread(processes)} | {interval(ratios)} |")
    out = ROOT / "benchmarks" / f"{datetime.date.today()}-processes-in-turn"
    out.mkdir(parents=True, exist_ok=True)
    (out / "raw.json").write_text(json.dumps({"commit": commit, "in_turn": IN_TURN, "found": found}) + "\n")
    (out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    in_turn() if "--in-turn" in sys.argv else main(WORKLOAD, __doc__)
