#!/usr/bin/env python3
"""The `gpt` step in two processes, beside two threads and beside PyTorch's pipeline over Gloo.      (make bench-processes)

Usage: processes.py --in-turn [--pairs 20]
       processes.py [--rounds 5] [--out FOLDER]

In turn (`crates/models/examples/processes.rs`): a step on two threads and one in two processes, seconds apart, again and again. In rounds:
five steps each, in programs of their own, with the peer; the median of the last three counts, for the first two still touch memory for the
first time.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

import rounds
import steps
from figures import ROOT, commit, interval, machine, median, spread
from rounds import Workload, gpipe, peer
from targets import WARM_UP, Ratio

STEPS = 5


def jobs():
    """name -> job"""
    all_ = {}
    for m in [4, 8, 32]:
        all_[f"two threads M={m}"] = gpipe(micro_batches=m, steps=STEPS)
        all_[f"two processes M={m}"] = gpipe(micro_batches=m, steps=STEPS, processes=2)
    all_["two threads M=8 always"] = gpipe(remat="always", steps=STEPS)
    all_["two processes M=8 always"] = gpipe(remat="always", steps=STEPS, processes=2)
    all_["pipelining M=8"] = peer("pipelining", schedule="1f1b", checkpoint=False)
    all_["pipelining M=8 checkpoint"] = peer("pipelining", schedule="1f1b", checkpoint=True)
    return all_


TARGETS = [
    *(Ratio(f"two threads against two processes, {what}: at least 0.95x", f"two processes {what}", [f"two threads {what}"], 0.95)
      for what in ["M=4", "M=8", "M=32", "M=8 always"]),
    Ratio("against torch.distributed.pipelining, whose stages are two processes over Gloo", "two processes M=8", ["pipelining M=8"], 1),
    Ratio("... re-materialized", "two processes M=8 always", ["pipelining M=8 checkpoint"], 1),
]

WORKLOAD = Workload(name="gpt", jobs=jobs(), peer_steps=STEPS, step_ms=lambda found: median(found["step_ms"][WARM_UP:]),
                    step_is=f"median of steps {WARM_UP + 1} to {STEPS}")

# (M, re-materialization)
IN_TURN = [(4, "never"), (8, "never"), (32, "never"), (8, "always")]


def in_turn():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-turn", action="store_true", required=True)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    rounds.build("processes")
    found = []
    for m, remat in IN_TURN:
        command = [rounds.example("processes"), f"pairs={pairs}", f"micro_batches={m}", f"remat={remat}"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600).stdout
        found.append([json.loads(line) for line in out.splitlines()])
        print(f"M = {m}, {remat} done", file=sys.stderr, flush=True)
    lines = ["# Two processes and two threads, in turn: `gpt`", "", f"{machine()}; commit {commit()}; 1F1B; {pairs} pairs of each.", "",
             "```sh", f"python3 benchmarks/processes.py --in-turn --pairs {pairs}", "```", "",
             "Medians, in brackets least and most; of the ratios the interval of at least 95% of their median.", "",
             "| M | re-materialization | two threads, ms | two processes, ms | processes / threads |", "|---|---|---|---|---|"]
    for (m, remat), pairs_ in zip(IN_TURN, found):
        threads, processes = ([pair[key] for pair in pairs_] for key in ["threads_ms", "processes_ms"])
        ratios = [two / one for one, two in zip(threads, processes)]
        lines.append(f"| {m} | {remat} | {spread(threads)} | {spread(processes)} | {interval(ratios)} |")
    out = ROOT / "benchmarks" / f"{datetime.date.today()}-processes-in-turn"
    out.mkdir(parents=True, exist_ok=True)
    (out / "raw.json").write_text(json.dumps({"commit": commit(), "in_turn": IN_TURN, "found": found}) + "\n")
    (out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def in_rounds():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / f"{datetime.date.today()}-processes")
    options = parser.parse_args()
    python = rounds.Python()
    rounds.build("gpt_step")
    options.out.mkdir(parents=True, exist_ok=True)
    raw = rounds.measure(WORKLOAD, WORKLOAD.jobs, options.out / "raw.json", python, rounds=options.rounds)
    lines = ["# The `gpt` step in two processes", "", f"{raw['machine']}; PyTorch {raw['torch']}; commit {raw['commit']}; {options.rounds} rounds.", "",
             "```sh", f"python3 benchmarks/processes.py --rounds {options.rounds}", "```", "",
             f"Canary, ms: {spread(raw['canary_ms'], 2)}. Two-core ceiling: {spread(raw['ceiling'], 2)}.", "",
             *steps.targets(WORKLOAD, raw["results"], TARGETS), "", *steps.times(WORKLOAD, raw["results"]), "",
             *steps.breakdown(raw["results"])]
    (options.out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    in_turn() if "--in-turn" in sys.argv else in_rounds()
