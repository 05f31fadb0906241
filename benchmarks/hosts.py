#!/usr/bin/env python3
"""A transformer on 64 hosts, simulated, with links that were measured here and links of data sheets.

Usage: hosts.py [--out FOLDER]
       hosts.py --report FOLDER      (the report again, from its raw data)

Links between threads and between processes are what `gpipe profile` found of them on loopback, alone and under `gpipe launch --processes 2`; the
layers' costs are analytic. Nothing of it is run: there are no 64 hosts. It is a calculation, the same on every machine.
"""

import argparse
import datetime
import json
import re
import subprocess
import tempfile
from pathlib import Path

from figures import ROOT, commit, of_table

GPIPE = ROOT / "target" / "release" / "gpipe"
MICRO_BATCHES = [64, 128, 512]
PLAN = ["plan", "configs/gpt.toml", "--set", "model.blocks=128", "--set", "train.mini_batch=512", "--analytic", "--rate", "1.4e11", "--bandwidth", "2e10",
        "--devices", "64", "--stages", "64", "--schedule", "1f1b", "--remat", "never"]
# Microseconds, and bytes per second; 0: values are not copied. Those measured: 2026-11-22, AMD EPYC, 2 cores, loopback, `gpipe profile configs/small.toml`.
LINKS = {"threads, as measured": (62, 0), "processes, as measured": (463, 4.55e9), "10 Gbit/s, 50 us": (50, 1.25e9), "100 Mbit/s, 20 ms": (20_000, 1.25e7)}


def run(arguments):
    result = subprocess.run([str(GPIPE), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=True)
    return result.stdout


def simulated(latency, bandwidth, micro_batches, folder):
    between = ["--link-latency", str(latency), *(["--link-bandwidth", str(bandwidth)] if bandwidth else [])]
    text = run([*PLAN, "--micro-batches", str(micro_batches), *between, "--out", str(Path(folder) / "plan.json")])
    found = re.search(r"^step ([\d.]+) s, bubble ([\d.]+)%, peak ([\d.]+ [GM]iB)$", text, re.M)
    step, bubble, peak = found.groups()
    return {"micro_batches": micro_batches, "step_s": float(step), "bubble_percent": float(bubble), "peak": peak}


def report(folder, raw):
    rows = []
    for one in raw["links"]:
        copied = f", {one['bytes_per_s'] / 1e9:.2f} GB/s" if one["bytes_per_s"] else ", no copy"
        name = f"{one['name']} ({one['latency_us']:.0f} us{copied})"
        rows.append([name, *(f"{cell['step_s']:.1f}, {cell['bubble_percent']:.1f}%" for cell in one["cells"])])
    rows.append(["most bytes of a stage", *(cell["peak"] for cell in raw["links"][0]["cells"])])
    lines = ["# 64 hosts, simulated", "",
             f"Commit {raw['commit']}. Layers' costs are analytic (1.4e11 FLOP/s and 20 GB/s for each of 64 stages); of the links those between threads and between processes "
             "were measured on loopback (2026-11-22, AMD EPYC, 2 cores).", "",
             "```sh", "python3 benchmarks/hosts.py",
             f"gpipe {' '.join(PLAN)} --micro-batches M --link-latency L --link-bandwidth B", "```", "",
             *of_table(["step in s, bubble", *(f"M = {m}" for m in MICRO_BATCHES)], rows)]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--report", metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        return report(folder, json.loads((folder / "raw.json").read_text()))
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "-p", "gpipe-cli"], cwd=ROOT, check=True)
    folder = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-64-hosts")
    folder.mkdir(parents=True, exist_ok=True)
    links = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (latency, bandwidth) in LINKS.items():
            cells = [simulated(latency, bandwidth, m, scratch) for m in MICRO_BATCHES]
            links.append({"name": name, "latency_us": latency, "bytes_per_s": bandwidth, "cells": cells})
    raw = {"commit": commit(), "links": links}
    (folder / "raw.json").write_text(json.dumps(raw) + "\n")
    report(folder, raw)


if __name__ == "__main__":
    main()
