"""The paper's own networks on its own accelerators, simulated from shapes and data sheets alone
(the driver `paper_tables`). A part of bench.py."""

import subprocess

import folders
from figures import paragraph
from rounds import driver

TABLES = ["throughput", "memory"]
LIMIT_S = 1800


def report(folder):
    """The text of the report: the program's tables."""
    lines = [
        *folders.heading("The paper's own networks, simulated", folder),
        *paragraph(
            "From shapes and data sheets alone: nothing was measured, and no number is fitted to"
            " the paper. docs/design/simulated-scale.md explains the columns and where the two"
            " differ."
        ),
        "",
    ]
    for table in TABLES:
        lines += [(folder / f"{table}.md").read_text().rstrip("\n"), ""]
    return "\n".join(lines)


def run_part(partial=None, out=None):
    """Runs the program, and publishes the part."""
    with folders.run("simulated", report, partial, out) as folder:
        for table in TABLES:
            command = [driver("paper_tables"), table]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=LIMIT_S
            )
            (folder / f"{table}.md").write_text(done.stdout)
