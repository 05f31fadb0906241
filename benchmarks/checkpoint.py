#!/usr/bin/env python3
"""What checkpoints cost the `gpt` step: `gpipe train` with and without, in interleaved rounds.
                                                                       (make bench-checkpoint)

Usage: checkpoint.py [--rounds 5] [--steps 52] [--data FOLDER] [--out FOLDER]
       checkpoint.py --report FOLDER      (the report again, from its raw data)

Each round trains the same steps three times, in a rotating order, each in a process of its own:
without checkpoints, with one every 50 steps, and with one every 10. The time of a run is that of
its training loop as it prints it, so that set-up and final evaluation do not count. A checkpoint
begun at step 50 is written during the two steps that follow, the last of the run. Ratios are paired
within a round; the interval is Student's at 95% over the rounds.

On a machine that swings by more than a checkpoint costs, whole runs say little. So the cost is also
taken within a run: the two steps beside which a checkpoint is written against the median of the six
steps around those two, plus the time for which training stood still, for every checkpoint.

A canary (a fixed piece of work on one thread) beside each run shows how much the machine drifted.
Checkpoints go to --data (default: a temporary folder), whose disk's speed is measured, too.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import folders
from figures import ROOT, between, commit, median, of_table, paragraph
from machine import here
from rounds import GPIPE

ARMS = {"none": "none", "every 50": "50", "every 10": "10"}
ROUNDS, STEPS = 5, 52
# Student's t at 97.5% by degrees of freedom; above nine a normal distribution will do.
STUDENT = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}
SAVED = r"saved step (\d+): \S+ \((.*?); copied in (\d+) ms, written in ([\d.]+) s"
WHAT = (
    "Training of the transformer `gpt` with K = 2, M = 8 and Adam, with and without checkpoints."
    " The cost of one is taken from whole runs, paired with the run without, and within runs, from"
    " the steps around each checkpoint. Intervals are Student's at 95%."
)


def canary():
    """Seconds of a fixed piece of work in this process."""
    start = time.perf_counter()
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    return time.perf_counter() - start


def disk(folder):
    """MiB/s of writing and syncing 256 MiB."""
    path, block = folder / "disk", os.urandom(1 << 20)
    start = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(256):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return 256 / seconds


def train(arm, steps, data):
    out = data / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        GPIPE, "train", "configs/gpt.toml", "--steps", str(steps), "--checkpoint-every", ARMS[arm]
    ]
    # The evaluation after the loop is not what is measured.
    command += ["--out", out, "--set", "train.validation_tokens=129"]
    before = canary()
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"checkpoint: {done.stdout}{done.stderr}")
    trained = re.search(rf"trained {steps} steps, [^:]* tokens in ([\d.]+) s", done.stdout)
    waited = re.search(r"waiting for checkpoints ([\d.]+)%", done.stdout)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "step"]
    result = {
        "arm": arm,
        "seconds": float(trained[1]),
        "waiting_percent": float(waited[1]),
        "step_ms": [record["step_ms"] for record in records],
        "losses": [record["loss"] for record in records],
        "saved": [
            {"step": int(step), "size": size, "copied_ms": int(ms), "written_s": float(seconds)}
            for step, size, ms, seconds in re.findall(SAVED, done.stdout)
        ],
        "canary_s": [before, canary()],
    }
    shutil.rmtree(out)
    check_written(result, steps)
    return result


def check_written(result, steps):
    """Ends the program if the loop ended before its last checkpoint was written."""
    within = [save for save in result["saved"] if save["step"] < steps]
    if within and 1e3 * within[-1]["written_s"] > sum(result["step_ms"][within[-1]["step"] :]):
        step = within[-1]["step"]
        sys.exit(f"checkpoint: the loop ended before that of step {step} was: give more --steps")


def costs_within(result, steps):
    """Seconds that each checkpoint of a run cost, by the steps around it."""
    costs = []
    for save in result["saved"]:
        first, times = save["step"], result["step_ms"]  # times[first] is the step after it
        beside = times[first : first + 2]
        around = times[max(1, first - 3) : first] + times[first + 2 : first + 5]
        if save["step"] < steps and len(beside) == 2:
            costs.append((sum(beside) - 2 * median(around) + save["copied_ms"]) / 1e3)
    return costs


def interval(values):
    """Mean and half of the 95% interval."""
    if len(values) < 2:
        return values[0], float("nan")
    spread = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), STUDENT.get(len(values) - 1, 1.96) * spread


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def costs_table(raw):
    """What one checkpoint costs, from whole runs and within runs."""
    rounds, steps = raw["rounds"], raw["steps"]
    none = median([one["none"]["seconds"] for one in rounds])
    rows = []
    for arm in list(ARMS)[1:]:
        mean, half = interval([one[arm]["seconds"] / one["none"]["seconds"] for one in rounds])
        # Those that are written while the loop still runs.
        saves = sum(1 for save in rounds[0][arm]["saved"] if save["step"] < steps)
        costs = [one * none / saves for one in (mean - 1, half)]
        rows.append([f"whole runs, {arm} steps", saves * len(rounds), *costs])
    within = [cost for one in rounds for arm in ARMS for cost in costs_within(one[arm], steps)]
    rows.append(["within runs", len(within), *interval(within)])
    shown = []
    for name, count, cost, half in rows:
        low, high = cost - half, cost + half
        share = lambda seconds: 100 * seconds / (50 * none / steps)
        cells = [f"{cost:.2f}", between(low, high, 2), f"{share(cost):.2f}"]
        shown.append([name, count, *cells, between(share(low), share(high), 2)])
    header = ["from", "checkpoints", "cost of one, s", "interval"]
    return of_table([*header, "cost of one every 50 steps, %", "interval"], shown)


def loops_table(raw):
    rounds = raw["rounds"]
    rows = [[arm, *(f"{one[arm]['seconds']:.1f}" for one in rounds)] for arm in ARMS]
    return of_table(["checkpoints", *(f"round {n + 1}, s" for n in range(len(rounds)))], rows)


def report(folder):
    """The text of the report."""
    raw = read(folder)
    rounds, disks = raw["rounds"], raw["disk_mib_s"]
    runs = [one[arm] for one in rounds for arm in ARMS]
    saves = [save for run in runs for save in run["saved"]]
    copied = [save["copied_ms"] for save in saves]
    written = [save["written_s"] for save in saves]
    canaries = [seconds for run in runs for seconds in run["canary_s"]]
    same = all(run["losses"] == runs[0]["losses"] for run in runs)
    lines = [
        *folders.heading("What checkpoints cost the `gpt` step", folder),
        *paragraph(f"{WHAT} A checkpoint is of {saves[0]['size']}."),
        "",
        *costs_table(raw),
        "",
        *paragraph(
            f"Training stands still while the stages copy their state: {median(copied):.0f} ms, at"
            f" most {max(copied)}. Then the checkpoint is written beside the steps, in"
            f" {median(written):.2f} s, at most {max(written):.2f}. The disk writes and syncs"
            f" {min(disks):.0f} to {max(disks):.0f} MiB/s. The canary took"
            f" {min(canaries):.3f} to {max(canaries):.3f} s. Every loss of every run is the same to"
            f" the last bit: {'yes' if same else 'NO'}."
        ),
        "",
        "## Seconds of the training loops",
        "",
        *loops_table(raw),
    ]
    return "\n".join(lines) + "\n"


def summary(parts):
    """The section of RESULTS.md."""
    lines = []
    for folder in parts.values():
        raw = read(folder)
        text = f"{WHAT} {len(raw['rounds'])} rounds of {raw['steps']} steps."
        lines += [*paragraph(text), "", *costs_table(raw), ""]
    return lines


def measure(options, folder):
    with tempfile.TemporaryDirectory(dir=options.data) as data:
        data, rounds, disks = Path(data), [], []
        of = {"machine": here().title(), "commit": commit(), "steps": options.steps}
        for number in range(options.rounds):
            disks.append(disk(data))
            arms = list(ARMS)
            arms = arms[number % 3 :] + arms[: number % 3]
            results = {arm: train(arm, options.steps, data) for arm in arms}
            rounds.append(results)
            took = ", ".join(f"{arm} {results[arm]['seconds']:.1f} s" for arm in ARMS)
            print(f"round {number + 1}: {took}", file=sys.stderr, flush=True)
            raw = {**of, "disk_mib_s": disks, "rounds": rounds}
            (folder / "raw.json").write_text(json.dumps(raw, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    partial = folders.reasons(
        (options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"),
        (options.steps < STEPS, f"{options.steps} steps, not {STEPS}"),
    )
    with folders.run("checkpoint", report, partial, options.out) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
