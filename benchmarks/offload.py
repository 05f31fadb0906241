#!/usr/bin/env python3
"""Time and memory of a step under each re-materialization policy, offload among them.

Usage: offload.py [--rounds 3] [--program target/release/gpt_step] [--folder DIR] [--out FOLDER]
       offload.py --report FOLDER      (the report again, from its raw data)

The model is a transformer of 8 blocks (256 features, 256 tokens) in two stages. A step has 8
micro-batches of 4 texts. Under `gpipe` all micro-batches are in flight at once; under `1f1b` two on
the first stage. Each round runs every policy once, in a separate process and in an order that
rotates. The first step is not counted. --folder sets the folder for offloaded activations, by
default the system's temporary folder.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

import folders
from figures import ROOT, median, of_table, paragraph, with_range

PART = "offload"
SCHEDULES = ["gpipe", "1f1b"]
POLICIES = ["never", "unless-adjacent", "always", "selective", "offload"]
SETTINGS = {
    "stages": 2,
    "micro_batches": 8,
    "samples": 32,
    "steps": 4,
    "blocks": 8,
    "features": 256,
    "heads": 4,
    "hidden": 1024,
    "length": 256,
    "vocabulary": 2048,
}
RAW = "runs.jsonl"
MIB = 1 << 20


def run(program, schedule, policy, folder):
    """Runs one process. Returns its measurements of the steps."""
    settings = {**SETTINGS, "schedule": schedule, "remat": policy}
    command = [program, *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, **({"TMPDIR": str(folder)} if folder else {})}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments, folder):
    """Runs all rounds, and writes one line for each process."""
    jobs = [(schedule, policy) for schedule in SCHEDULES for policy in POLICIES]
    with (folder / RAW).open("w") as raw:
        for number in range(arguments.rounds):
            first = number % len(jobs)
            for schedule, policy in jobs[first:] + jobs[:first]:
                found = run(arguments.program, schedule, policy, arguments.folder)
                told = {key: found[key] for key in ("loss", "step_ms", "peak_bytes")}
                line = {"round": number, "schedule": schedule, "remat": policy, **told}
                print(json.dumps(line), file=raw, flush=True)


def report(folder):
    """The report of a run's folder."""
    runs = [json.loads(line) for line in (folder / RAW).read_text().splitlines()]
    header = ["schedule", "policy", "MiB, stage 0", "MiB, stage 1", "fastest ms", "ms"]
    header.append("least .. most")
    rows = []
    for schedule in SCHEDULES:
        for policy in POLICIES:
            own = [one for one in runs if (one["schedule"], one["remat"]) == (schedule, policy)]
            held = [max(one["peak_bytes"][stage] for one in own) / MIB for stage in (0, 1)]
            times = [median(one["step_ms"][1:]) for one in own]
            cells = [f"`{schedule}`", f"`{policy}`", *(f"{one:.0f}" for one in held)]
            fastest = min(time for one in own for time in one["step_ms"][1:])
            rows.append([*cells, f"{fastest:.0f}", *with_range(times)])
    equal = len({json.dumps(one["loss"]) for one in runs}) == 1
    rounds = len({one["round"] for one in runs})
    said = (
        "The most bytes of tensors that a stage held, the fastest of all steps and the median step "
        f"of {rounds} processes. Other work on the machine disturbs the fastest step least. "
        f"The losses of all steps are {'equal to the bit' if equal else 'NOT equal'}. Offloaded "
        "activations went to a file in the page cache or on the disk, as the system chose."
    )
    title = folders.heading("Re-materialization policies beside offload", folder)
    return "\n".join([*title, *of_table(header, rows), "", *paragraph(said), ""])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", type=Path, default=ROOT / "target" / "release" / "gpt_step")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if arguments.report:
        return folders.rewrite(arguments.report, report)
    partial = folders.reasons((arguments.rounds < 3, "fewer than three rounds"))
    with folders.run(PART, report, partial, arguments.out) as folder:
        measure(arguments, folder)


if __name__ == "__main__":
    main()
