#!/usr/bin/env python3
"""Puts the full PyTorch (its Python part, too) where the comparisons with it look, and prints the folder.

Usage: PYTHONPATH=$(pytorch.py) python3 ...      (make parity)

TORCH_PATH names a folder to use instead. Otherwise, once, pip installs torch 2.11.0 and numpy into

    $GPIPE_HOME/pytorch-2.11.0        (GPIPE_HOME defaults to ~/.cache/gpipe)

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


def fail(message):
    sys.exit(f"pytorch: {message}")


def version_in(folder):
    """The version that this Python imports from the folder, without its local part; None if it cannot."""
    found = subprocess.run([sys.executable, "-c", "import numpy, torch; print(torch.__version__)"], text=True,
                           capture_output=True, env=dict(os.environ, PYTHONPATH=str(folder)))
    return None if found.returncode else found.stdout.strip().split("+")[0]


def install(home, destination):
    aside = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=home))
    try:
        print(f"pytorch: installing torch {VERSION} into {destination}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(aside), f"torch=={VERSION}", "numpy"]
        if subprocess.run(pip, stdout=sys.stderr, env=dict(os.environ, PIP_ROOT_USER_ACTION="ignore")).returncode:
            fail("pip failed: see its message above; it needs a reachable package index and about 8 GB of disk")
        aside.chmod(0o755)
        aside.rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main():
    if named := os.environ.get("TORCH_PATH"):
        folder, remedy = Path(named).resolve(), "unset TORCH_PATH to let this script install it"
    else:
        home = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe")
        home.mkdir(parents=True, exist_ok=True)
        folder = home / f"pytorch-{VERSION}"
        remedy = f"remove that folder to have it installed for {sys.executable}"
        with open(home / "pytorch.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                install(home, folder)
    found = version_in(folder)
    if found != VERSION:
        has = f"torch {found}, the comparisons need {VERSION}" if found else "no torch and numpy for this Python"
        fail(f"{folder} has {has}: {remedy}")
    print(folder)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; nothing was left behind")
