#!/usr/bin/env python3
"""Puts the full PyTorch (its Python part, too) where the comparisons with it look, and prints the folder.

Usage: PYTHONPATH=$(pytorch.py [--torchvision]) python3 ...      (make parity)

TORCH_PATH names a folder to use instead. Otherwise, once, pip installs torch 2.11.0 and numpy into

    $GPIPE_HOME/pytorch-2.11.0        (GPIPE_HOME defaults to ~/.cache/gpipe)

and, if asked, torchvision 0.26.0 and pillow, which fit it, into

    $GPIPE_HOME/torchvision-0.26.0    (printed behind the other folder, with a colon between)

aside and renamed, so that a half-made folder is never taken for a whole one. About 3 GB are fetched. Nothing
but the comparisons needs it: gpipe itself is built on what setup.py fetches.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "2.11.0"
TORCHVISION = "0.26.0"
PROGRAM = Path(sys.argv[0]).stem  # or the script that installs another package this way


def fail(message):
    sys.exit(f"{PROGRAM}: {message}")


def version_in(path, module="torch"):
    """The version that this Python imports from the path, without its local part; None if it cannot."""
    found = subprocess.run([sys.executable, "-c", f"import numpy, {module}; print({module}.__version__)"], text=True,
                           capture_output=True, env=dict(os.environ, PYTHONPATH=path))
    return None if found.returncode else found.stdout.strip().split("+")[0]


def install(home, destination, *packages):
    aside = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=home))
    try:
        print(f"{PROGRAM}: installing {packages[-1]} into {destination}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(aside), *packages]
        if subprocess.run(pip, stdout=sys.stderr, env=dict(os.environ, PIP_ROOT_USER_ACTION="ignore")).returncode:
            fail("pip failed: see its message above; it needs a reachable package index and disk (about 8 GB for PyTorch)")
        aside.chmod(0o755)
        aside.rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def once(name, *packages):
    """The folder of that name, with the packages installed into it if there was none; and its remedy."""
    home = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe")
    home.mkdir(parents=True, exist_ok=True)
    folder = home / name
    with open(home / "pytorch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            install(home, folder, *packages)
    return folder, f"remove that folder to have it installed for {sys.executable}"


def main():
    if sys.argv[1:] not in ([], ["--torchvision"]):
        fail(f"it takes --torchvision or nothing, not {' '.join(sys.argv[1:])}")
    if named := os.environ.get("TORCH_PATH"):
        folder, remedy = Path(named).resolve(), "unset TORCH_PATH to let this script install it"
    else:
        folder, remedy = once(f"pytorch-{VERSION}", "numpy", f"torch=={VERSION}")
    found = version_in(str(folder))
    if found != VERSION:
        has = f"torch {found}, the comparisons need {VERSION}" if found else "no torch and numpy for this Python"
        fail(f"{folder} has {has}: {remedy}")
    path = str(folder)
    if sys.argv[1:]:
        # Its dependencies are there or not needed: torch would be fetched again.
        folder, remedy = once(f"torchvision-{TORCHVISION}", "--no-deps", "pillow", f"torchvision=={TORCHVISION}")
        path += f":{folder}"
        if version_in(path, "torchvision") != TORCHVISION:
            fail(f"{folder} has no torchvision {TORCHVISION} for this Python: {remedy}")
    print(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; nothing was left behind")
