#!/usr/bin/env python3
"""What checkpoints cost the `gpt` step: `gpipe train` with and without, in interleaved rounds.      (make bench-checkpoint)

Usage: checkpoint.py [--rounds 5] [--steps 52] [--out FOLDER] [--data FOLDER]
       checkpoint.py --report FOLDER      (the report again, from its raw data)

Each round trains the same steps three times, in a rotating order, each in a process of its own: without checkpoints,
with one every 50 steps, and with one every 10. The time of a run is that of its training loop as it prints it, so that
set-up and final evaluation do not count; a checkpoint begun at step 50 is written during the two steps that follow,
the last of the run. Ratios are paired within a round; the interval is Student's at 95% over the rounds. A run with
checkpoints every 10 shows five times the cost, and so says more about it than the noise does.

On a machine that swings by more than a checkpoint costs, whole runs say little. So the cost is also taken within a run: the
two steps beside which a checkpoint is written against the median of the six steps around those two, plus the
time for which training stood still; paired within seconds, for every checkpoint of every run.

A canary (a fixed product on one thread) beside each run shows how much the machine drifted. Checkpoints go to --data
(default: a temporary folder), whose disk's speed is measured, too.
"""

import argparse
import datetime
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

from figures import ROOT, commit, cpu

GPIPE = ROOT / "target" / "release" / "gpipe"
ARMS = {"none": "none", "every 50": "50", "every 10": "10"}
# Student's t at 97.5% by degrees of freedom; above nine a normal distribution will do.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


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
    command = [GPIPE, "train", "configs/gpt.toml", "--steps", str(steps), "--every", ARMS[arm], "--out", out]
    command += ["--set", "train.validation_tokens=129"]  # the evaluation after the loop is not what is measured
    before = canary()
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"checkpoint: {done.stdout}{done.stderr}")
    seconds = float(re.search(rf"trained {steps} steps, \d+ tokens in ([\d.]+) s", done.stdout)[1])
    waited = float(re.search(r"waiting for checkpoints ([\d.]+)%", done.stdout)[1])
    saved = re.findall(r"step (\d+): saved \S+ \((.*?); copied in (\d+) ms, written in ([\d.]+) s", done.stdout)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    result = {
        "arm": arm,
        "seconds": seconds,
        "waiting_percent": waited,
        "step_ms": [record["step_ms"] for record in records if record["kind"] == "step"],
        "losses": [record["loss"] for record in records if record["kind"] == "step"],
        "saved": [{"step": int(s), "size": size, "copied_ms": int(ms), "written_s": float(w)} for s, size, ms, w in saved],
        "canary_s": [before, canary()],
    }
    shutil.rmtree(out)
    within = [save for save in result["saved"] if save["step"] < steps]
    if within and 1e3 * within[-1]["written_s"] > sum(result["step_ms"][within[-1]["step"] :]):
        sys.exit(f"checkpoint: that of step {within[-1]['step']} was not written when the loop ended: give more --steps")
    return result


def costs_within(result, steps):
    """Seconds that each checkpoint of a run cost, by the steps around it."""
    costs = []
    for save in result["saved"]:
        first, times = save["step"], result["step_ms"]  # times[first] is the step after it
        beside = times[first : first + 2]
        around = times[max(1, first - 3) : first] + times[first + 2 : first + 5]
        if save["step"] < steps and len(beside) == 2:
            costs.append((sum(beside) - 2 * statistics.median(around) + save["copied_ms"]) / 1e3)
    return costs


def interval(values):
    """Mean and half of the 95% interval."""
    if len(values) < 2:
        return values[0], float("nan")
    spread = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), STUDENT.get(len(values) - 1, 1.96) * spread


def report(rounds, steps, disks, of):
    seconds = {arm: [r[arm]["seconds"] for r in rounds] for arm in ARMS}
    lines = [
        "# What checkpoints cost the `gpt` step",
        "",
        f"`python3 benchmarks/checkpoint.py --rounds {len(rounds)} --steps {steps}`, {of['date']}, "
        f"{of['cores']} cores ({of['cpu']}), commit {of['commit']}.",
        "",
        f"30 million parameters, K = 2, M = 8, Adam: {rounds[0]['every 50']['saved'][0]['size']} a checkpoint. "
        "Ratios are paired within a round, intervals Student's at 95%. "
        f"Disk: {min(disks):.0f} to {max(disks):.0f} MiB/s written and synced.",
        "",
        "| checkpoints | median s of the loop | ratio to none, paired [95%] | cost of one | cost at one every 50 steps |",
        "|---|---|---|---|---|",
    ]
    none = statistics.median(seconds["none"])
    lines.append(f"| none | {none:.2f} | 1 | | |")
    per_step = none / steps
    for arm in list(ARMS)[1:]:
        ratios = [r[arm]["seconds"] / r["none"]["seconds"] for r in rounds]
        mean, half = interval(ratios)
        # Those that are written while the loop still runs.
        saves = sum(1 for save in rounds[0][arm]["saved"] if save["step"] < steps)
        one, one_half = (mean - 1) * none / saves, half * none / saves
        at_50, at_50_half = 100 * one / (50 * per_step), 100 * one_half / (50 * per_step)
        lines.append(
            f"| {arm} | {statistics.median(seconds[arm]):.2f} | {mean:.4f} [{mean - half:.4f} .. {mean + half:.4f}] "
            f"| {one:.2f} s +- {one_half:.2f} | {at_50:.2f}% [{at_50 - at_50_half:.2f} .. {at_50 + at_50_half:.2f}] |"
        )
    within = [cost for r in rounds for arm in ARMS for cost in costs_within(r[arm], steps)]
    mean, half = interval(within)
    share, share_half = 100 * mean / (50 * per_step), 100 * half / (50 * per_step)
    lines += [
        "",
        f"Within the runs, by the steps around each of {len(within)} checkpoints: {mean:.2f} s +- {half:.2f} for one (median "
        f"{statistics.median(within):.2f}), **{share:.2f}% [{share - share_half:.2f} .. {share + share_half:.2f}] at one every 50 steps**.",
    ]
    saves = [save for r in rounds for arm in ARMS for save in r[arm]["saved"]]
    copied = [save["copied_ms"] for save in saves]
    written = [save["written_s"] for save in saves]
    canaries = [c for r in rounds for arm in ARMS for c in r[arm]["canary_s"]]
    same = all(r[arm]["losses"] == rounds[0]["none"]["losses"] for r in rounds for arm in ARMS)
    lines += [
        "",
        f"Training stands still while the stages copy their state: {statistics.median(copied):.0f} ms (at most {max(copied)}). "
        f"Then it is written beside the steps, in {statistics.median(written):.2f} s (at most {max(written):.2f}).",
        f"Every loss of every run is the same to the last bit: {'yes' if same else 'NO'}.",
        f"Canary: {min(canaries):.3f} to {max(canaries):.3f} s. Seconds of the loops by round: "
        + "; ".join(f"{arm} {', '.join(f'{s:.1f}' for s in all_)}" for arm, all_ in seconds.items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=52)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / f"{datetime.date.today()}-checkpoint")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if arguments.report:
        raw = json.loads((arguments.report / "raw.json").read_text())
        text = report(raw["rounds"], raw["steps"], raw["disk_mib_s"], raw["of"])
        (arguments.report / "report.md").write_text(text)
        return print(text)
    of = {"date": str(datetime.date.today()), "cores": os.cpu_count(), "cpu": cpu(), "commit": commit()}
    with tempfile.TemporaryDirectory(dir=arguments.data) as data:
        data, rounds, disks = Path(data), [], []
        for number in range(arguments.rounds):
            disks.append(disk(data))
            arms = list(ARMS)
            arms = arms[number % 3 :] + arms[: number % 3]
            results = {arm: train(arm, arguments.steps, data) for arm in arms}
            rounds.append(results)
            print(f"round {number + 1}: " + ", ".join(f"{arm} {results[arm]['seconds']:.1f} s" for arm in ARMS), flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "raw.json").write_text(json.dumps({"of": of, "steps": arguments.steps, "disk_mib_s": disks, "rounds": rounds}, indent=1))
            text = report(rounds, arguments.steps, disks, of)
            (arguments.out / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
