"""Interleaved rounds of programs that print one JSON line each, and the report of them.

Each round runs every configuration once, in a rotating order, each in a process of its own, whose first step does
not count. Ratios are paired within a round. A canary (a fixed float32 product on one thread, plain PyTorch's)
shows how much the machine drifted, and the two-core ceiling how much of two cores there is: the same product on
two processes at once. Needs a Python with PyTorch 2.11: name it with TORCH_PYTHON, or its folder with TORCH_PATH;
without one scripts/pytorch.py fetches it (2.6 GB, once).
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
MEDIAN = statistics.median


@dataclasses.dataclass
class Workload:
    """What is measured."""
    name: str
    command: str
    # name -> (program, settings)
    jobs: dict
    # (title, [(name, name)]): whose ratios are reported
    pairs: list
    # Steps of a peer; those of gpipe are in its settings
    peer_steps: int
    # Milliseconds of a step, from what a program found
    step_ms: Callable
    step_is: str
    # More sections: results -> lines
    sections: list
    # Of the figures, after the date
    folder: str = ""


def gpipe(**settings):
    return ("gpipe", {"steps": 3, **settings})


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
    def __init__(self, workload, folder, python, path):
        self.workload, self.folder, self.python = workload, folder, python
        self.environment = dict(os.environ, PYTHONPATH=path)
        self.binary = ROOT / "target" / "release" / "examples" / f"{workload.name}_step"

    def command(self, program, settings):
        if program == "gpipe":
            return [str(self.binary), *(f"{key}={value}" for key, value in settings.items())]
        flags = []
        for key, value in settings.items():
            if value is not False:
                flags += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return [self.python, str(PEERS / f"{program}.py"), str(self.folder), "--workload", self.workload.name,
                "--steps", str(self.workload.peer_steps), *flags]

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


def bounds(ratios):
    """The narrowest interval of order statistics that has the median in at least 95% of all cases (or least and most)."""
    ratios, count = sorted(ratios), len(ratios)
    low = 0
    # Whether fewer than `low + 1` ratios are below the true median is a matter of fair coins.
    while 2 * sum(math.comb(count, below) for below in range(low + 2)) / 2**count <= 0.05:
        low += 1
    return ratios[low], ratios[count - 1 - low]


def interval(ratios):
    low, high = bounds(ratios)
    return f"{MEDIAN(ratios):.3f} [{low:.3f} .. {high:.3f}]"


def ratio(step_ms, a, b):
    return [step_ms(x) / step_ms(y) for x, y in zip(a, b)]


def table(workload, results):
    lines = [f"| configuration | {workload.step_is}, ms: median [least .. most] of the rounds | first loss |", "|---|---|---|"]
    for name, rounds in results.items():
        times = [workload.step_ms(found) for found in rounds]
        lines.append(f"| {name} | {spread(times)} | {rounds[0]['loss'][0]:.6f} |")
    return lines


def ratios(workload, results):
    lines = []
    for title, pairs in workload.pairs:
        lines += ["", f"### {title[0].upper()}{title[1:]}", "",
                  "| ratio of step times, paired within a round | median [least .. most] |", "|---|---|"]
        for a, b in pairs:
            if a in results and b in results:
                lines.append(f"| {a} / {b} | {spread(ratio(workload.step_ms, results[a], results[b]), 3)} |")
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


def machine():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":")[1].strip() + f", {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def main(workload, documentation):
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="default: benchmarks/DATE-WORKLOAD")
    parser.add_argument("--only", help="configurations whose name has one of these texts in it")
    parser.add_argument("--report", metavar="FOLDER", help="only write the report again, from FOLDER/raw.json")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        raw = json.loads((folder / "raw.json").read_text())
        return report(workload, folder, len(raw["canary_ms"]), raw)
    subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "--package", "gpipe-models", "--example",
                    f"{workload.name}_step"], cwd=ROOT, check=True)
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    path = os.environ.get("TORCH_PATH", os.environ.get("PYTHONPATH", ""))
    probe = [python, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(probe, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    if torch.returncode or not torch.stdout.startswith("2.11.0"):
        path = subprocess.run([python, str(ROOT / "scripts" / "pytorch.py")], check=True, capture_output=True,
                              text=True).stdout.strip().splitlines()[-1]
        torch = subprocess.run(probe, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    jobs = workload.jobs
    if options.only:
        wanted = options.only.split(",")
        jobs = {name: job for name, job in jobs.items() if any(text in name for text in wanted)}
    results, canaries, ceilings = {name: [] for name in jobs}, [], []
    out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-{workload.folder or workload.name}")
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(workload, folder, python, path)
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
            report(workload, out, options.rounds, raw)
    print((out / "report.md").read_text())


def report(workload, out, rounds, raw):
    done = len(raw["canary_ms"])
    lines = [f"# The `{workload.name}` step", "",
             f"{raw['machine']}; PyTorch {raw['torch']}; commit {raw.get('commit', 'unknown')}; {done} of {rounds} rounds.",
             "", "```sh", workload.command, "```", "",
             f"Canary (a 512 x 512 float32 product), ms: {spread(raw['canary_ms'], 2)}. Two-core ceiling (products of two "
             f"busy cores over those of one): {spread(raw['ceiling'], 2)}.", "", *table(workload, raw["results"]),
             *ratios(workload, raw["results"]), *efficiency(raw["results"]), *parts(raw["results"])]
    for section in workload.sections:
        lines += section(raw["results"])
    (out / "report.md").write_text("\n".join(lines) + "\n")

