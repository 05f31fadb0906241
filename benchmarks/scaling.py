"""The paper's tables 2 and 3 (Huang et al. 2019): throughput over K stages and M micro-batches.

Measured where there are enough cores, simulated from profiles beyond
(the driver `scaling`). A part of bench.py.
"""

import json
import subprocess
from pathlib import Path

import folders
import plots
from figures import median, of_table, paragraph, with_range
from rounds import driver

WORKLOADS = ["gpt", "amoeba"]
ROUNDS = 5
# Of a workload.
LIMIT_S = 1800
# What Huang et al. measured: M -> K -> throughput over that of K = 2, M = 1.
PAPER = {
    "amoeba": {
        1: {2: 1.0, 4: 1.13, 8: 1.38},
        4: {2: 1.07, 4: 1.26, 8: 1.72},
        32: {2: 1.21, 4: 1.84, 8: 3.48},
    },
    "gpt": {
        1: {2: 1.0, 4: 1.07, 8: 1.3},
        4: {2: 1.7, 4: 3.2, 8: 4.8},
        32: {2: 1.8, 4: 3.4, 8: 6.3},
    },
}
# The same of table 3, M = 32, over K = 2.
PAPER_SLOW = {"amoeba": {2: 1.0, 4: 1.7, 8: 2.7}, "gpt": {2: 1.0, 4: 1.8, 8: 3.3}}
PAPERS = {"amoeba": "AmoebaNet-D(18, 256)", "gpt": "Transformer-48"}
THREADS = "threads"
WHAT = (
    "The same mini-batch for every K (stages) and M (micro-batches), in GPipe's schedule, with"
    " every micro-batch recomputed. K = 2 is measured, with a step of each M in turn. Larger K"
    " are simulated from a profile of the same machine. Throughput is over that of K = 2, M = 1:"
    " measured over measured, simulated over simulated. The paper's networks are larger and ran on"
    " accelerators; no number is fitted to them."
)


def measure(workload, rounds, path):
    command = [driver("scaling"), f"workload={workload}", f"rounds={rounds}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    Path(path).write_text(done.stdout)


def read(path):
    """(M -> step times of two stages by round, (link, K, M) -> what was simulated)"""
    measured, simulated = {}, {}
    for line in map(json.loads, Path(path).read_text().splitlines()):
        if "round" in line:
            measured.setdefault(line["micro_batches"], []).append(line["step_ms"])
        else:
            simulated[line["link"], line["stages"], line["micro_batches"]] = line
    return measured, simulated


def files(folder):
    """workload -> its raw data, of those that were run."""
    paths = {workload: folder / f"{workload}.jsonl" for workload in WORKLOADS}
    return {workload: path for workload, path in paths.items() if path.exists()}


def normalised(path):
    """M -> K -> (throughput over that of K = 2, M = 1; whether it was measured)."""
    measured, simulated = read(path)
    base = simulated[THREADS, 2, 1]["simulated_ms"]
    table = {}
    for m, times in measured.items():
        cells = {2: (median([one / two for one, two in zip(measured[1], times)]), True)}
        for (link, k, of_m), line in simulated.items():
            if link == THREADS and of_m == m and k > 2:
                cells[k] = (base / line["simulated_ms"], False)
        table[m] = cells
    return table


def rows(workload, path):
    """A row for each M: throughput, simulated and the paper's."""
    measured, simulated = read(path)
    base = simulated[THREADS, 2, 1]["simulated_ms"]
    stages = sorted({k for _, k, _ in simulated})
    shown = []
    for m, times in measured.items():
        ratios = [one / two for one, two in zip(measured[1], times)]
        cells = [f"{base / simulated[THREADS, k, m]['simulated_ms']:.2f}" for k in stages]
        paper = [PAPER[workload].get(m, {}).get(k, "") for k in stages]
        shown.append([f"`{workload}`", m, *with_range(ratios, 2), *cells, *paper])
    header = ["workload", "M", "K = 2, measured", "least .. most"]
    header += [f"K = {k}, simulated" for k in stages] + [f"K = {k}, the paper" for k in stages]
    return header, shown


def steps(path):
    """Step times, and what limits the simulated ones."""
    measured, simulated = read(path)
    stages = sorted({k for _, k, _ in simulated})
    shown = []
    for m, times in measured.items():
        lines = [simulated[THREADS, k, m] for k in stages]
        bubbles = [f"{100 * line['bubble']:.0f}" for line in lines]
        shown.append(
            [m, *with_range(times), *(f"{line['imbalance']:.2f}" for line in lines), *bubbles]
        )
    header = ["M", "K = 2: step, ms", "least .. most", *(f"K = {k}: imbalance" for k in stages)]
    return of_table([*header, *(f"K = {k}: bubble, %" for k in stages)], shown)


def links(workload, path):
    """Simulated throughput of most micro-batches, over slower links."""
    measured, simulated = read(path)
    stages, most, shown = sorted({k for _, k, _ in simulated}), max(measured), []
    time = lambda link, k: simulated[link, k, most]["simulated_ms"]
    for link in dict.fromkeys(link for link, _, _ in simulated):
        cells = [f"{time(link, 2) / time(link, k):.2f}" for k in stages]
        shown.append([link, *cells, f"{time(link, 2) / time(THREADS, 2):.2f}"])
    slow = PAPER_SLOW[workload]
    shown.append(["the paper, without a fast interconnect", *(slow.get(k, "") for k in stages), ""])
    header = [f"links, M = {most}", *(f"K = {k} over K = 2" for k in stages)]
    return of_table([*header, "step of K = 2 over that with threads"], shown)


def draw(folder):
    """Draws the report's picture."""
    tables = {workload: normalised(path) for workload, path in files(folder).items()}
    plots.scaling(plots.library(), tables, PAPER, folder / "scaling.svg")


def report(folder):
    """The text of the report."""
    lines = [
        *folders.heading("Throughput over stages and micro-batches", folder),
        *paragraph(WHAT),
        "",
        "![throughput over stages and micro-batches](scaling.svg)",
        "",
    ]
    for workload, path in files(folder).items():
        lines += [
            f"## `{workload}`, beside the paper's {PAPERS[workload]}",
            "",
            *of_table(*rows(workload, path)),
            "",
            "Step times. Imbalance is the busiest stage's work over the mean, simulated.",
            "",
            *steps(path),
            "",
            "Slower links, simulated from nominal rates. Between threads it is as profiled.",
            "",
            *links(workload, path),
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def summary(parts):
    """The section of RESULTS.md."""
    header, shown = [], []
    for folder in parts.values():
        for workload, path in files(folder).items():
            header, of_workload = rows(workload, path)
            shown += of_workload
    return [*paragraph(WHAT), "", *of_table(header, shown), ""]


def run_part(workloads, rounds, partial=None, out=None):
    """Measures the workloads, and publishes the part."""
    with folders.run("scaling", report, partial, out) as folder:
        for workload in workloads:
            measure(workload, rounds, folder / f"{workload}.jsonl")
        draw(folder)
