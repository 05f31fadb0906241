#!/usr/bin/env python3
"""The `gpt` step: gpipe with one and two stages, beside plain PyTorch with one and two threads.

Usage: gpt_step.py [--rounds 5] [--steps 3] [--out FILE.json]      (make bench)

Each round runs every configuration once, in a rotating order, each in a process of its own whose first
step does not count. Ratios are paired within a round; a canary (a fixed single-threaded sum) shows how
much the machine itself drifted. Needs a Python with PyTorch 2.11: name it with TORCH_PYTHON, or its
folder with TORCH_PATH; without one only gpipe is measured, and it says so.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPIPE = {
    "gpipe K=1 M=1 never": ["1", "1", "1f1b", "never"],
    "gpipe K=1 M=8 never": ["1", "8", "1f1b", "never"],
    "gpipe K=1 M=8 always": ["1", "8", "1f1b", "always"],
    "gpipe K=2 M=8 never": ["2", "8", "1f1b", "never"],
    "gpipe K=2 M=8 always": ["2", "8", "1f1b", "always"],
}
TORCH = {"torch M=1 1 thread": ("1", "1"), "torch M=8 1 thread": ("8", "1"), "torch M=8 2 threads": ("8", "2")}
PAIRS = [
    ("gpipe K=1 M=1 never", "torch M=1 1 thread"),
    ("gpipe K=1 M=8 never", "torch M=8 1 thread"),
    ("gpipe K=2 M=8 never", "torch M=8 1 thread"),
    ("gpipe K=2 M=8 never", "torch M=8 2 threads"),
    ("gpipe K=2 M=8 never", "gpipe K=1 M=8 never"),
    ("gpipe K=2 M=8 always", "gpipe K=1 M=8 always"),
]


def canary_ms():
    start = time.perf_counter()
    total = 0
    for i in range(3_000_000):
        total += i * i
    return 1e3 * (time.perf_counter() - start)


def run(command, **environment):
    result = subprocess.run(command, capture_output=True, text=True, timeout=500,
                            env=dict(os.environ, **environment))
    if result.returncode:
        sys.exit(f"{command[0]} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def spread(values):
    return f"{statistics.median(values):.3f} [{min(values):.3f} .. {max(values):.3f}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out")
    options = parser.parse_args()
    subprocess.run(["cargo", "build", "--quiet", "--release", "--package", "gpipe-models", "--example",
                    "gpt_step"], cwd=ROOT, check=True)
    binary = ROOT / "target" / "release" / "examples" / "gpt_step"
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    path = {"PYTHONPATH": os.environ.get("TORCH_PATH", os.environ.get("PYTHONPATH", ""))}
    has_torch = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True,
                               text=True, env=dict(os.environ, **path))
    steps = str(options.steps + 1)
    results, canaries = {}, []
    with tempfile.TemporaryDirectory() as folder:
        run([binary, "1", "8", "gpipe", "never", "0", folder])
        jobs = {name: lambda a=arguments: run([binary, *a, steps]) for name, arguments in GPIPE.items()}
        if has_torch.returncode == 0:
            peer = str(ROOT / "benchmarks" / "peers" / "plain.py")
            jobs.update({name: lambda m=m, t=t: run([python, peer, folder, "--micro-batches", m, "--threads", t,
                                                       "--steps", steps], **path)
                         for name, (m, t) in TORCH.items()})
        else:
            print("no PyTorch found: only gpipe is measured (set TORCH_PYTHON or TORCH_PATH)")
        names = list(jobs)
        for round_number in range(options.rounds):
            shift = round_number % len(names)
            for name in names[shift:] + names[:shift]:
                canaries.append(canary_ms())
                found = jobs[name]()
                found["median_ms"] = statistics.median(found["step_ms"][1:])
                results.setdefault(name, []).append(found)
            print(f"round {round_number + 1} of {options.rounds} done", file=sys.stderr, flush=True)

    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            machine = line.split(":")[1].strip() + f", {os.cpu_count()} cores"
            break
    print(f"\nmachine: {machine}; torch {has_torch.stdout.strip() or 'absent'}; "
          f"{options.rounds} rounds of {options.steps} steps")
    print(f"canary ms: {spread(canaries)}\n")
    print("| configuration | step ms: median [min .. max] of rounds | loss after the steps |\n|---|---|---|")
    for name, rounds in results.items():
        print(f"| {name} | {spread([r['median_ms'] for r in rounds])} | {rounds[0]['loss'][-1]:.6f} |")
    print("\n| ratio of step times, paired within a round | median [min .. max] |\n|---|---|")
    for a, b in PAIRS:
        if a in results and b in results:
            ratios = [x["median_ms"] / y["median_ms"] for x, y in zip(results[a], results[b])]
            print(f"| {a} / {b} | {spread(ratios)} |")
    print("\nparts of a step, ms summed over stages (median of the last round):")
    for name, rounds in results.items():
        if "parts_ms" in rounds[-1]:
            parts = rounds[-1]["parts_ms"][1:]
            means = {key: statistics.median(p[key] for p in parts) for key in parts[0]}
            print(f"  {name}: " + ", ".join(f"{key} {value:.0f}" for key, value in means.items()))
    if options.out:
        raw = {"machine": machine, "torch": has_torch.stdout.strip(), "canary_ms": canaries, "results": results}
        Path(options.out).write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
