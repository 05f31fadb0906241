#!/usr/bin/env python3
"""Builds the GPU kit: gpipe's programs against the CUDA libtorch, stripped, in one folder that
travels to a GPU machine.

Usage: gpu_first_hour.sh prepare [--out out/gpu-kit] [--libtorch FOLDER]

The CUDA libtorch is the one that setup.py pins (2.6 GB, fetched once) unless --libtorch names a
folder with `lib` and `include`. The build has a target folder of its own, `out/gpu-build`, and
leaves this clone's `.libtorch` as it is. The kit's `manifest.json` says which commit, compiler and
libtorch it was made from, and has the size and SHA-256 of each program.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setup

ROOT = Path(__file__).resolve().parent.parent
DRIVERS = ["bits", "gpt_step", "amoeba_step", "memory", "prediction"]
TEST = "gpu"  # of the package gpipe
MOST_BYTES = (
    50 << 20
)  # of all programs: a working tree travels beside them, and 64 MiB is a usual bound
SAYS_THAT_IT_STARTED = (  # a driver's answer to an argument without one
    "write arguments as key=value"
)


def fail(message):
    sys.exit(f"gpu_first_hour.sh prepare: {message}")


def said_by(*command):
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def environment(torch):
    """That of the build: this libtorch, whatever the clone is linked to."""
    own = {key: value for key, value in os.environ.items() if key != "LIBTORCH_USE_PYTORCH"}
    return dict(own, LIBTORCH=str(torch))


def executables(messages):
    """Name -> path of what cargo's JSON messages say it built."""
    found = {}
    for line in messages.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable"):
            found[message["target"]["name"]] = Path(message["executable"])
    return found


def build(torch):
    """Name -> path of the kit's programs, not yet stripped."""
    shared = [
        "--release",
        "--locked",
        "--target-dir",
        "out/gpu-build",
        "--message-format",
        "json-render-diagnostics",
    ]
    drivers = [flag for name in DRIVERS for flag in ["--bin", name]]
    commands = [
        ["cargo", "build", *shared, "--package", "gpipe-drivers", *drivers],
        ["cargo", "test", "--no-run", *shared, "--package", "gpipe", "--test", TEST],
    ]
    found = {}
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(torch), stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            fail(f"'{' '.join(command[:2])}' failed ({done.returncode}): see its message above")
        found.update(executables(done.stdout))
    wanted = [*DRIVERS, TEST]
    if missing := [name for name in wanted if name not in found]:
        fail(f"cargo built no {', '.join(missing)}: was the target renamed?")
    return {name: found[name] for name in wanted}


def needs(path):
    """What the loader wants: libraries, the newest glibc, and whether LD_LIBRARY_PATH comes before
    a path in the program."""
    dynamic, versions = said_by("readelf", "--dynamic", str(path)), said_by(
        "readelf", "--version-info", str(path)
    )
    glibc = {
        tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", versions)
    }
    return {
        "libraries": re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic),
        "glibc": ".".join(map(str, max(glibc, default=(0, 0)))),
        # DT_RPATH would come before LD_LIBRARY_PATH; DT_RUNPATH comes after it.
        "rpath": re.findall(r"\(RPATH\).*\[(.*)\]", dynamic),
        "runpath": re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic),
    }


def start(program, lib):
    """None if the program starts with the libraries of this folder, or what it says instead."""
    arguments = ["--list"] if program.name == TEST else ["start"]
    own = dict(os.environ, LD_LIBRARY_PATH=str(lib))
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env=own, timeout=120
    )
    started = done.returncode == 0 if program.name == TEST else SAYS_THAT_IT_STARTED in done.stderr
    return (
        None
        if started
        else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-500:].strip()}"
    )


def pack(programs, torch, out):
    """Strips the programs into `out`, and looks at each as the GPU machine's loader will. Returns
    the manifest's entries."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    entries = {}
    for name, path in programs.items():
        packed = out / name
        subprocess.run(["strip", "--strip-all", "-o", str(packed), str(path)], check=True)
        found = needs(packed)
        if found["rpath"]:
            fail(
                f"{name} has an RPATH ({found['rpath'][0]}), which LD_LIBRARY_PATH cannot replace:"
                " link it with -Wl,--enable-new-dtags"
            )
        if wrong := start(packed, torch / "lib"):
            fail(f"{name} does not start with {torch}/lib as LD_LIBRARY_PATH: {wrong}")
        entries[name] = {"bytes": packed.stat().st_size, "sha256": setup.sha256(packed), **found}
    return entries


def check_size(entries, most=MOST_BYTES):
    """Refuses a kit that is too large to travel, with the list of what is in it."""
    total = sum(entry["bytes"] for entry in entries.values())
    if total > most:
        listed = ", ".join(
            f"{name} {entry['bytes'] / 2**20:.1f} MiB" for name, entry in entries.items()
        )
        fail(
            f"the programs have {total / 2**20:.1f} MiB together, more than {most >> 20}: {listed};"
            " leave one out of DRIVERS in scripts/gpu_prepare.py"
        )
    return total


def libtorch(named):
    """The CUDA libtorch's folder."""
    torch = Path(named).resolve() if named else setup.stored("cuda")
    version = setup.version_of(torch)
    if version != setup.VERSION:
        fail(
            f"{torch} is libtorch {version or 'of unknown version'}, gpipe is built on"
            f" {setup.VERSION}: name another with --libtorch, or leave it out"
        )
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        fail(
            f"{torch} has no lib/libtorch_cuda.so: name a libtorch with CUDA, or leave"
            " --libtorch out"
        )
    return torch


def main():
    parser = argparse.ArgumentParser(
        prog="gpu_first_hour.sh prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit")
    parser.add_argument("--libtorch")
    options = parser.parse_args()
    torch = libtorch(options.libtorch)
    print(f"building against {torch}; the first time takes some minutes", file=sys.stderr)
    entries = pack(build(torch), torch, options.out)
    total = check_size(entries)
    changed = said_by("git", "status", "--porcelain", "--", "crates", "Cargo.toml", "Cargo.lock")
    manifest = {
        "commit": said_by("git", "rev-parse", "HEAD") + (" with changes" if changed else ""),
        "rustc": said_by("rustc", "--version"),
        "libtorch": setup.VERSION,
        "programs": entries,
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, entry in entries.items():
        print(f"{entry['bytes'] / 2**20:6.1f} MiB  {name}  (glibc {entry['glibc']} or newer)")
    print(
        f"{total / 2**20:6.1f} MiB in {options.out}: take it along with the repository, then "
        "scripts/gpu_first_hour.sh run"
    )


if __name__ == "__main__":
    main()
