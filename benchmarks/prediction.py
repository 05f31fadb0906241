#!/usr/bin/env python3
"""Predicted against measured: `gpipe plan` beside `gpipe train`, in rounds.      (make bench-prediction)

Usage: prediction.py [--workload gpt|amoeba] [--rounds 3] [--out FOLDER]
       prediction.py --report FOLDER      (the report again, from its raw data)

A round goes M by M, from another one each time: it measures a new profile of that M with two stages, plans every configuration
with it, and only then trains each of them for a few steps. So every prediction is on disk before the run that it is about, and
comes from other runs, which are minutes old at most. The planner's own choice has a profile of all M of its own. What is compared: the median of the steps after the first, and the most bytes that each stage held, with
the plan's. Ratios are paired within a round (this machine's speed drifts by the hour); the interval is Student's at 95% over the
rounds.

A shared machine is disturbed for seconds at a time, by up to a half. So a profile and a run begin when a canary on both cores (a fixed
sum) has been within 10% of its best for a second, or after a minute of waiting; and a run whose steps are spread (quartiles apart by over
12% of the median) is repeated, at most twice: the least spread one counts. Which one counts is decided by the run alone, never by what
was predicted; how often either happened is in the report.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "release" / "gpipe"
MEDIAN = statistics.median
# Student's t at 97.5% by degrees of freedom; above nine a normal distribution will do.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
MICRO_BATCHES = [2, 4, 8, 16, 32]
WORKLOADS = {
    # name: (configuration, its changes, steps of a run, of a profile, and of the one of all M)
    "gpt": ("configs/gpt.toml", [], 6, 3, 1),
    "amoeba": ("configs/amoebanet-glyphs.toml", [
        "model.cells=6", "model.filters=128", "model.drop_path=0", "model.auxiliary=0", "images.size=64", "train.mini_batch=32",
        "train.validate_every=0", "train.label_smoothing=0", "data.variations=1"], 26, 12, 6),
}
KEEPING, DISCARDING = "never", "always"
# The planner's own choice of everything.
FREE = ("any", "any", "any")


def configurations(workload):
    """(M, schedule, re-materialization); of the slow workload one M with re-materialization."""
    again = MICRO_BATCHES if workload == "amoeba" else [8]
    return [(m, schedule, remat) for remat, sizes in [(KEEPING, MICRO_BATCHES), (DISCARDING, again)]
            for schedule in ["gpipe", "1f1b"] for m in sizes] + [FREE]


def canary(_=None):
    start = time.perf_counter()
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    return time.perf_counter() - start


class Quiet:
    """Waits until the machine is as fast as it was at best."""

    def __init__(self, pool):
        self.pool, self.best, self.waited_s = pool, math.inf, 0.0

    def wait(self):
        start, good = time.perf_counter(), 0
        while good < 7 and time.perf_counter() - start < 60:
            worst = max(self.pool.map(canary, range(2)))
            self.best = min(self.best, worst)
            good = good + 1 if worst <= 1.1 * self.best else 0
        self.waited_s += time.perf_counter() - start


def spread(steps):
    steps = sorted(steps[1:])
    return (steps[3 * len(steps) // 4] - steps[len(steps) // 4]) / MEDIAN(steps)


def gpipe(*arguments):
    result = subprocess.run([str(GPIPE), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=1800)
    if result.returncode:
        sys.exit(f"gpipe {' '.join(map(str, arguments))} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def one_round(workload, groups, folder, quiet):
    config, changes, steps, of_profile, of_all = WORKLOADS[workload]
    common = [config, *(f"--set={change}" for change in changes)]
    profile_s, found = {}, []
    for sizes, group in groups:
        profile = folder / f"{'-'.join(map(str, sizes))}.profile.json"
        quiet.wait()
        start = time.perf_counter()
        gpipe("profile", *common, f"--set=pipeline.micro_batches={sizes[0]}", "--stages", 2, "--micro-batches",
              ",".join(map(str, sizes)), "--steps", of_profile if len(sizes) == 1 else of_all, "--out", profile)
        profile_s[",".join(map(str, sizes))] = time.perf_counter() - start
        plans = []
        for m, schedule, remat in group:
            plan = folder / f"{m}-{schedule}-{remat}.plan.json"
            choices = [("--micro-batches", m), ("--schedule", schedule), ("--remat", remat)]
            chosen = [str(part) for name, value in choices if value != "any" for part in (name, value)]
            gpipe("plan", *common, "--profile", profile, "--devices", 2, *chosen, "--out", plan)
            plans.append(plan)
        for key, plan in zip(group, plans):
            tries = []
            while len(tries) < 3 and (not tries or spread(tries[-1]["step_ms"]) > 0.12):
                quiet.wait()
                tries.append(run([*common, "--steps", steps], key, plan, folder))
            found.append({**min(tries, key=lambda one: spread(one["step_ms"])), "tries": len(tries)})
    return {"profile_s": profile_s, "found": found, "waited_s": quiet.waited_s}


def run(common, key, plan, folder):
    m, schedule, remat = key
    out = folder / f"run-{m}-{schedule}-{remat}"
    before = canary()
    gpipe("train", *common, "--plan", plan, "--every", "none", "--out", out, "--set=train.validation_tokens=128")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "step"]
    subprocess.run(["rm", "-r", str(out)], check=True)
    predicted = json.loads(plan.read_text())
    return {
        "micro_batches": m, "schedule": schedule, "remat": remat, "canary_s": [before, canary()],
        "balance": predicted["plan"]["balance"],
        "plan": [predicted["plan"][key] for key in ["micro_batches", "schedule", "remat"]],
        "predicted_ms": predicted["predicted"]["step"] / 1e6,
        "predicted_peaks": predicted["predicted"]["peaks"],
        "step_ms": [line["step_ms"] for line in lines],
        "stages": lines[-1]["stages"],
        "peaks": [max(line["stages"][k]["peak_bytes"] for line in lines) for k in range(2)],
    }


def groups(workload, number):
    """(sizes to profile, configurations that are planned with it), in the order of round `number`."""
    all = configurations(workload)
    own = [([m], [key for key in all if key[0] == m]) for m in MICRO_BATCHES] + [(MICRO_BATCHES, [FREE])]
    shift = number * 2 % len(own)
    return own[shift:] + own[:shift]


def interval(ratios):
    middle = statistics.mean(ratios)
    if len(ratios) < 3:
        # Of two Student's interval says nothing.
        return f"{middle:.3f} [{min(ratios):.3f} .. {max(ratios):.3f}]"
    half = STUDENT.get(len(ratios) - 1, 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{middle:.3f} ± {half:.3f}"


def report(folder, raw):
    done = len(raw["rounds"])
    lines = [f"# Predicted against measured: `{raw['workload']}`", "",
             f"{raw['machine']}; commit {raw['commit']}; {done} rounds; a profile takes "
             f"{MEDIAN([own for one in raw['rounds'] for size, own in one['profile_s'].items() if ',' not in size]):.0f} s "
             "(of one M, under both schedules).", "",
             "```sh", f"python3 benchmarks/prediction.py --workload {raw['workload']} --rounds {done}", "```", "",
             "Step: the plan's over the median measured one (without the first), paired within a round: the mean, and Student's interval at",
             "95% (of fewer than three rounds: least and most). Bytes: the plan's peak over the measured one, the largest and the smallest ratio of both stages.", "",
             "| M | schedule | re-materialization | layers per stage | measured step, ms | predicted / measured | peak bytes, predicted / measured |",
             "|---|---|---|---|---|---|---|"]
    far, far_bytes, total = [], [], 0
    for key in configurations(raw["workload"]):
        runs = [run for one in raw["rounds"] for run in one["found"]
                if (run["micro_batches"], run["schedule"], run["remat"]) == key]
        measured = [MEDIAN(run["step_ms"][1:]) for run in runs]
        ratios = [run["predicted_ms"] / step for run, step in zip(runs, measured)]
        bytes_ratios = [p / m for run in runs for p, m in zip(run["predicted_peaks"], run["peaks"])]
        if not runs:
            continue
        total += 1
        if not 0.95 <= statistics.mean(ratios) <= 1.05:
            far.append(key)
        if not all(0.95 <= ratio <= 1.05 for ratio in bytes_ratios):
            far_bytes.append(key)
        cuts = sorted({" + ".join(map(str, run["balance"])) for run in runs})
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {' or '.join(cuts)} | {MEDIAN(measured):.0f} "
                     f"[{min(measured):.0f} .. {max(measured):.0f}] | {interval(ratios)} | "
                     f"{min(bytes_ratios):.3f} .. {max(bytes_ratios):.3f} |")
    free = {f"M = {run['plan'][0]}, {run['plan'][1]}, {run['plan'][2]}" for one in raw["rounds"] for run in one["found"]
            if run["micro_batches"] == FREE[0]}
    lines += ["", f"`any`: the planner's own choice: {'; '.join(sorted(free))}."] if free else []
    canaries = [MEDIAN(run["canary_s"]) for one in raw["rounds"] for run in one["found"]]
    lines += ["", f"The step within 5% in {total - len(far)} of {total} configurations"
              + (f"; not in {', '.join(map(str, far))}" if far else "") + f". The bytes within 5% in {total - len(far_bytes)} of {total}"
              + (f"; not in {', '.join(map(str, far_bytes))}" if far_bytes else "") + ".",
              f"Canary: {MEDIAN(canaries):.3f} s [{min(canaries):.3f} .. {max(canaries):.3f}]; waited for quiet "
              f"{sum(one.get('waited_s', 0) for one in raw['rounds']):.0f} s; "
              f"{sum(run.get('tries', 1) > 1 for one in raw['rounds'] for run in one['found'])} runs repeated, "
              f"{sum(spread(run['step_ms']) > 0.12 for one in raw['rounds'] for run in one['found'])} still spread."]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def machine():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":")[1].strip() + f", {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--report", metavar="FOLDER")
    parser.add_argument("--more", action="store_true", help="add rounds to those that are in --out")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        return report(folder, json.loads((folder / "raw.json").read_text()))
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "--bin", "gpipe"], cwd=ROOT, check=True)
    out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-prediction-{options.workload}")
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    raw = {"workload": options.workload, "machine": machine(), "commit": commit.stdout.strip(), "rounds": []}
    if options.more:
        raw = json.loads((out / "raw.json").read_text())
    for number in range(len(raw["rounds"]), len(raw["rounds"]) + options.rounds):
        with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(2) as pool:
            order = groups(options.workload, number)
            raw["rounds"].append(one_round(options.workload, order, Path(folder), Quiet(pool)))
        (out / "raw.json").write_text(json.dumps(raw) + "\n")
        print(f"round {number + 1} done", file=sys.stderr, flush=True)
        report(out, raw)


if __name__ == "__main__":
    main()
