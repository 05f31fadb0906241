#!/usr/bin/env python3
"""The paper's tables and today's peers, side by side.          (make bench, make bench-full)

Usage: bench.py [--full] [--only PART[,PART..]] [--jobs REGEX] [--minutes N] [--out FOLDER]
       bench.py --report FOLDER      (of gpt or amoeba: report and pictures again)

Parts, each with a folder of its own:
  gpt, amoeba           steps of gpipe and of its peers in interleaved rounds: as many as end within
                        their minutes, at least two
  memory-transformer, memory-amoeba     table 1: the largest network under a cap
  scaling               tables 2 and 3: throughput over stages and micro-batches
  simulated             the paper's own networks, simulated

The parts of a run with --full alone replace those in benchmarks/results/MACHINE/. Those of a run
without --full, or with --only, --jobs or fewer minutes, go to out/benchmarks/MACHINE/. --out names
another folder, for a folder of each part: `--full --only gpt --out benchmarks/results/MACHINE`
renews one part.
"""

import argparse
import re
import sys
from pathlib import Path

import amoeba
import folders
import gpt
import memory
import plots
import rounds
import scaling
import simulated
import steps
from machine import here

STEPS = {"gpt": gpt, "amoeba": amoeba}
# Part -> minutes of rounds: (short, full).
MINUTES = {"gpt": (8, 30), "amoeba": (4, 30)}
MEMORY = {f"memory-{name}": network for name, network in memory.NETWORKS.items()}
SHORT = ["gpt", "amoeba", "memory-transformer", "scaling"]
PARTS = ["gpt", "amoeba", "memory-transformer", "memory-amoeba", "scaling", "simulated"]
SHORT_SCALING = (["amoeba"], 3)
EXAMPLES = ["gpt_step", "amoeba_step", "memory", "scaling", "paper_tables"]


def steps_part(name, options, partial, out):
    """Runs the rounds of a workload, and publishes its part."""
    module = STEPS[name]
    plots.library()  # to fetch it fails now, not after the rounds
    jobs = {
        job_name: job
        for job_name, job in module.WORKLOAD.jobs.items()
        if (options.full or job.short) and re.search(options.jobs, job_name)
    }
    if not jobs:
        sys.exit(f"bench.py: no job of {name} matches --jobs '{options.jobs}'")
    minutes = options.minutes or MINUTES[name][options.full]
    report = lambda folder: steps.report(module, folder)
    python = rounds.Python()
    with folders.run(name, report, partial, out, python.versions()) as folder:
        rounds.measure(module.WORKLOAD, jobs, folder / "raw.json", python, minutes=minutes)
        steps.draw(module, folder)


def run_part(name, options, partial, out):
    if name in STEPS:
        steps_part(name, options, partial, out)
    elif name in MEMORY:
        memory.run_part(MEMORY[name], all_variants=options.full, out=out, partial=partial)
    elif name == "scaling":
        all_ = (scaling.WORKLOADS, scaling.ROUNDS)
        scaling.run_part(*(all_ if options.full else SHORT_SCALING), partial, out)
    else:
        simulated.run_part(partial, out)


def partial_of(options):
    """What a run leaves out of its parts, or None."""
    fewer_minutes = options.minutes and options.minutes < max(full for _, full in MINUTES.values())
    return folders.reasons(
        (not options.full, "without --full: fewer configurations and rounds"),
        (options.jobs, f"--jobs '{options.jobs}'"),
        (fewer_minutes, f"--minutes {options.minutes}"),
    )


def report_again(folder):
    name = folders.environment(folder).part
    if name not in STEPS:
        sys.exit(f"bench.py: --report is for {' and '.join(STEPS)}; {folder} is of {name}")
    steps.draw(STEPS[name], folder)
    folders.rewrite(folder, lambda folder: steps.report(STEPS[name], folder))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    names = f"some of {', '.join(PARTS)}"
    parser.add_argument("--only", type=lambda text: text.split(","), help=names)
    parser.add_argument("--jobs", default="", metavar="REGEX", help="of gpt and amoeba: such names")
    parser.add_argument("--minutes", type=float, help="of gpt and amoeba each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return report_again(options.report)
    if unknown := set(options.only or []) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    rounds.build(*EXAMPLES)
    partial, out = partial_of(options), options.out
    if options.only and not out:
        out = folders.PARTIAL / here().slug()
    for name in options.only or (PARTS if options.full else SHORT):
        run_part(name, options, partial, out and out / name)


if __name__ == "__main__":
    main()
