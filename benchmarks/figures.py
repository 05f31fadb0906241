"""Figures of repeated measurements, and where they were made."""

import math
import os
import platform
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
median = statistics.median


def spread(values, digits=0):
    """The median with the least and the most."""
    return f"{median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def bounds(values):
    """The narrowest interval of order statistics that has the median in at least 95% of all cases (or least and most)."""
    values, count = sorted(values), len(values)
    low = 0
    # Whether fewer than `low + 1` values are below the true median is a matter of fair coins.
    while 2 * sum(math.comb(count, below) for below in range(low + 2)) / 2**count <= 0.05:
        low += 1
    return values[low], values[count - 1 - low]


def confidence(count):
    """In how many percent of all cases `bounds` of so many values have the median."""
    low = 0
    while 2 * sum(math.comb(count, below) for below in range(low + 2)) / 2**count <= 0.05:
        low += 1
    return 100 * (1 - 2 * sum(math.comb(count, below) for below in range(low + 1)) / 2**count)


def interval(values, digits=3):
    """The median with its interval."""
    low, high = bounds(values)
    return f"{median(values):.{digits}f} [{low:.{digits}f} .. {high:.{digits}f}]"


def of_table(header, rows):
    """Lines of a Markdown table."""
    line = lambda cells: f"| {' | '.join(str(cell) for cell in cells)} |"
    return [line(header), line(["---"] * len(header)), *[line(row) for row in rows]]


def told_of_cpu():
    """What the system tells of the first processor."""
    pairs = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu():
    return told_of_cpu().get("model name", platform.machine())


def machine():
    """By its numbers, too: a virtual machine's name hides which processor it is, and what that makes of a product differs by two."""
    told = told_of_cpu()
    numbers = "".join(f", {key} {told[key]}" for key in ["cpu family", "model"] if key in told)
    return f"{cpu()}{numbers}, {os.cpu_count()} cores"


def said_by(*command):
    """What a command prints, or that it is not there."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit():
    """The commit that is measured, and whether the tree has changes beside it."""
    changed = said_by("git", "status", "--porcelain", "--", "crates", "Cargo.toml", "Cargo.lock", "benchmarks/*.py", "benchmarks/peers")
    return said_by("git", "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
