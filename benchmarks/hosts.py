#!/usr/bin/env python3
"""A transformer on 64 hosts, simulated, with links as measured on loopback and of data sheets.

Usage: hosts.py [--out FOLDER]
       hosts.py --report FOLDER      (the report again, from its raw data)

Links between threads and between processes are what `gpipe profile configs/small.toml` found on
loopback, alone and under `gpipe launch --processes 2`. The layers' costs are analytic. Nothing of
it is run: there are no 64 hosts. It is a calculation, the same on every machine.
docs/design/simulated-scale.md explains it.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import folders
import rounds
from figures import ROOT, commit, of_table, paragraph

MICRO_BATCHES = [64, 128, 512]
NETWORK = ["plan", "configs/gpt.toml", "--set", "model.blocks=128"]
NETWORK += ["--set", "train.mini_batch=512"]
COSTS = ["--analytic", "--flops", "1.4e11", "--bandwidth", "2e10", "--devices", "64"]
COSTS += ["--stages", "64", "--schedule", "1f1b", "--remat", "never"]
# Microseconds, and bytes per second; 0: values are not copied.
LINKS = {
    "threads": (62, 0),
    "processes, loopback": (463, 4.55e9),
    "10 Gbit/s": (50, 1.25e9),
    "100 Mbit/s": (20_000, 1.25e7),
}
LIMIT_S = 1200


def run(arguments):
    command = [str(rounds.GPIPE), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout


def simulated(latency, bandwidth, micro_batches, folder):
    flags = ["--link-latency", str(latency), "--micro-batches", str(micro_batches)]
    flags += ["--link-bandwidth", str(bandwidth)] if bandwidth else []
    text = run([*NETWORK, *COSTS, *flags, "--out", str(folder / "plan.json")])
    found = re.search(r"^step ([\d.]+) s, bubble ([\d.]+)%, peak ([\d.]+ [GM]iB)$", text, re.M)
    step, bubble, peak = found.groups()
    return {
        "micro_batches": micro_batches,
        "step_s": float(step),
        "bubble_percent": float(bubble),
        "peak": peak,
    }


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def table(raw):
    rows = []
    for link in raw["links"]:
        rate = f"{link['bytes_per_s'] / 1e9:.2f}" if link["bytes_per_s"] else "no copy"
        for cell in link["cells"]:
            row = [link["name"], f"{link['latency_us']:.0f}", rate, cell["micro_batches"]]
            rows.append([*row, f"{cell['step_s']:.1f}", cell["bubble_percent"], cell["peak"]])
    header = ["links", "latency, us", "GB/s", "M", "step, s", "bubble, %", "fullest stage"]
    return of_table(header, rows)


WHAT = (
    "A transformer of 128 blocks cut into 64 stages on 64 hosts, 1F1B, simulated: nothing was run."
    " The layers' costs are analytic, and links have the latency and rate in the table."
)


def report(folder):
    """The text of the report."""
    raw = read(folder)
    lines = [*folders.heading("64 hosts, simulated", folder), *paragraph(WHAT), ""]
    if "plan" in raw:
        lines += ["```sh", raw["plan"], "```", ""]
    lines += table(raw)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    rounds.build_gpipe()
    with folders.run("hosts", report, out=options.out) as folder:
        links = []
        with tempfile.TemporaryDirectory() as scratch:
            for name, (latency, bandwidth) in LINKS.items():
                cells = [simulated(latency, bandwidth, m, Path(scratch)) for m in MICRO_BATCHES]
                link = {"name": name, "latency_us": latency, "bytes_per_s": bandwidth}
                links.append({**link, "cells": cells})
        flags = "--micro-batches M --link-latency LATENCY --link-bandwidth BYTES_PER_SECOND"
        plan = f"gpipe {' '.join(NETWORK)} \\\n    {' '.join(COSTS)} \\\n    {flags}"
        raw = {"commit": commit(), "plan": plan, "links": links}
        (folder / "raw.json").write_text(json.dumps(raw) + "\n")


if __name__ == "__main__":
    main()
