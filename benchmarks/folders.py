"""Where the files of a run go.

A run of a part (`gpt`, `memory-amoeba`, ..) writes to a folder aside. When it has ended without an
error, that folder replaces `results/MACHINE/PART`. So a part's folder is of one run, whole.

A run that leaves something out goes to `out/benchmarks/MACHINE/PART` in the same way, so that it
never replaces the figures of a whole one. A folder that the user names is taken as it is.

Each folder has the raw data, `environment.json` and `report.md`, which is generated from the two.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path

from figures import ROOT, bullet, commit, said_by
from machine import Machine, here

BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PARTIAL = ROOT / "out" / "benchmarks"
ENVIRONMENT = "environment.json"
REPORT = "report.md"
# What gpipe stands on (scripts/setup.py).
LIBTORCH = "2.11.0"


def command():
    """The command that runs now, as it is typed in the repository's root."""
    return shlex.join(["python3", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def reasons(*pairs):
    """Why a run is partial, from (whether, why) pairs; None where no reason holds."""
    return "; ".join(why for holds, why in pairs if holds) or None


def place(part, partial, machine):
    """The folder of a part: of the whole runs where nothing is left out."""
    return (PARTIAL if partial else RESULTS) / machine.slug() / part


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def replace(destination, aside):
    """Puts `aside` where `destination` is. The earlier folder is there until then."""
    earlier = destination.with_name(f".{destination.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if destination.exists():
        destination.rename(earlier)
    aside.rename(destination)
    shutil.rmtree(earlier, ignore_errors=True)


@contextlib.contextmanager
def whole(destination):
    """A folder aside, which takes the place of `destination` when the block has ended.

    After an error the folder stays aside, and `destination` is as it was. A folder that is not of
    an earlier run is never replaced.
    """
    is_of_run = (destination / ENVIRONMENT).exists()
    if destination.exists() and not is_of_run and any(destination.iterdir()):
        sys.exit(f"{destination} has other files: name a new folder, or that of an earlier run")
    aside = destination.with_name(f".{destination.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        print(f"not finished: {destination} is as it was, see {aside}", file=sys.stderr)
        raise
    replace(destination, aside)


@contextlib.contextmanager
def run(part, report, partial=None, out=None, versions=None):
    """A folder for the files of a run of `part`, which takes its place when the block has ended.

    `report(folder)` is the text of the report. `partial` is what the run leaves out, in words, or
    None. `out` is a folder to use instead. `versions` are those of the peers.
    """
    machine = here()
    destination = out or place(part, partial, machine)
    begun, load, measured = time.monotonic(), os.getloadavg()[0], commit()
    with whole(destination) as aside:
        yield aside
        told = {
            "part": part,
            "partial": partial,
            "date": str(datetime.date.today()),
            "command": command(),
            "commit": measured,
            "machine": dataclasses.asdict(machine),
            "versions": {
                "libtorch of gpipe": LIBTORCH,
                **(versions or {}),
                "rustc": said_by("rustc", "--version"),
                "python": platform.python_version(),
                "kernel": platform.release(),
            },
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "load_before": round(load, 2),
            "seconds": round(time.monotonic() - begun),
        }
        (aside / ENVIRONMENT).write_text(json.dumps(told, indent=1) + "\n")
        (aside / REPORT).write_text(report(aside))
    tell(destination, partial)


def tell(destination, partial):
    """Prints the report, where it is, and whether it counts."""
    print((destination / REPORT).read_text())
    print(f"{destination / REPORT} is written.")
    if destination.resolve().is_relative_to(RESULTS.resolve()):
        print("Now run: python3 benchmarks/results.py")
    else:
        why = f" This is a partial run ({partial})." if partial else ""
        print(f"The figures in benchmarks/results/ are as they were.{why}")


def rewrite(folder, report):
    """Writes the report of a folder again, from its raw data."""
    text = report(folder)
    (folder / REPORT).write_text(text)
    print(text)


@dataclasses.dataclass(frozen=True)
class Environment:
    """What `environment.json` says. None stands for what is not known."""

    part: str
    partial: str
    date: str
    command: str
    commit: str
    machine: Machine
    versions: dict
    memory_gib: float
    load_before: float
    seconds: float
    # What had to be found out after the run, if anything.
    note: str = None


def environment(folder):
    """The environment of a run's folder."""
    told = json.loads((folder / ENVIRONMENT).read_text())
    return Environment(**{**told, "machine": Machine(**told["machine"])})


def known_versions(versions):
    """The versions that are known, in words."""
    known = [(name, version) for name, version in versions.items() if version]
    return ", ".join(f"{name} {version.removeprefix(f'{name} ')}" for name, version in known)


def heading(title, folder):
    """The first lines of a report: what was run, where and how."""
    told = environment(folder)
    date, commit_ = told.date or "not recorded", told.commit or "not recorded"
    items = [f"Machine: {told.machine.title()}.", f"Date: {date}. Commit: {commit_}."]
    if known := known_versions(told.versions):
        items.append(f"Versions: {known}.")
    if told.seconds is not None:
        items.append(f"The run took {told.seconds} s.")
    if told.partial:
        items.append(f"A partial run: {told.partial}.")
    if told.note:
        items.append(told.note)
    lines = [f"# {title}", "", *(line for item in items for line in bullet(item)), ""]
    return [*lines, "```sh", *(told.command or "not recorded").splitlines(), "```", ""]
