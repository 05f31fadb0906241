#!/usr/bin/env python3
"""1F1B, ZB-H1 and interleaved stages beside each other, in turn, and what profiles predicted of them.     (make bench-schedules)

Usage: schedules.py [--workload gpt|amoeba] [--rounds 9] [--micro-batches 4,8] [--passes 8] [--out FOLDER]
       schedules.py --report FOLDER      (the report again, from its raw data)

All pipelines are in one process, with the same weights, and make one step each in turn, so that what disturbs the machine disturbs
all; ratios are paired within a round. The profile, of --passes times two steps under each schedule in turn, is measured before. More devices than the machine has cores for are simulated from the
costs that were measured on two, and marked so.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from figures import cpu, interval

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "target" / "release" / "examples" / "schedules"
BASE = "1f1b"
MEDIAN = statistics.median


def mib(count):
    return f"{count / 2**20:,.0f}"


def of_two(lines):
    """Measured beside predicted, on two devices."""
    out = []
    for m in sorted({line["micro_batches"] for line in lines if "round" in line and "alone" not in line}):
        own = [line for line in lines if "devices" not in line and "alone" not in line and line["micro_batches"] == m]
        predicted = {line["schedule"]: line for line in own if "predicted_ms" in line}
        rounds = {}
        for line in own:
            if "round" in line:
                rounds.setdefault(line["schedule"], {})[line["round"]] = line
        numbers = sorted(rounds[BASE])
        out += [f"## K = 2, M = {m}", "",
                "| schedule | step, ms | 1F1B's step over it: measured | predicted | predicted / measured gain | bubble: measured | predicted | backward over 1F1B's | "
                "peak MiB per device: measured | predicted |",
                "|---|---|---|---|---|---|---|---|---|---|"]
        for name, found in rounds.items():
            times = [found[n]["step_ms"] for n in numbers]
            gains = [rounds[BASE][n]["step_ms"] / found[n]["step_ms"] for n in numbers]
            told = predicted[BASE]["predicted_ms"] / predicted[name]["predicted_ms"]
            backward = [sum(found[n]["backward_ms"]) / sum(rounds[BASE][n]["backward_ms"]) for n in numbers]
            peaks = [max(found[n]["peaks"][d] for n in numbers) for d in range(2)]
            out.append(f"| {name} | {MEDIAN(times):.0f} [{min(times):.0f} .. {max(times):.0f}] | {interval(gains)} | {told:.3f} | {told / MEDIAN(gains):.3f} | "
                       f"{100 * MEDIAN([found[n]['bubble'] for n in numbers]):.1f}% | {100 * predicted[name]['predicted_bubble']:.1f}% | {interval(backward)} | "
                       f"{', '.join(map(mib, peaks))} | {', '.join(map(mib, predicted[name]['predicted_peaks']))} |")
        out.append("")
    return out


def of_one(lines):
    """Backwards in halves beside whole ones, on one device."""
    lines = [line for line in lines if "alone" in line]
    if not lines:
        return []
    out = ["## On one device alone", "",
           "Backwards in halves, in the order of ZB-H1's last device of two, and whole ones, each in turn: what halves cost by themselves. On two devices a schedule "
           "with a smaller bubble also has more that runs at once, on one memory.", "",
           "| M | whole: step, ms | I + W over B | step over the whole one's |", "|---|---|---|---|"]
    for m in sorted({line["micro_batches"] for line in lines}):
        own = {(line["alone"], line["round"]): line for line in lines if line["micro_batches"] == m}
        numbers = sorted({n for _, n in own})
        ratio = lambda key: interval([own["halves", n][key] / own["whole", n][key] for n in numbers])
        times = [own["whole", n]["step_ms"] for n in numbers]
        out.append(f"| {m} | {MEDIAN(times):.0f} [{min(times):.0f} .. {max(times):.0f}] | {ratio('backward_ms')} | {ratio('step_ms')} |")
    return out + [""]


def of_more(lines):
    """Simulated from the costs measured on two devices."""
    lines = [line for line in lines if "devices" in line]
    out = ["## More devices, simulated", "",
           "Every cell is simulated from the costs measured on two devices, four micro-batches for each device, the best cut that was found, nothing recomputed.", "",
           "| samples of a micro-batch | layers | K | M | 1F1B: step ms, bubble | ZB-H1: gain, bubble | interleaved:2: gain, bubble | peak of a device, MiB: 1F1B | ZB-H1 | interleaved:2 |",
           "|---|---|---|---|---|---|---|---|---|---|"]
    keys = sorted({(line["samples"], line["devices"]) for line in lines})
    for samples, devices in keys:
        own = {line["schedule"]: line for line in lines if (line["samples"], line["devices"]) == (samples, devices)}
        base = own[BASE]
        if "why" in base:
            continue
        cells = [str(samples), str(base["layers"]), str(devices), str(base["micro_batches"]), f"{base['simulated_ms']:.0f}, {100 * base['bubble']:.1f}%"]
        for name in ["zb-h1", "interleaved:2"]:
            line = own[name]
            cells.append("too few layers" if "why" in line else f"{base['simulated_ms'] / line['simulated_ms']:.3f}, {100 * line['bubble']:.1f}%")
        cells += ["-" if "why" in own[name] else mib(own[name]["peak"]) for name in [BASE, "zb-h1", "interleaved:2"]]
        out.append("| " + " | ".join(cells) + " |")
    return out


def report(folder, raw):
    lines = [f"# Schedules beside each other: `{raw['workload']}`", "",
             f"{raw['cpu']}, {raw['cores']} cores; commit {raw['commit']}; {raw['rounds']} rounds, a step of each schedule in turn"
             + (f"; profiles of {raw['passes']} passes of two steps." if "passes" in raw else "."), "",
             "```sh", f"python3 benchmarks/schedules.py --workload {raw['workload']} --rounds {raw['rounds']}", "```", "",
             "Gains are 1F1B's step over the schedule's, paired within a round: the median with an interval of at least 95% (of fewer than six: least and "
             "most). Losses of all schedules are the same, to the bit, in every round.", ""]
    lines += of_two(raw["lines"]) + of_one(raw["lines"]) + of_more(raw["lines"])
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["gpt", "amoeba"], default="gpt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-batches", default="4,8")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--out")
    parser.add_argument("--report", metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        return report(folder, json.loads((folder / "raw.json").read_text()))
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "-p", "gpipe-models", "--example", "schedules"], cwd=ROOT, check=True)
    folder = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-schedules-{options.workload}")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(EXAMPLE), f"workload={options.workload}", f"rounds={options.rounds}", f"micro_batches={options.micro_batches}",
               f"passes={options.passes}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if result.returncode:
        sys.exit(result.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    raw = {"workload": options.workload, "rounds": options.rounds, "cpu": cpu(), "cores": os.cpu_count(), "commit": commit, "passes": options.passes,
           "lines": [json.loads(line) for line in result.stdout.splitlines()]}
    (folder / "raw.json").write_text(json.dumps(raw) + "\n")
    report(folder, raw)


if __name__ == "__main__":
    main()
