"""Statistics of repeated measurements, Markdown, and what other programs say."""

import math
import statistics
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
median = statistics.median


def spread(values, digits=0):
    """The median with the least and the most."""
    return f"{median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def between(low, high, digits):
    """Two bounds, as one cell."""
    return f"{low:.{digits}f} .. {high:.{digits}f}"


def with_range(values, digits=0):
    """Two cells: the median; the least and the most."""
    return [f"{median(values):.{digits}f}", between(min(values), max(values), digits)]


def with_interval(values, digits=3):
    """Two cells: the median; its interval."""
    return [f"{median(values):.{digits}f}", between(*bounds(values), digits)]


def bounds(values):
    """The narrowest interval of order statistics that has the median in at least 95% of all cases.

    Of fewer than six values: the least and the most.
    """
    values, count = sorted(values), len(values)
    low = 0
    # Whether fewer than `low + 1` values are below the true median is a matter of fair coins.
    while 2 * sum(math.comb(count, below) for below in range(low + 2)) / 2**count <= 0.05:
        low += 1
    return values[low], values[count - 1 - low]


def of_table(header, rows):
    """Lines of a Markdown table."""
    line = lambda cells: f"| {' | '.join(str(cell) for cell in cells)} |"
    return [line(header), line(["---"] * len(header)), *[line(row) for row in rows]]


def paragraph(text, width=100):
    """Lines of a paragraph, none longer than `width`."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def bullet(text):
    """Lines of an item of a list."""
    first, *rest = paragraph(text, 98)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def said_by(*command):
    """What a command prints, or None where it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit():
    """The commit that is measured, and whether the tree has changes beside it."""
    runners = ["benchmarks/*.py", "benchmarks/peers", "benchmarks/drivers"]
    measured = ["crates", "python", "configs", "Cargo.toml", "Cargo.lock", *runners]
    changed = said_by("git", "status", "--porcelain", "--", *measured)
    found = said_by("git", "rev-parse", "--short", "HEAD")
    return f"{found} with changes" if found and changed else found
