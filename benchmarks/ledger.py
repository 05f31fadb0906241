#!/usr/bin/env python3
"""Where the time of a step goes: each kind of work beside the least that it would take.
(make bench-ledger)

Usage: ledger.py [--workload gpt|amoeba|llama] [--rounds 3] [--out FOLDER]
       ledger.py --report FOLDER      (the report again, from its raw data)

`gpipe ledger` counts the operations of a few steps of `gpt`, AmoebaNet-D(6, 128) and `llama`, in
float32 and bfloat16, with one stage and two. One stage has one micro-batch, two stages have eight.
Their cut and their schedule are those of `gpipe plan --schedule auto`, with a profile that is
measured first. Nothing is recomputed. Each round runs all of them, in an order that rotates, a
process each. The report is of the round with the median step.

The least time of a product is that of the workload's largest product alone, at the speed that this
machine shows for it while all stages are at it. The least time of everything else is what its bytes
take at the speed of memory.
"""

import argparse
import json
import tempfile
from pathlib import Path

import folders
import plans
import rounds
from figures import median, of_table, paragraph
from prediction import gpipe

PART = "ledger"
ROUNDS = 3
WORKLOADS = ["gpt", "amoeba", "llama"]
DTYPES = ["float32", "bfloat16"]
# Stages -> micro-batches.
WAYS = {1: 1, 2: 8}
# Steps for each measurement of a profile.
PROFILED = 2
WHAT = (
    "Times are of a step, of all stages together. *Waiting* is the stages' time (stages times step)"
    " without all other rows, at least 0: mostly the schedule's filling and draining, and the"
    " difference of the stages. With it, *all* is the stages' time. *Least* is the least time: of"
    " products and convolutions at the speed of the workload's largest product, measured with all"
    " stages at it; of the rest at the speed of memory. FLOPs are the multiplications and additions"
    " of products, convolutions and attention, forward and backward: 2 for each weight and row in a"
    " forward, twice that in a backward, and 4 for each query, key and feature of attention, also"
    " where a causal mask hides the key."
)


def run(command, workload, dtype, *flags):
    """Runs a command of gpipe on a workload, and returns what the file that it wrote holds."""
    settings = [*plans.common(plans.WORKLOADS[workload]), f"--set=pipeline.dtype={dtype}"]
    gpipe(rounds.GPIPE, command, *settings, *flags)
    return json.loads(Path(flags[-1]).read_text())


def flags_of(workload, dtype, stages, scratch):
    """How a workload is run with so many stages."""
    sizes = ["--stages", stages, "--micro-batches", WAYS[stages]]
    if stages == 1:
        return [*sizes, "--schedule", "gpipe", "--remat", "never"]
    name = f"{workload}-{dtype}"
    profile, plan = scratch / f"{name}.profile.json", scratch / f"{name}.plan.json"
    run("profile", workload, dtype, *sizes, "--steps", PROFILED, "--out", profile)
    choices = ["--profile", profile, "--schedule", "auto", "--remat", "never"]
    run("plan", workload, dtype, *sizes, *choices, "--out", plan)
    return ["--plan", plan]


def measure(options, folder, scratch):
    jobs = [(name, dtype, k) for name in options.workload for dtype in DTYPES for k in WAYS]
    flags = {job: flags_of(*job, scratch) for job in jobs}
    raw = []
    for number in range(options.rounds):
        shift = number % len(jobs)
        for workload, dtype, stages in jobs[shift:] + jobs[:shift]:
            own = flags[workload, dtype, stages]
            found = run("ledger", workload, dtype, *own, "--out", scratch / "ledger.json")
            raw.append({"round": number, "workload": workload, "counted": found})
            (folder / "raw.json").write_text(json.dumps(raw) + "\n")


def middle(runs):
    """The run with the median step."""
    return sorted(runs, key=lambda own: own["step_ns"])[len(runs) // 2]


def by_work(own):
    """kind of work, or waiting -> its time and least time, in ms."""
    sums = {}
    for one in own["operations"]:
        time, least = sums.get(one["work"], (0.0, 0.0))
        sums[one["work"]] = (time + one["time_ns"] / 1e6, least + one["least_ns"] / 1e6)
    busy = sum(time for time, _ in sums.values())
    sums["waiting"] = (max(0.0, own["stages"] * own["step_ns"] / 1e6 - busy), 0.0)
    return sums


def rate(own):
    """GFLOP/s of the step, and its part of what products alone make."""
    per_s = own["flops"] / (own["step_ns"] / 1e9)
    limit = own["limits"]["flops_per_s"] * own["stages"]
    return per_s / 1e9, per_s / limit


def table(ways):
    """The table of a workload in a dtype. `ways`: stages -> what was counted."""
    header, sums = ["work"], {k: by_work(own) for k, own in ways.items()}
    for k in ways:
        header += [f"K={k}, ms", "%", "least"]
    works = dict.fromkeys(work for own in sums.values() for work in own)
    largest = lambda work: max(own.get(work, (0, 0))[0] for own in sums.values())
    rows = []
    for work in sorted(works, key=largest, reverse=True):
        cells = [work]
        for own in sums.values():
            time, least = own.get(work, (0.0, 0.0))
            share = 100 * time / sum(one for one, _ in own.values())
            cells += [f"{time:.1f}", f"{share:.1f}", f"{least:.1f}" if least else ""]
        rows.append(cells)
    cells = ["all"]
    for own in sums.values():
        time, least = (sum(one[at] for one in own.values()) for at in (0, 1))
        cells += [f"{time:.1f}", "100.0", f"{least:.1f}"]
    return of_table(header, [*rows, cells])


def grouped(raw):
    """(workload, dtype) -> stages -> the runs of all rounds."""
    found = {}
    for one in raw:
        own = one["counted"]
        ways = found.setdefault((one["workload"], own["dtype"]), {})
        ways.setdefault(own["stages"], []).append(own)
    return found


def rates_table(raw):
    header = ["workload", "dtype", "K", "schedule", "step, ms", "TFLOP", "GFLOP/s", "limit"]
    header.append("of the limit")
    rows = []
    for (workload, dtype), ways in grouped(raw).items():
        for stages, runs in sorted(ways.items()):
            own = middle(runs)
            limit = own["limits"]["flops_per_s"] * stages / 1e9
            shares = [rate(run)[1] for run in runs]
            cells = [f"`{workload}`", dtype, stages, f"`{own['schedule']}`"]
            cells.append(f"{own['step_ns'] / 1e6:.0f}")
            cells += [f"{own['flops'] / 1e12:.3f}", f"{rate(own)[0]:.0f}", f"{limit:.0f}"]
            rows.append([*cells, f"{median(shares):.2f}"])
    return of_table(header, rows)


def report(folder):
    """The text of the report."""
    raw = json.loads((folder / "raw.json").read_text())
    count = len({one["round"] for one in raw})
    lines = [
        *folders.heading("Where the time of a step goes", folder),
        *paragraph(f"{WHAT} Rounds: {count}; the run with the median step is shown."),
        "",
        *rates_table(raw),
        "",
    ]
    for (workload, dtype), ways in grouped(raw).items():
        shown = {stages: middle(runs) for stages, runs in sorted(ways.items())}
        lines += [f"## `{workload}`, {dtype}", "", *table(shown), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    rounds.build_gpipe()
    partial = folders.reasons(
        (options.workload, f"{options.workload} alone"),
        (options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"),
    )
    options.workload = options.workload or WORKLOADS
    with folders.run(PART, report, partial, options.out) as folder:
        with tempfile.TemporaryDirectory() as scratch:
            measure(options, folder, Path(scratch))


if __name__ == "__main__":
    main()
