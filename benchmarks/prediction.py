#!/usr/bin/env python3
"""Predicted against measured: `gpipe plan` beside `gpipe train`.          (make bench-prediction)

Usage: prediction.py [--workload gpt|amoeba] [--rounds 6] [--more FOLDER] [--out FOLDER]
       prediction.py --in-turn [--workload gpt|amoeba] [--pairs N] [--out FOLDER]
       prediction.py --report FOLDER      (the report again, from its raw data)

In rounds (parts `prediction-gpt`, `prediction-amoeba`). A round goes M by M, from another one each
time: it measures a new profile of that M with two stages, plans every configuration with it, and
only then trains each of them for a few steps. So every prediction is on disk before the run that it
is about, and comes from another run, which is seconds old. The planner's own choice has a profile
of all M of its own, in every other round. Compared are the median of the steps after the first, and
the most bytes that each stage held, with the plan's. A shared machine is disturbed for seconds at a
time. That spoils a profile here and a run there, so rounds are short and many, and their median
counts, with its interval from the order of the ratios alone. Nothing is left out but first steps.

In turn (parts `prediction-in-turn-gpt`, ..; the driver `prediction`). Profiles of
one step and steps of another pipeline are in one process, each prediction a second or two before
the step that it is about, so the commands' start-up is not between them.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import folders
import rounds
from figures import ROOT, bounds, commit, median, of_table, paragraph, with_interval, with_range
from machine import here

MICRO_BATCHES = [2, 4, 8, 16, 32]
LETTERS = [
    "model.cells=6",
    "model.filters=128",
    "model.drop_path=0",
    "model.auxiliary=0",
    "images.size=64",
    "train.mini_batch=32",
    "train.validate_every=0",
    "train.label_smoothing=0",
    # Images as they are: their changes take time of the cores that are measured.
    "images.degrees=0",
    "images.scale=[1, 1]",
    "images.shear=[0, 0]",
    "images.translate=0",
    "images.contrast=1",
    "images.invert=0",
]
WORKLOADS = {
    # name: (configuration, its changes, steps of a run, of a profile, and of the one of all M)
    "gpt": ("configs/gpt.toml", [], 4, 2, 1),
    "amoeba": ("configs/amoebanet-letters.toml", LETTERS, 21, 5, 2),
}
ROUNDS = 6
# In turn, of each configuration; the steps of `gpt` are slow.
PAIRS = {"gpt": 5, "amoeba": 20}
KEEPING, DISCARDING = "never", "always"
# The planner's own choice of everything.
FREE = ("any", "any", "any")
COMMAND_LIMIT_S, IN_TURN_LIMIT_S = 1800, 7200
# How far a prediction may be off.
NEAR = (0.95, 1.05)
WHAT = (
    "A plan predicts a step's time and each stage's peak bytes from a profile, before the step is"
    " run. K = 2 stages, several M (micro-batches), GPipe's schedule and 1F1B. The target is a"
    " prediction within 5%. *In turn* a profile of one step and a step of another pipeline"
    " alternate in one process. *In rounds* the commands profile, plan and train, each in a"
    " process of its own."
)


def configurations(workload):
    """(M, schedule, re-materialization). The slow workload has one M with re-materialization."""
    again = MICRO_BATCHES if workload == "amoeba" else [8]
    return [
        (m, schedule, remat)
        for remat, sizes in [(KEEPING, MICRO_BATCHES), (DISCARDING, again)]
        for schedule in ["gpipe", "1f1b"]
        for m in sizes
    ] + [FREE]


def canary():
    """Seconds of a fixed piece of work in this process."""
    start = time.perf_counter()
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    return time.perf_counter() - start


def gpipe(program, *arguments):
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=COMMAND_LIMIT_S
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def one_round(program, workload, groups, folder):
    config, changes, steps, of_profile, of_all = WORKLOADS[workload]
    common = [config, *(f"--set={change}" for change in changes)]
    profile_s, found = {}, []
    for sizes, group in groups:
        own = ",".join(map(str, sizes))
        profile = folder / f"{'-'.join(map(str, sizes))}.profile.json"
        start = time.perf_counter()
        flags = ["--stages", 2, "--micro-batches", own]
        flags += ["--steps", of_profile if len(sizes) == 1 else of_all, "--out", profile]
        first = f"--set=pipeline.micro_batches={sizes[0]}"
        gpipe(program, "profile", *common, first, *flags)
        profile_s[own] = time.perf_counter() - start
        plans = []
        for m, schedule, remat in group:
            plan = folder / f"{m}-{schedule}-{remat}.plan.json"
            choices = [("--micro-batches", m), ("--schedule", schedule), ("--remat", remat)]
            chosen = [
                str(one) for flag, value in choices if value != "any" for one in (flag, value)
            ]
            flags = ["--profile", profile, "--devices", 2, *chosen, "--out", plan]
            gpipe(program, "plan", *common, *flags)
            plans.append(plan)
        for key, plan in zip(group, plans, strict=True):
            found.append(train(program, [*common, "--steps", steps], key, plan, folder))
    return {"profile_s": profile_s, "found": found}


def train(program, common, key, plan, folder):
    m, schedule, remat = key
    out = folder / f"run-{m}-{schedule}-{remat}"
    before = canary()
    flags = [
        "--plan", plan, "--checkpoint-every", "none", "--out", out,
        "--set=train.validation_tokens=128",
    ]
    gpipe(program, "train", *common, *flags)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "step"]
    shutil.rmtree(out)
    predicted = json.loads(plan.read_text())
    return {
        "micro_batches": m,
        "schedule": schedule,
        "remat": remat,
        "canary_s": [before, canary()],
        "balance": predicted["plan"]["balance"],
        "plan": [predicted["plan"][key] for key in ["micro_batches", "schedule", "remat"]],
        "predicted_ms": predicted["predicted"]["step"] / 1e6,
        "predicted_peaks": predicted["predicted"]["peaks"],
        "step_ms": [line["step_ms"] for line in lines],
        "stages": lines[-1]["stages"],
        "peaks": [max(line["stages"][k]["peak_bytes"] for line in lines) for k in range(2)],
    }


def groups(workload, number):
    """(sizes to profile, configurations that are planned with it), in the order of a round."""
    every = configurations(workload)
    own = [([m], [key for key in every if key[0] == m]) for m in MICRO_BATCHES]
    own = [
        (sizes, group[number % len(group) :] + group[: number % len(group)]) for sizes, group in own
    ]
    shift = number * 2 % len(own)
    free = [(MICRO_BATCHES, [FREE])] if number % 2 == 0 else []
    return own[shift:] + own[:shift] + free


class Configuration:
    """What one configuration was predicted to take and hold, and did."""

    def __init__(self, runs):
        self.runs = runs
        # Of a run in rounds the first step does not count; in turn a pair has one step.
        self.step_ms = [
            median(run["step_ms"][1:]) if isinstance(run["step_ms"], list) else run["step_ms"]
            for run in runs
        ]
        predicted = [run["predicted_ms"] for run in runs]
        self.ratios = [one / step for one, step in zip(predicted, self.step_ms, strict=True)]
        self.of_sums = sum(predicted) / sum(self.step_ms)
        self.of_bytes = [
            one / held
            for run in runs
            for one, held in zip(run["predicted_peaks"], run["peaks"], strict=True)
        ]

    def is_near(self):
        return is_near(median(self.ratios))

    def bytes_are_near(self):
        return all(map(is_near, self.of_bytes))


def is_near(ratio):
    return NEAR[0] <= ratio <= NEAR[1]


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def by_configuration(raw):
    """(M, schedule, re-materialization) -> what was found of it."""
    runs = (
        raw["pairs"] if "pairs" in raw else [run for one in raw["rounds"] for run in one["found"]]
    )
    found = {}
    for run in runs:
        key = (run["micro_batches"], run["schedule"], run["remat"])
        found.setdefault(key, []).append(run)
    order = lambda key: (key == FREE, key[2] != KEEPING, key[1], str(key[0]).rjust(3))
    return {key: Configuration(found[key]) for key in sorted(found, key=order)}


def table(found):
    rows = []
    for key, one in found.items():
        cuts = sorted({" + ".join(map(str, run["balance"])) for run in one.runs})
        row = [*key, " or ".join(cuts), len(one.runs), *with_range(one.step_ms)]
        row += [*with_interval(one.ratios), f"{one.of_sums:.3f}"]
        row += [f"{min(one.of_bytes):.3f}", f"{max(one.of_bytes):.3f}"]
        rows.append([*row, "yes" if one.is_near() else "**no**"])
    header = ["M", "schedule", "recomputed", "cut", "runs", "step, ms", "least .. most"]
    header += ["predicted / measured", "interval", "of the sums", "bytes: lowest", "bytes: highest"]
    return of_table([*header, "within 5%"], rows)


def counts(found):
    """A sentence on how many predictions are near."""
    every = [ratio for one in found.values() for ratio in one.ratios]
    reach = [bounds(one.ratios) for one in found.values()]
    covered = sum(low <= NEAR[1] and high >= NEAR[0] for low, high in reach)
    deviation = statistics.stdev(math.log(ratio) for ratio in every) if len(every) > 1 else 0
    return (
        f"Of {len(found)} configurations the step's median is within 5% in"
        f" {sum(one.is_near() for one in found.values())}, the ratio of the sums in"
        f" {sum(is_near(one.of_sums) for one in found.values())}, the bytes in"
        f" {sum(one.bytes_are_near() for one in found.values())}. The interval reaches into 5% in"
        f" {covered}. The median of all {len(every)} ratios is {median(every):.3f}; their standard"
        f" deviation is {100 * deviation:.0f}%."
    )


def drift(raw, found):
    """A sentence on how steady the machine was, of a run in rounds."""
    canaries = [median(run["canary_s"]) for one in raw["rounds"] for run in one["found"]]
    swings = [max(one.step_ms) / min(one.step_ms) - 1 for one in found.values()]
    return (
        f"The canary took {median(canaries):.3f} s ({min(canaries):.3f} .. {max(canaries):.3f})."
        f" A configuration's step swung by {100 * median(swings):.0f}% from round to round (the"
        f" largest over the smallest), at most by {100 * max(swings):.0f}%."
    )


def report(folder):
    """The text of the report."""
    raw = read(folder)
    found = by_configuration(raw)
    in_turn = "pairs" in raw
    title = f"Predicted against measured{', in turn' if in_turn else ''}: `{raw['workload']}`"
    lines = [
        *folders.heading(title, folder),
        *paragraph(
            "Ratios are predicted over measured: the median with its interval of at least 95% or,"
            " of fewer than six, the least and the most. The ratio of the sums is of all"
            " predictions over all steps. Bytes are the plan's peak over the measured one, the"
            " lowest and the highest ratio of both stages."
        ),
        "",
        *table(found),
        "",
        *paragraph(counts(found)),
    ]
    if not in_turn:
        if FREE in found:
            chosen = {"M = {}, {}, {}".format(*run["plan"]) for run in found[FREE].runs}
            lines += ["", f"`any` is the planner's own choice: {'; '.join(sorted(chosen))}."]
        lines += ["", *paragraph(drift(raw, found))]
    return "\n".join(lines) + "\n"


def summary(parts):
    """The section of RESULTS.md: a row for each run."""
    rows = []
    for folder in parts.values():
        raw = read(folder)
        found = by_configuration(raw)
        medians = [median(one.ratios) for one in found.values()]
        near = sum(one.is_near() for one in found.values())
        bytes_ = sum(one.bytes_are_near() for one in found.values())
        way = "in turn" if "pairs" in raw else "in rounds"
        row = [f"`{raw['workload']}`", way, len(found), near, bytes_]
        row += [f"{min(medians):.3f}", f"{max(medians):.3f}"]
        rows.append([*row, "target met" if near == len(found) else "**below target**"])
    header = ["workload", "measured", "configurations", "steps within 5%", "bytes within 5%"]
    header += ["lowest predicted / measured", "highest", "verdict"]
    return [*paragraph(WHAT), "", *of_table(header, rows), ""]


def in_turn(options):
    """Pairs of a profile and a step, in one process."""
    rounds.build("prediction")
    pairs, whole = options.pairs or PAIRS[options.workload], PAIRS[options.workload]
    partial = folders.reasons((pairs < whole, f"{pairs} pairs, not {whole}"))
    name = f"prediction-in-turn-{options.workload}"
    with folders.run(name, report, partial, options.out) as folder:
        command = [rounds.driver("prediction"), f"workload={options.workload}", f"pairs={pairs}"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=IN_TURN_LIMIT_S
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        raw = {"workload": options.workload, "machine": here().title(), "commit": commit()}
        (folder / "raw.json").write_text(json.dumps({**raw, "pairs": found}) + "\n")


def in_rounds(options):
    program = options.binary or rounds.GPIPE
    if not options.binary:
        rounds.build_gpipe()
    raw = {
        "workload": options.workload,
        "machine": here().title(),
        "commit": commit(),
        "rounds": [],
    }
    if options.more:
        now, raw = raw, read(options.more)
        for key in ["workload", "machine", "commit"]:
            if raw.get(key) != now[key]:
                sys.exit(f"prediction: {options.more} has the {key} {raw.get(key)}, and this is"
                         f" {now[key]}: measure it whole")
    before = len(raw["rounds"])
    total = before + options.rounds
    partial = folders.reasons((total < ROUNDS, f"{total} rounds, not {ROUNDS}"))
    with folders.run(f"prediction-{options.workload}", report, partial, options.out) as folder:
        for number in range(before, total):
            with tempfile.TemporaryDirectory() as scratch:
                own = groups(options.workload, number)
                raw["rounds"].append(one_round(program, options.workload, own, Path(scratch)))
            (folder / "raw.json").write_text(json.dumps(raw) + "\n")
            print(f"round {number + 1} done", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--more", type=Path, metavar="FOLDER", help="add rounds to its own")
    parser.add_argument("--binary", type=Path, help="this gpipe, and nothing is built")
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--pairs", type=int, help="in turn, of each configuration")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    return in_turn(options) if options.in_turn else in_rounds(options)


if __name__ == "__main__":
    main()
