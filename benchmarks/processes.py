#!/usr/bin/env python3
"""The `gpt` step in two processes, beside two threads and beside PyTorch's pipeline over Gloo.
                                                                        (make bench-processes)

Usage: processes.py [--rounds 5] [--out FOLDER]
       processes.py --in-turn [--pairs 20] [--out FOLDER]
       processes.py --report FOLDER      (the report again, from its raw data)

In rounds (part `processes`): five steps each, in programs of their own, with the peer. The median
of the last three counts: the first two touch memory for the first time.

In turn (part `processes-in-turn`; the driver `processes`): a step on two threads and
one in two processes, seconds apart, again and again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import folders
import rounds
import steps
from figures import commit, median, of_table, paragraph, with_interval, with_range
from machine import here
from rounds import Workload, drift, gpipe, peer
from targets import WARM_UP, Comparison

STEPS = 5
ROUNDS, PAIRS = 5, 20
# Of one M and re-materialization, in turn.
LIMIT_S = 3600


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


TWO_THREADS = "gpipe on two threads"
GLOO = "torch.distributed.pipelining over Gloo"
COMPARISONS = [
    *(
        Comparison(f"two processes {what}", TWO_THREADS, [f"two threads {what}"], 0.95)
        for what in ["M=4", "M=8", "M=32", "M=8 always"]
    ),
    Comparison("two processes M=8", GLOO, ["pipelining M=8"], 1),
    Comparison("two processes M=8 always", GLOO, ["pipelining M=8 checkpoint"], 1),
]

WORKLOAD = Workload(
    name="gpt",
    jobs=jobs(),
    peer_steps=STEPS,
    step_ms=lambda found: median(found["step_ms"][WARM_UP:]),
)

# (M, re-materialization)
IN_TURN = [(4, "never"), (8, "never"), (32, "never"), (8, "always")]
WHAT = (
    "A step of the transformer `gpt` in two stages, 1F1B: each stage in a process of its own,"
    " beside both on threads of one process, and beside PyTorch's pipeline, whose stages are"
    " processes, too. `always` and `checkpoint` recompute everything. Speed is the other's step"
    " over that of gpipe's two processes, paired within a round. Above 1 the two processes are"
    " faster."
)
WHAT_IN_TURN = (
    "A step of the transformer `gpt` in two stages, 1F1B, on two threads and in two processes,"
    " again and again in turn. The ratio is of the two steps of a pair: the median, and its"
    " interval of at least 95%. Below 1 the processes are faster."
)


def compared(results):
    """A table of two processes beside the others."""
    rows = [
        [f"`{one.ours}`", f"{one.ours_ms:.0f}", one.against, f"{one.other_ms:.0f}", *one.cells()]
        for one in steps.looked(COMPARISONS, WORKLOAD, results)
    ]
    header = ["gpipe", "its step, ms", "against", "its step, ms", "speed", "interval"]
    return of_table([*header, "target", "verdict"], rows)


def report_rounds(folder):
    raw = steps.read(folder)
    lines = [
        *folders.heading("The `gpt` step in two processes", folder),
        *paragraph(f"{WHAT} A step's time is the {steps.step_is(raw['results'])}. {drift(raw)}"),
        "",
        *compared(raw["results"]),
        "",
        "## Step times",
        "",
        *steps.times(WORKLOAD, raw["results"]),
        "",
        "## Where the time goes",
        "",
        "Shares of devices x step in percent, of the last step.",
        "",
        *steps.breakdown(raw["results"]),
    ]
    return "\n".join(lines) + "\n"


def pairs_table(folder):
    raw = json.loads((folder / "raw.json").read_text())
    rows = []
    for (m, remat), pairs in zip(raw["in_turn"], raw["found"], strict=True):
        threads, processes = ([one[key] for one in pairs] for key in ["threads_ms", "processes_ms"])
        ratios = [two / one for one, two in zip(threads, processes, strict=True)]
        times = [*with_range(threads), *with_range(processes)]
        rows.append([m, remat, len(pairs), *times, *with_interval(ratios)])
    header = ["M", "recomputed", "pairs", "two threads, ms", "least .. most"]
    header += ["two processes, ms", "least .. most", "processes / threads", "interval"]
    return of_table(header, rows)


def report_in_turn(folder):
    lines = [
        *folders.heading("The `gpt` step in two processes, in turn with two threads", folder),
        *paragraph(WHAT_IN_TURN),
        "",
        *pairs_table(folder),
    ]
    return "\n".join(lines) + "\n"


def summary_rounds(parts):
    """The section of RESULTS.md."""
    lines = []
    for folder in parts.values():
        raw = steps.read(folder)
        text = f"{WHAT} {len(raw['canary_ms'])} rounds."
        lines += [*paragraph(text), "", *compared(raw["results"]), ""]
    return lines


def in_turn(options):
    rounds.build("processes")
    partial = folders.reasons((options.pairs < PAIRS, f"{options.pairs} pairs, not {PAIRS}"))
    with folders.run("processes-in-turn", report_in_turn, partial, options.out) as folder:
        found = []
        for m, remat in IN_TURN:
            settings = [f"pairs={options.pairs}", f"micro_batches={m}", f"remat={remat}"]
            command = [rounds.driver("processes"), *settings]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=LIMIT_S
            )
            found.append([json.loads(line) for line in done.stdout.splitlines()])
            print(f"M = {m}, {remat} done", file=sys.stderr, flush=True)
        raw = {"machine": here().title(), "commit": commit(), "in_turn": IN_TURN, "found": found}
        (folder / "raw.json").write_text(json.dumps(raw) + "\n")


def in_rounds(options):
    python = rounds.Python()
    rounds.build("gpt_step")
    partial = folders.reasons((options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"))
    with folders.run("processes", report_rounds, partial, options.out, python.versions()) as folder:
        path = folder / "raw.json"
        rounds.measure(WORKLOAD, WORKLOAD.jobs, path, python, rounds=options.rounds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="in turn, of each configuration")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        is_in_turn = folders.environment(options.report).part == "processes-in-turn"
        return folders.rewrite(options.report, report_in_turn if is_in_turn else report_rounds)
    return in_turn(options) if options.in_turn else in_rounds(options)


if __name__ == "__main__":
    main()
