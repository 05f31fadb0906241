#!/usr/bin/env python3
"""Every schedule, a step of each in turn, and what a profile predicted of them.
                                                                        (make bench-schedules)

Usage: schedules.py [--workload gpt|amoeba] [--rounds 5] [--micro-batches 4,8] [--passes 2]
                    [--out FOLDER]
       schedules.py --report FOLDER      (the report again, from its raw data)

All pipelines are in one process, with the same weights, and make one step each in turn, so that
what disturbs the machine disturbs all. Ratios are paired within a round. The profile, of --passes
times two steps under 1F1B and ZB-H1 in turn, is measured before. From it an order is made, too:
`auto`. More devices than the machine has cores are simulated from the costs that were measured on
two.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import folders
import rounds
from targets import side
from figures import commit, median, of_table, paragraph, with_interval, with_range
from machine import here

BASE = "1f1b"
# With more of them, `gpt` takes over an hour: its steps take seconds.
ROUNDS, PASSES, MICRO_BATCHES = 5, 2, "4,8"
LIMIT_S = 3600
WHAT = (
    "A step of each schedule in turn, K = 2 stages on two devices, nothing recomputed. A gain is"
    " 1F1B's step over the schedule's, paired within a round: above 1 the schedule is faster. The"
    " predicted gain is from a profile that was measured before."
)


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def mib(count):
    return f"{count / 2**20:,.0f}"


class OfTwo:
    """What was measured and predicted of one M on two devices."""

    def __init__(self, lines, m):
        own = [
            line
            for line in lines
            if "devices" not in line and "alone" not in line and line["micro_batches"] == m
        ]
        self.predicted = {line["schedule"]: line for line in own if "predicted_ms" in line}
        self.rounds = {}
        for line in own:
            if "round" in line:
                self.rounds.setdefault(line["schedule"], {})[line["round"]] = line
        self.numbers = sorted(self.rounds[BASE])

    def of(self, name, look):
        """What `look` says of a schedule's rounds."""
        return [look(self.rounds[name][number]) for number in self.numbers]

    def over_base(self, name, look):
        """1F1B's over the schedule's, by round."""
        return [a / b for a, b in zip(self.of(BASE, look), self.of(name, look), strict=True)]

    def gains(self, name):
        return self.over_base(name, lambda line: line["step_ms"])

    def predicted_gain(self, name):
        return self.predicted[BASE]["predicted_ms"] / self.predicted[name]["predicted_ms"]


def sizes(lines):
    return sorted({one["micro_batches"] for one in lines if "round" in one and "alone" not in one})


def gains_table(lines):
    """Measured gains beside predicted ones."""
    rows = []
    for m in sizes(lines):
        two = OfTwo(lines, m)
        for name in two.rounds:
            gains, told = two.gains(name), two.predicted_gain(name)
            times = with_range(two.of(name, lambda line: line["step_ms"]))
            verdict = "" if name == BASE else side(gains)
            cells = [*times, *with_interval(gains), f"{told:.3f}", f"{told / median(gains):.3f}"]
            rows.append([m, f"`{name}`", *cells, verdict])
    header = ["M", "schedule", "step, ms", "least .. most", "gain", "interval", "predicted gain"]
    return [*header, "predicted / measured", "verdict"], rows


def details_table(lines):
    """Bubble, backward and bytes of each schedule, measured and predicted."""
    rows = []
    for m in sizes(lines):
        two = OfTwo(lines, m)
        for name in two.rounds:
            backward = [
                1 / ratio for ratio in two.over_base(name, lambda one: sum(one["backward_ms"]))
            ]
            bubble = 100 * median(two.of(name, lambda line: line["bubble"]))
            told = two.predicted[name]
            peaks = [max(two.of(name, lambda line: line["peaks"][device])) for device in range(2)]
            cells = [f"{bubble:.1f}", f"{100 * told['predicted_bubble']:.1f}"]
            cells += [
                *with_interval(backward),
                *map(mib, [max(peaks), max(told["predicted_peaks"])]),
            ]
            rows.append([m, f"`{name}`", *cells])
    header = ["M", "schedule", "bubble, %", "predicted, %", "backward over 1F1B's", "interval"]
    return of_table([*header, "fullest device, MiB", "predicted, MiB"], rows)


def alone_table(lines):
    """Split backwards beside whole ones, on one device."""
    lines = [line for line in lines if "alone" in line]
    rows = []
    for m in sorted({line["micro_batches"] for line in lines}):
        own = {(one["alone"], one["round"]): one for one in lines if one["micro_batches"] == m}
        numbers = sorted({number for _, number in own})
        times = [own["whole", number]["step_ms"] for number in numbers]
        cells = with_range(times)
        for key in ["backward_ms", "step_ms"]:
            ratios = [own["halves", number][key] / own["whole", number][key] for number in numbers]
            cells += with_interval(ratios)
        rows.append([m, *cells])
    header = ["M", "whole: step, ms", "least .. most", "I + W over B", "interval"]
    return of_table([*header, "step over the whole one's", "interval"], rows) if rows else []


def more_table(lines):
    """More devices, simulated."""
    lines = [line for line in lines if "devices" in line]
    rows = []
    for samples, devices in sorted({(line["samples"], line["devices"]) for line in lines}):
        own = {
            line["schedule"]: line
            for line in lines
            if (line["samples"], line["devices"]) == (samples, devices)
        }
        base = own[BASE]
        if "why" in base:
            continue
        for name, line in own.items():
            row = [samples, base["layers"], devices, base["micro_batches"], f"`{name}`"]
            if "why" in line:
                rows.append([*row, "too few layers", "", "", "", ""])
                continue
            gain = base["simulated_ms"] / line["simulated_ms"]
            cells = [f"{line['simulated_ms']:.0f}", f"{gain:.3f}", f"{100 * line['bubble']:.1f}"]
            bound = line.get("bound_ms")
            above = f"{100 * (line['simulated_ms'] / bound - 1):.1f}" if bound else ""
            rows.append([*row, *cells, mib(line["peak"]), above])
    header = ["samples of a micro-batch", "layers", "K", "M", "schedule", "step, ms", "gain"]
    return of_table([*header, "bubble, %", "fullest device, MiB", "above the bound, %"], rows)


def report(folder):
    """The text of the report."""
    raw = read(folder)
    lines = raw["lines"]
    passes = f", of {raw['passes']} passes" if "passes" in raw else ""
    text = [
        *folders.heading(f"Schedules beside each other: `{raw['workload']}`", folder),
        *paragraph(
            f"{WHAT} Rounds: {raw['rounds']}. The profile is of two steps{passes}. Losses of all"
            " schedules are the same to the bit in every round."
        ),
        "",
        *of_table(*gains_table(lines)),
        "",
        "## What they take and hold",
        "",
        *details_table(lines),
        "",
    ]
    if alone := alone_table(lines):
        text += [
            "## On one device alone",
            "",
            *paragraph(
                "Split backwards (I, then W), in the order of ZB-H1's last device of two, and whole"
                " ones (B), each in turn: what splitting costs by itself. On two devices a schedule"
                " with a smaller bubble also has more that runs at once, on one memory."
            ),
            "",
            *alone,
            "",
        ]
    text += [
        "## More devices, simulated",
        "",
        *paragraph(
            "Simulated from the costs measured on two devices: four micro-batches for each device,"
            " the best cut that was found, nothing recomputed. `auto` is an order made for these"
            " costs; the bound is what no order of its stages undercuts."
        ),
        "",
        *more_table(lines),
    ]
    return "\n".join(text) + "\n"


def summary(parts):
    """The section of RESULTS.md: of each workload the schedule with the largest gain."""
    header, shown = [], []
    for folder in parts.values():
        raw = read(folder)
        header, rows = gains_table(raw["lines"])
        best = max(rows, key=lambda row: float(row[header.index("gain")]))
        shown.append([f"`{raw['workload']}`", *best])
    what = f"{WHAT} Shown is the schedule with the largest gain."
    return [*paragraph(what), "", *of_table(["workload", *header], shown), ""]


def partial_of(options):
    missing = set(MICRO_BATCHES.split(",")) - set(options.micro_batches.split(","))
    return folders.reasons(
        (options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"),
        (options.passes < PASSES, f"{options.passes} passes, not {PASSES}"),
        (missing, f"--micro-batches {options.micro_batches}, not {MICRO_BATCHES}"),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=["gpt", "amoeba"], default="gpt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--micro-batches", default=MICRO_BATCHES)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    rounds.build("schedules")
    settings = {
        "workload": options.workload,
        "rounds": options.rounds,
        "micro_batches": options.micro_batches,
        "passes": options.passes,
    }
    command = [rounds.driver("schedules"), *(f"{key}={value}" for key, value in settings.items())]
    name = f"schedules-{options.workload}"
    with folders.run(name, report, partial_of(options), options.out) as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            sys.exit(done.stderr)
        raw = {
            "workload": options.workload,
            "rounds": options.rounds,
            "passes": options.passes,
            "machine": here().title(),
            "commit": commit(),
            "lines": [json.loads(line) for line in done.stdout.splitlines()],
        }
        (folder / "raw.json").write_text(json.dumps(raw) + "\n")


if __name__ == "__main__":
    main()
