#!/usr/bin/env python3
"""The `gpt` step: gpipe beside PyTorch, plain and pipelined, in interleaved rounds.      (make bench)

Usage: gpt_step.py [--rounds 5] [--out FOLDER] [--only TEXT[,TEXT..]]

Each round runs every configuration once, in a rotating order, each in a process of its own whose first step does
not count: the second is measured, of all of them (the third of those that the simulator predicts is for that alone).
Ratios are paired within a round. A canary (a fixed float32 product on one thread, plain PyTorch's)
shows how much the machine drifted, and the two-core ceiling how much of two cores there is: the same product on
two processes at once. Needs a Python with PyTorch 2.11: name it with TORCH_PYTHON, or its folder with TORCH_PATH;
without one scripts/pytorch.py fetches it (2.6 GB, once).
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
MEDIAN = statistics.median


def gpipe(**settings):
    return ("gpipe", {"steps": 3, **settings})


def configurations():
    """name -> (program, settings)"""
    jobs = {}
    for remat in ["never", "always"]:
        for m in [1, 8]:
            jobs[f"gpipe K=1 M={m} {remat}"] = gpipe(stages=1, micro_batches=m, remat=remat, steps=2)
        jobs[f"gpipe K=1 M=8 {remat} aten"] = gpipe(stages=1, remat=remat, steps=2, kernels="aten")
        for m in [4, 8, 16, 32]:
            for schedule in ["gpipe", "1f1b"]:
                name = f"gpipe K=2 M={m} {schedule} {remat}"
                jobs[name] = gpipe(micro_batches=m, schedule=schedule, remat=remat)
        jobs[f"gpipe K=2 M=8 1f1b {remat} aten"] = gpipe(remat=remat, kernels="aten", steps=2)
    jobs["gpipe K=2 M=8 1f1b unless-adjacent"] = gpipe(remat="unless-adjacent")
    jobs["gpipe K=2 M=8 1f1b unless-adjacent aten"] = gpipe(remat="unless-adjacent", kernels="aten", steps=2)
    jobs["gpipe K=1 M=8 never bfloat16"] = gpipe(stages=1, dtype="bfloat16")
    jobs["gpipe K=2 M=8 1f1b never bfloat16"] = gpipe(dtype="bfloat16")
    for m in [1, 8]:
        for threads in [1, 2]:
            jobs[f"torch M={m} threads={threads}"] = ("plain", {"micro-batches": m, "threads": threads})
    jobs["torch M=8 threads=1 checkpoint"] = ("plain", {"checkpoint": True})
    jobs["torch M=8 threads=1 bfloat16"] = ("plain", {"dtype": "bfloat16"})
    for schedule in ["gpipe", "1f1b"]:
        for checkpoint in [False, True]:
            name = f"pipelining K=2 M=8 {schedule}{' checkpoint' if checkpoint else ''}"
            jobs[name] = ("pipelining", {"schedule": schedule, "checkpoint": checkpoint})
    return jobs


# What the issue asks for, and what the kernels and the schedule each give.
PAIRS = [
    ("one stage against plain PyTorch", [
        ("gpipe K=1 M=1 never", "torch M=1 threads=1"),
        ("gpipe K=1 M=8 never", "torch M=8 threads=1"),
        ("gpipe K=1 M=8 never aten", "torch M=8 threads=1"),
        ("gpipe K=1 M=8 always", "torch M=8 threads=1 checkpoint"),
        ("gpipe K=1 M=8 never bfloat16", "torch M=8 threads=1 bfloat16"),
    ]),
    ("two stages against every peer, without re-materialization", [
        ("gpipe K=2 M=8 1f1b never", "torch M=8 threads=2"),
        ("gpipe K=2 M=8 1f1b never", "torch M=1 threads=2"),
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 1f1b"),
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 gpipe"),
        ("gpipe K=2 M=8 1f1b never aten", "torch M=8 threads=2"),
        ("gpipe K=2 M=8 1f1b never aten", "pipelining K=2 M=8 1f1b"),
    ]),
    ("two stages against the peer with checkpointing", [
        ("gpipe K=2 M=8 1f1b always", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b unless-adjacent", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b always aten", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b unless-adjacent aten", "pipelining K=2 M=8 1f1b checkpoint"),
    ]),
    ("kernels: oneDNN's products instead of MKL's, and bfloat16", [
        ("gpipe K=1 M=8 never", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b never", "gpipe K=2 M=8 1f1b never aten"),
        ("gpipe K=1 M=8 never bfloat16", "gpipe K=1 M=8 never"),
        ("gpipe K=1 M=8 never bfloat16", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b never bfloat16", "gpipe K=2 M=8 1f1b never"),
    ]),
    ("two stages against one", [
        ("gpipe K=2 M=8 1f1b never", "gpipe K=1 M=8 never"),
        ("gpipe K=2 M=8 gpipe never", "gpipe K=1 M=8 never"),
        ("gpipe K=2 M=8 1f1b never aten", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b always", "gpipe K=1 M=8 always"),
        ("gpipe K=2 M=32 1f1b never", "gpipe K=1 M=8 never"),
    ]),
]

CANARY = """
import sys, time, torch
torch.set_num_threads(1)
x = torch.ones(512, 512)
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
start, count = time.perf_counter(), 0
while time.perf_counter() < start + 1.5:
    x @ x
    count += 1
print(count / (time.perf_counter() - start))
"""


class Bench:
    def __init__(self, folder, python, path):
        self.folder, self.python = folder, python
        self.environment = dict(os.environ, PYTHONPATH=path)
        self.binary = ROOT / "target" / "release" / "examples" / "gpt_step"

    def command(self, program, settings):
        if program == "gpipe":
            return [str(self.binary), *(f"{key}={value}" for key, value in settings.items())]
        flags = []
        for key, value in settings.items():
            if value is not False:
                flags += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return [self.python, str(PEERS / f"{program}.py"), str(self.folder), "--steps", "2", *flags]

    def run(self, program, settings):
        command = self.command(program, settings)
        result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=self.environment)
        if result.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        return json.loads(result.stdout.strip().splitlines()[-1])

    def products_per_s(self, processes):
        """How many products each of so many processes makes at once."""
        together = str(time.time() + 6)  # after the imports
        start = [subprocess.Popen([self.python, "-c", CANARY, together], stdout=subprocess.PIPE, text=True,
                                  env=self.environment) for _ in range(processes)]
        return [float(process.communicate(timeout=120)[0]) for process in start]


def spread(values, digits=0):
    return f"{MEDIAN(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def step_ms(found):
    """The second step: the first warms up, and not every program runs a third."""
    return found["step_ms"][1]


def ratio(a, b):
    return [step_ms(x) / step_ms(y) for x, y in zip(a, b)]


def table(results):
    lines = ["| configuration | second step, ms: median [least .. most] of the rounds | loss after 2 steps |", "|---|---|---|"]
    for name, rounds in results.items():
        times = [step_ms(found) for found in rounds]
        lines.append(f"| {name} | {spread(times)} | {rounds[0]['loss'][1]:.6f} |")
    return lines


def ratios(results):
    lines = []
    for title, pairs in PAIRS:
        lines += ["", f"### {title[0].upper()}{title[1:]}", "",
                  "| ratio of step times, paired within a round | median [least .. most] |", "|---|---|"]
        for a, b in pairs:
            if a in results and b in results:
                lines.append(f"| {a} / {b} | {spread(ratio(results[a], results[b]), 3)} |")
    return lines


def efficiency(results):
    """Measured against simulated: the costs of one step predict the next; and how uneven the cut is."""
    lines = ["", "### Two stages against the simulator", "",
             "The simulator is given the median time of each kind of action on each stage in one step, and predicts the",
             "next one. Imbalance: the busiest stage's work over the mean.", "",
             "| configuration | simulated / measured | imbalance | cut | bubble % |", "|---|---|---|---|---|"]
    for name, rounds in results.items():
        # With two steps the costs would be those of the warm-up.
        if name.startswith("gpipe K=2") and len(rounds[0]["step_ms"]) > 2:
            simulated = [found["simulated_last_ms"] / found["step_ms"][-1] for found in rounds]
            work = [[sum(parts) for parts in zip(*(found["parts_ms"][-1][key] for key in
                                                   ["forward", "recompute", "backward", "optimizer"]))]
                    for found in rounds]
            uneven = [max(stages) / (sum(stages) / len(stages)) for stages in work]
            bubble = [100 * found["bubble"] for found in rounds]
            lines.append(f"| {name} | {spread(simulated, 3)} | {spread(uneven, 3)} | {rounds[0]['balance']} | "
                         f"{spread(bubble, 1)} |")
    return lines


def parts(results):
    lines = ["", "### Where the time goes", "", "Milliseconds of the last step (the third of most with two stages), by stage, median of the rounds.", "",
             "| configuration | forward | recompute | backward | optimizer | wait | peak MB |", "|---|---|---|---|---|---|---|"]
    for name, rounds in results.items():
        if "parts_ms" not in rounds[0]:
            continue
        cells = []
        for key in ["forward", "recompute", "backward", "optimizer", "wait"]:
            stages = zip(*(found["parts_ms"][-1][key] for found in rounds))
            cells.append(" + ".join(f"{MEDIAN(values):.0f}" for values in stages))
        peak = " + ".join(f"{bytes / 1e6:.0f}" for bytes in rounds[-1]["peak_bytes"])
        lines.append(f"| {name} | {' | '.join(cells)} | {peak} |")
    return lines


def memory(results):
    """Peak bytes with re-materialization against what must be held: the issue's formula."""
    def at(name, key):
        return results[name][-1][key] if results.get(name) else None

    peaks = {name: at(f"gpipe K=2 M=8 {name}", "peak_bytes")
             for name in ["gpipe never", "1f1b never", "gpipe always", "1f1b always"]}
    live = at("gpipe K=2 M=8 1f1b always", "live_bytes")
    if not all(peaks.values()):
        return []
    lines = ["", "### Memory with re-materialization", "",
             "Bytes of tensors by stage, MB. Held by the parameters: weights, two moments, gradients. One micro-batch: the",
             "activations of one of the 8, from what GPipe's schedule holds more than 1F1B's without re-materialization.",
             "Boundary: 1 MB for each micro-batch whose input the next stage holds.", "",
             "| schedule | stage | parameters | one micro-batch | boundary | sum | measured peak | peak / sum | of activations alone |",
             "|---|---|---|---|---|---|---|---|---|"]
    micro_batches, boundary = 8, 4 * 128 * 512 * 4
    for schedule in ["gpipe", "1f1b"]:
        for stage in range(2):
            in_flight = min(2 - stage, micro_batches)
            one = (peaks["gpipe never"][stage] - peaks["1f1b never"][stage]) / (micro_batches - in_flight)
            held = boundary * (micro_batches if schedule == "gpipe" else 1) if stage == 0 else 0
            base, peak = live[stage] * 4 / 3, peaks[f"{schedule} always"][stage]
            row = [base, one, held, base + one + held, peak]
            cells = " | ".join(f"{value / 1e6:.1f}" for value in row)
            lines.append(f"| {schedule} | {stage} | {cells} | {peak / (base + one + held):.3f} | "
                         f"{(peak - base) / (one + held):.3f} |")
    return lines


def machine():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":")[1].strip() + f", {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="default: benchmarks/DATE-gpt")
    parser.add_argument("--only", help="configurations whose name has one of these texts in it")
    parser.add_argument("--report", metavar="FOLDER", help="only write the report again, from FOLDER/raw.json")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        raw = json.loads((folder / "raw.json").read_text())
        return report(folder, len(raw["canary_ms"]), raw)
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "--package", "gpipe-models", "--example",
                    "gpt_step"], cwd=ROOT, check=True)
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    path = os.environ.get("TORCH_PATH", os.environ.get("PYTHONPATH", ""))
    probe = [python, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(probe, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    if torch.returncode or not torch.stdout.startswith("2.11.0"):
        path = subprocess.run([python, str(ROOT / "scripts" / "pytorch.py")], check=True, capture_output=True,
                              text=True).stdout.strip().splitlines()[-1]
        torch = subprocess.run(probe, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    jobs = configurations()
    if options.only:
        wanted = options.only.split(",")
        jobs = {name: job for name, job in jobs.items() if any(text in name for text in wanted)}
    results, canaries, ceilings = {name: [] for name in jobs}, [], []
    out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-gpt")
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, python, path)
        bench.run("gpipe", {"stages": 1, "steps": 1, "folder": folder})
        names = list(jobs)
        for round_number in range(options.rounds):
            one, two = bench.products_per_s(1), bench.products_per_s(2)
            canaries.append(1e3 / one[0])
            ceilings.append(sum(two) / one[0])
            shift = round_number * 7 % len(names)
            for name in names[shift:] + names[:shift]:
                found = bench.run(*jobs[name])
                results[name].append(found)
            print(f"round {round_number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
            raw = {"machine": machine(), "commit": commit, "torch": torch.stdout.strip(), "canary_ms": canaries, "ceiling": ceilings,
                   "results": results}
            (out / "raw.json").write_text(json.dumps(raw) + "\n")
            report(out, options.rounds, raw)
    print((out / "report.md").read_text())


def report(out, rounds, raw):
    done = len(raw["canary_ms"])
    lines = ["# The `gpt` step", "",
             f"{raw['machine']}; PyTorch {raw['torch']}; commit {raw.get('commit', 'unknown')}; {done} of {rounds} rounds.",
             "", "```sh", "make bench", "```", "",
             f"Canary (a 512 x 512 float32 product), ms: {spread(raw['canary_ms'], 2)}. Two-core ceiling (products of two "
             f"busy cores over those of one): {spread(raw['ceiling'], 2)}.", "", *table(raw["results"]),
             *ratios(raw["results"]), *efficiency(raw["results"]), *parts(raw["results"]),
             *memory(raw["results"])]
    (out / "report.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
