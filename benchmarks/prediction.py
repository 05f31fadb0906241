#!/usr/bin/env python3
"""Predicted against measured: `gpipe plan` beside `gpipe train`, in rounds.      (make bench-prediction)

Usage: prediction.py [--workload gpt|amoeba] [--rounds 6] [--out FOLDER]
       prediction.py --in-turn [--workload gpt|amoeba] [--pairs 20] [--out FOLDER]
       prediction.py --report FOLDER      (the report again, from its raw data)

A round goes M by M, from another one each time: it measures a new profile of that M with two stages, plans every configuration
with it, and only then trains each of them for a few steps. So every prediction is on disk before the run that it is about, and
comes from another run, which is seconds old. The planner's own choice has a profile of all M of its own, in every other round.

What is compared: the median of the steps after the first, and the most bytes that each stage held, with the plan's. Ratios are
paired within a round. A shared machine is disturbed for seconds at a time, by up to a third: that spoils a profile here and a run
there, so rounds are short and many, and their median counts, with its interval from the order of the ratios alone (no distribution
is assumed: of 6 the least and the largest are a 97% interval). No round, run or step but the first is left out.

In turn (`crates/models/examples/prediction.rs`): profiles of one step and steps of another pipeline, in one process, each prediction a
second or two before the step that it is about. The commands' start-up, half a minute of drift, is not between them: what is left of
the difference is the plan's own, and what a step is disturbed by.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import bounds, interval, machine

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "release" / "gpipe"
MEDIAN = statistics.median
MICRO_BATCHES = [2, 4, 8, 16, 32]
WORKLOADS = {
    # name: (configuration, its changes, steps of a run, of a profile, and of the one of all M)
    "gpt": ("configs/gpt.toml", [], 4, 2, 1),
    "amoeba": ("configs/amoebanet-letters.toml", [
        "model.cells=6", "model.filters=128", "model.drop_path=0", "model.auxiliary=0", "images.size=64", "train.mini_batch=32",
        "train.validate_every=0", "train.label_smoothing=0", "data.variations=1"], 21, 5, 2),
}
KEEPING, DISCARDING = "never", "always"
# The planner's own choice of everything.
FREE = ("any", "any", "any")


def configurations(workload):
    """(M, schedule, re-materialization); of the slow workload one M with re-materialization."""
    again = MICRO_BATCHES if workload == "amoeba" else [8]
    return [(m, schedule, remat) for remat, sizes in [(KEEPING, MICRO_BATCHES), (DISCARDING, again)]
            for schedule in ["gpipe", "1f1b"] for m in sizes] + [FREE]


def canary():
    start = time.perf_counter()
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    return time.perf_counter() - start


def gpipe(*arguments):
    result = subprocess.run([str(GPIPE), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=1800)
    if result.returncode:
        sys.exit(f"gpipe {' '.join(map(str, arguments))} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def one_round(workload, groups, folder):
    config, changes, steps, of_profile, of_all = WORKLOADS[workload]
    common = [config, *(f"--set={change}" for change in changes)]
    profile_s, found = {}, []
    for sizes, group in groups:
        profile = folder / f"{'-'.join(map(str, sizes))}.profile.json"
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
            found.append(run([*common, "--steps", steps], key, plan, folder))
    return {"profile_s": profile_s, "found": found}


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
    own = [([m], [key for key in all if key[0] == m]) for m in MICRO_BATCHES]
    own = [(sizes, group[number % len(group):] + group[:number % len(group)]) for sizes, group in own]
    shift = number * 2 % len(own)
    return own[shift:] + own[:shift] + ([(MICRO_BATCHES, [FREE])] if number % 2 == 0 else [])


def report(folder, raw):
    done = len(raw["rounds"])
    lines = [f"# Predicted against measured: `{raw['workload']}`", "",
             f"{raw['machine']}; commit {raw['commit']}; {done} rounds; a profile takes "
             f"{MEDIAN([own for one in raw['rounds'] for size, own in one['profile_s'].items() if ',' not in size]):.0f} s "
             "(of one M, under both schedules).", "",
             "```sh", f"python3 benchmarks/prediction.py --workload {raw['workload']} --rounds {done}", "```", "",
             "Step: the plan's over the median measured one (without the first), paired within a round: the median, and its interval of at least",
             "95% (of fewer than six rounds: least and most). Bytes: the plan's peak over the measured one, the smallest and the largest ratio of both stages.", "",
             "| M | schedule | re-materialization | layers per stage | measured step, ms | predicted / measured | peak bytes, predicted / measured |",
             "|---|---|---|---|---|---|---|"]
    far, far_bytes, swings, total = [], [], [], 0
    for key in configurations(raw["workload"]):
        runs = [run for one in raw["rounds"] for run in one["found"]
                if (run["micro_batches"], run["schedule"], run["remat"]) == key]
        measured = [MEDIAN(run["step_ms"][1:]) for run in runs]
        ratios = [run["predicted_ms"] / step for run, step in zip(runs, measured)]
        bytes_ratios = [p / m for run in runs for p, m in zip(run["predicted_peaks"], run["peaks"])]
        if not runs:
            continue
        total += 1
        swings.append(max(measured) / min(measured) - 1)
        if not 0.95 <= MEDIAN(ratios) <= 1.05:
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
              f"Canary: {MEDIAN(canaries):.3f} s [{min(canaries):.3f} .. {max(canaries):.3f}]; the median step of a configuration swung by "
              f"{100 * MEDIAN(swings):.0f}% over the rounds (the largest over the smallest), at most {100 * max(swings):.0f}%."]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def in_turn(folder, raw):
    """The report of pairs that were taken in turn."""
    found = {}
    for pair in raw["pairs"]:
        found.setdefault((pair["micro_batches"], pair["schedule"], pair["remat"]), []).append(pair)
    count = max(len(pairs) for pairs in found.values())
    lines = [f"# Predicted against measured, in turn: `{raw['workload']}`", "",
             f"{raw['machine']}; commit {raw['commit']}; {count} pairs of each configuration.", "",
             "```sh", f"python3 benchmarks/prediction.py --in-turn --workload {raw['workload']} --pairs {count}", "```", "",
             "Predicted over measured: the median of the pairs' ratios with its interval of at least 95% (of fewer than six: least and most), and",
             "of the ratio of the sums. Bytes: the smallest and the largest ratio of both stages.", "",
             "| M | schedule | re-materialization | layers per stage | measured step, ms | predicted / measured | of the sums | peak bytes, predicted / measured |",
             "|---|---|---|---|---|---|---|---|"]
    inside = {"median": 0, "sums": 0, "bytes": 0, "covers": 0}
    all_ratios = []
    for (m, schedule, remat), pairs in sorted(found.items(), key=lambda item: (item[0][2] != KEEPING, item[0][1], item[0][0])):
        ratios = [pair["predicted_ms"] / pair["step_ms"] for pair in pairs]
        steps = [pair["step_ms"] for pair in pairs]
        of_bytes = [p / q for pair in pairs for p, q in zip(pair["predicted_peaks"], pair["peaks"])]
        sums = sum(pair["predicted_ms"] for pair in pairs) / sum(steps)
        all_ratios += ratios
        low, high = bounds(ratios)
        inside["median"] += 0.95 <= MEDIAN(ratios) <= 1.05
        inside["sums"] += 0.95 <= sums <= 1.05
        inside["covers"] += low <= 1.05 and high >= 0.95
        inside["bytes"] += all(0.95 <= ratio <= 1.05 for ratio in of_bytes)
        lines.append(f"| {m} | {schedule} | {remat} | {' + '.join(map(str, pairs[0]['balance']))} | {MEDIAN(steps):.0f} "
                     f"[{min(steps):.0f} .. {max(steps):.0f}] | {interval(ratios)} | {sums:.3f} | {min(of_bytes):.3f} .. {max(of_bytes):.3f} |")
    total = len(found)
    deviation = statistics.stdev(math.log(ratio) for ratio in all_ratios)
    lines += ["", f"Within 5%: the median in {inside['median']} of {total} configurations, the ratio of the sums in {inside['sums']}, the bytes in "
              f"{inside['bytes']}; the interval reaches into 5% in {inside['covers']}. Over all {len(all_ratios)} pairs: median {interval(all_ratios)}; a single pair's "
              f"ratio is spread by {100 * deviation:.0f}% (standard deviation)."]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def measure_in_turn(options):
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "-p", "gpipe-models", "--example", "prediction"], cwd=ROOT, check=True)
    program = ROOT / "target" / "release" / "examples" / "prediction"
    out = subprocess.run([program, f"workload={options.workload}", f"pairs={options.pairs}"], capture_output=True, text=True, check=True, timeout=7200)
    return [json.loads(line) for line in out.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out")
    parser.add_argument("--binary", help="this gpipe, and nothing is built")
    parser.add_argument("--report", metavar="FOLDER")
    parser.add_argument("--in-turn", action="store_true", help="pairs of a profile and a step, in one process")
    parser.add_argument("--pairs", type=int, default=20, help="of each configuration, in turn")
    parser.add_argument("--more", action="store_true", help="add rounds to those that are in --out")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        raw = json.loads((folder / "raw.json").read_text())
        return in_turn(folder, raw) if "pairs" in raw else report(folder, raw)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    raw = {"workload": options.workload, "machine": machine(), "commit": commit.stdout.strip()}
    if options.in_turn:
        out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-prediction-in-turn-{options.workload}")
        raw["pairs"] = measure_in_turn(options)
        out.mkdir(parents=True, exist_ok=True)
        (out / "raw.json").write_text(json.dumps(raw) + "\n")
        return in_turn(out, raw)
    if options.binary:
        global GPIPE
        GPIPE = Path(options.binary)
    else:
        subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "--bin", "gpipe"], cwd=ROOT, check=True)
    out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-prediction-{options.workload}")
    out.mkdir(parents=True, exist_ok=True)
    raw["rounds"] = []
    if options.more:
        raw = json.loads((out / "raw.json").read_text())
    for number in range(len(raw["rounds"]), len(raw["rounds"]) + options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            raw["rounds"].append(one_round(options.workload, groups(options.workload, number), Path(folder)))
        (out / "raw.json").write_text(json.dumps(raw) + "\n")
        print(f"round {number + 1} done", file=sys.stderr, flush=True)
        report(out, raw)


if __name__ == "__main__":
    main()
