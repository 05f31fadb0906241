"""The paper's tables 2 and 3 (Huang et al. 2019): throughput over K stages and M micro-batches, measured where there are cores
enough and simulated from profiles beyond (`crates/models/examples/scaling.rs`)."""

import json
import subprocess
from pathlib import Path

from figures import median, of_table, spread
from rounds import example

# What Huang et al. measured: M -> K -> throughput over that of K = 2, M = 1.
PAPER = {
    "amoeba": {1: {2: 1.0, 4: 1.13, 8: 1.38}, 4: {2: 1.07, 4: 1.26, 8: 1.72}, 32: {2: 1.21, 4: 1.84, 8: 3.48}},
    "gpt": {1: {2: 1.0, 4: 1.07, 8: 1.3}, 4: {2: 1.7, 4: 3.2, 8: 4.8}, 32: {2: 1.8, 4: 3.4, 8: 6.3}},
}
# The same of table 3, M = 32, over K = 2.
PAPER_SLOW = {"amoeba": {2: 1.0, 4: 1.7, 8: 2.7}, "gpt": {2: 1.0, 4: 1.8, 8: 3.3}}
PAPERS = {"amoeba": "AmoebaNet-D(18, 256), 224 x 224", "gpt": "Transformer-48"}
THREADS = "threads"


def measure(workload, rounds, path):
    out = subprocess.run([example("scaling"), f"workload={workload}", f"rounds={rounds}"], capture_output=True, text=True, check=True,
                         timeout=1800).stdout
    Path(path).write_text(out)


def read(path):
    """(M -> step times of two stages by round, (link, K, M) -> what was simulated)"""
    measured, simulated = {}, {}
    for line in map(json.loads, Path(path).read_text().splitlines()):
        if "round" in line:
            measured.setdefault(line["micro_batches"], []).append(line["step_ms"])
        else:
            simulated[line["link"], line["stages"], line["micro_batches"]] = line
    return measured, simulated


def normalised(path):
    """M -> K -> (throughput over that of K = 2, M = 1; whether it was measured): two stages over the measured step of one
    micro-batch, more over its simulated one."""
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


def section(workload, path):
    """Lines for a report."""
    measured, simulated = read(path)
    base = simulated[THREADS, 2, 1]["simulated_ms"]
    stages = sorted({k for _, k, _ in simulated})
    paper, rows = PAPER[workload], []
    for m, times in measured.items():
        row = [f"M = {m}", spread(times), f"{median([one / two for one, two in zip(measured[1], times)]):.2f}"]
        for k in stages:
            line = simulated[THREADS, k, m]
            row.append(f"{base / line['simulated_ms']:.2f} (imbalance {line['imbalance']:.2f}, bubble {100 * line['bubble']:.0f}%)")
        row.append(", ".join(str(paper.get(m, {}).get(k, "")) for k in stages))
        rows.append(row)
    header = ["", "K = 2, step in ms", "K = 2 **measured**", *(f"K = {k} *simulated*" for k in stages),
              f"the paper's {PAPERS[workload]}: K = {', '.join(map(str, stages))}"]
    lines = [*of_table(header, rows), ""]
    most, rows = max(measured), []
    for link in dict.fromkeys(link for link, _, _ in simulated):
        base = simulated[link, 2, most]["simulated_ms"]
        cells = [f"{base / simulated[link, k, most]['simulated_ms']:.2f}" for k in stages]
        rows.append([link, *cells, f"{simulated[link, 2, most]['simulated_ms'] / simulated[THREADS, 2, most]['simulated_ms']:.2f}"])
    rows.append(["the paper, without fast interconnect", *(PAPER_SLOW[workload][k] for k in stages), ""])
    header = [f"links, M = {most}", *(f"K = {k} *simulated*, over K = 2" for k in stages), "step of K = 2 over that with threads"]
    return lines + of_table(header, rows)
