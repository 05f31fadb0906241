#!/usr/bin/env python3
"""The paper's tables and today's peers, side by side.                              (make bench, make bench-full)

Usage: bench.py [--full] [--only PART[,PART..]] [--minutes N] [--out FOLDER]
       bench.py --report FOLDER      (the report and the pictures again, from the raw data)

Parts: gpt and amoeba (steps of gpipe and of its peers in interleaved rounds, as many as end within their minutes, at least two),
memory (table 1: the largest network under a cap), scaling (tables 2 and 3: throughput over K and M), paper (--full: the paper's
own networks, simulated). Without --full fewer configurations, fewer minutes. One folder for each run
(default: benchmarks/DATE-MACHINE): raw data, environment.json, report.md and its pictures. What a run without --full
leaves out is said in its report.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import amoeba
import figures
import gpt
import memory
import plots
import rounds
import scaling
import steps
from figures import ROOT, of_table, spread

STEPS = {"gpt": gpt, "amoeba": amoeba}
PARTS = [*STEPS, "memory", "scaling", "paper"]
# Part -> minutes of rounds; and rounds of the scaling part: (short, full).
MINUTES = {"gpt": (8, 30), "amoeba": (4, 12)}
SCALING_ROUNDS = (3, 5)
# (network, size, samples of a mini-batch): tried in the short version, and in the full one.
CAPS = {False: [("transformer", 3, 32)], True: [("amoeba", 68, 64), ("transformer", 3, 32)]}
EXAMPLES = ["gpt_step", "amoeba_step", "memory", "scaling", "paper_tables"]
# Of the program `paper_tables`.
PAPER = ["throughput", "memory"]


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def environment(options, python, begun, load):
    return {
        "date": str(datetime.date.today()), "command": f"make bench{'-full' if options.full else ''}" if not options.only else
        "python3 benchmarks/bench.py " + " ".join(sys.argv[1:]), "full": options.full, "machine": figures.machine(),
        "kernel": platform.release(), "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "commit": figures.commit(), "rustc": figures.said_by("rustc", "--version"), "python": platform.python_version(),
        "torch": python.torch, "torchgpipe": rounds.TORCHGPIPE, "libtorch of gpipe": "2.11.0",
        "load before": load, "seconds": round(time.monotonic() - begun),
    }


def measure(options, out, python):
    short = not options.full
    begun, load = time.monotonic(), os.getloadavg()[0]
    note = lambda: (out / "environment.json").write_text(json.dumps(environment(options, python, begun, load), indent=1) + "\n")
    note()
    for part in options.only or PARTS:
        if part in STEPS:
            module = STEPS[part]
            jobs = {name: job for name, job in module.WORKLOAD.jobs.items()
                    if (options.full or job.short) and re.search(options.jobs, name)}
            minutes = options.minutes or MINUTES[part][options.full]
            rounds.measure(module.WORKLOAD, jobs, out / f"{part}.json", python, minutes=minutes)
        elif part == "memory":
            for network, size, samples in CAPS[options.full]:
                path = out / f"memory-{network}.jsonl"
                memory.measure(memory.NETWORKS[network], size, samples, 1, True, path)
        elif part == "scaling":
            for workload in STEPS if options.full else ["amoeba"]:
                scaling.measure(workload, SCALING_ROUNDS[options.full], out / f"scaling-{workload}.jsonl")
                print(f"scaling of {workload} done", file=sys.stderr, flush=True)
        elif options.full:
            for table in PAPER:
                said = subprocess.run([rounds.example("paper_tables"), table], capture_output=True, text=True, check=True, timeout=1800)
                (out / f"paper-{table}.md").write_text(said.stdout)
        note()
        report(out)
    return short


def picture(name, text):
    return [f"![{text}]({name})", ""]


def steps_section(module, out, pyplot):
    workload = module.WORKLOAD
    raw = json.loads((out / f"{workload.name}.json").read_text())
    results = raw["results"]
    what = " ".join(module.__doc__.split("\n\n")[0].split())
    canary = (f"Canary (a 512 x 512 float32 product), ms: {spread(raw['canary_ms'], 2)}. Two-core ceiling (products of two busy "
              f"cores over those of one): {spread(raw['ceiling'], 2)}. {len(raw['canary_ms'])} rounds; where that is fewer than six, an "
              "interval is least and most.")
    lines = [f"## {what}", "", canary, "",
             *steps.targets(workload, results, module.TARGETS), "",
             "Why not, where it was not kept:", "", module.WHY_NOT.strip(), "",
             *picture(plots.step_times(pyplot, workload, timed(results), out / f"{workload.name}-steps.svg"), "step times"),
             *steps.times(workload, results), "",
             "### What each measure brings", "",
             "What a profile or the parts of a step had shown, and what was done about it: `without` is before, `with` after, in the same rounds. "
             "([benchmarks/README.md](../README.md#what-profiles-showed) tells how each was found.)", "", *steps.ablations(workload, results, module.ABLATIONS), ""]
    if any(ablation.look(results, workload.step_ms) for ablation in module.ABLATIONS):
        lines += picture(plots.ablations(pyplot, workload, results, module.ABLATIONS, out / f"{workload.name}-ablations.svg"), "ablations")
    lines += ["### Where the time goes", "",
              "% of devices x step, the last of the steps (docs/bubble.md says what each part is); median of the rounds.", "",
              *picture(plots.breakdown(pyplot, workload, results, out / f"{workload.name}-parts.svg"), "parts of a step"),
              *steps.breakdown(results), "",
              "### Two stages against the simulator", "",
              "The simulator is given the median time of each kind of action on each stage in one step, and predicts the next one. "
              "Imbalance: the busiest stage's work over the mean.", "", *steps.efficiency(results), "",
              "### Memory", "",
              "Bytes of tensors at most, by the allocator's count (gpipe) or a profiler's (PyTorch): without what the programs have loaded. "
              "With weights, gradients and optimizer state.", "", *steps.memory(results), ""]
    return lines


def timed(results):
    return steps.timed(results)


def memory_section(out, pyplot):
    paths = [out / f"memory-{network}.jsonl" for network in memory.NETWORKS]
    founds = [memory.read(path) for path in paths if path.exists()]
    if not founds:
        return []
    lines = ["## Table 1: the largest network under a cap", "",
             "The paper's: AmoebaNet-D(18, 208), 82 million parameters, plainly in 8 GB and (18, 416), 318 million, on the same accelerator "
             "with GPipe: 3.9 times. A transformer of 3 blocks, 282 million, in 16 GB, and of 13, 786 million: 2.7 times. Here on one CPU "
             "device, measured, at the scale whose searches end in minutes on two cores (there was no GPU): the allocator refuses what is over the cap. The paper's own networks at its own caps are simulated "
             "(below, or in [docs/simulated-scale.md](../../docs/simulated-scale.md)).", "",
             *picture(plots.memory(pyplot, founds, out / "memory.svg"), "the largest network")]
    for found in founds:
        lines += [f"### The largest {found.network.title}", "", *memory.section(found), ""]
    return lines


def scaling_section(out, pyplot):
    paths = {workload: out / f"scaling-{workload}.jsonl" for workload in STEPS}
    paths = {workload: path for workload, path in paths.items() if path.exists()}
    if not paths:
        return []
    tables = {workload: scaling.normalised(path) for workload, path in paths.items()}
    lines = ["## Tables 2 and 3: throughput over K and M", "",
             "One mini-batch of 32 samples in every cell, GPipe's schedule, every micro-batch re-materialized, float32. K = 2 is measured, "
             "steps of each M in turn; K = 4 and 8 are simulated from the profile of the same machine, which has two cores. Each over the "
             "step of K = 2, M = 1, measured over measured and simulated over simulated. No number is fitted to the paper. Links: a latency "
             "of 50 us and the nominal rate; between threads what the profile says. Where measured and simulated differ for K = 2, so much may the other "
             "columns be off.", "",
             *picture(plots.scaling(pyplot, tables, scaling.PAPER, out / "scaling.svg"), "throughput over stages and micro-batches")]
    for workload, path in paths.items():
        lines += [f"### `{workload}`", "", *scaling.section(workload, path), ""]
    return lines


def paper_section(out):
    paths = [out / f"paper-{table}.md" for table in PAPER]
    tables = [path.read_text().replace("\n## ", "\n### ").removeprefix("## ") for path in paths if path.exists()]
    if not tables:
        return []
    return ["## Simulated: the paper's own networks on its own accelerators", "",
            "From shapes and data sheets alone: nothing here was measured, and no number is fitted to the paper. What the planner predicts "
            "in this way is held to runs on this machine by `make bench-prediction`. "
            "[docs/simulated-scale.md](../../docs/simulated-scale.md) explains the columns, and where the two differ.", "",
            *(line for table in tables for line in ["### " + table.rstrip("\n"), ""])]


def report(out):
    told = json.loads((out / "environment.json").read_text())
    pyplot = plots.library()
    lines = [f"# Benchmarks of {told['date']}", "", f"{told['machine']}; commit {told['commit']}; {told['seconds']} s.", "",
             "```sh", told["command"], "```", "",
             "Every program in a process of its own, in rounds; ratios are paired within a round: the median, in brackets an interval that has it "
             "in at least 95% of cases, or least and most. A figure above 1x: gpipe is faster.", "",
             *of_table(["", ""], [(key, value) for key, value in told.items() if key not in ("date", "machine", "commit", "command", "full",
                                                                                                "seconds")]), ""]
    if not told["full"]:
        lines += ["The short version: fewer configurations, no ablation that wants its own, torchgpipe and the paper's own networks left out. "
                  "`make bench-full` has all.", ""]
    for name, module in STEPS.items():
        if (out / f"{name}.json").exists():
            lines += steps_section(module, out, pyplot)
    lines += memory_section(out, pyplot) + scaling_section(out, pyplot) + paper_section(out)
    (out / "report.md").write_text("\n".join(lines).rstrip("\n") + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--jobs", default="", metavar="REGEX", help="of the parts gpt and amoeba: those of such names")
    parser.add_argument("--minutes", type=float, help="of the parts gpt and amoeba each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return report(options.report)
    if unknown := set(options.only or []) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: use some of {', '.join(PARTS)}")
    python = rounds.Python()
    plots.library()
    rounds.build(*EXAMPLES)
    out = options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-{slug(figures.cpu())}-{os.cpu_count()}-cores"
    out.mkdir(parents=True, exist_ok=True)
    measure(options, out, python)
    print(f"{out / 'report.md'}:\n")
    print((out / "report.md").read_text())


if __name__ == "__main__":
    main()
