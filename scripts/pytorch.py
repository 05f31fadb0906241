#!/usr/bin/env python3
"""Puts the full PyTorch (its Python part, too) where the comparisons with it look, and prints the
folder.

Usage: PYTHONPATH=$(pytorch.py [--torchvision]) python3 ...      (make parity)

TORCH_PATH names a folder to use instead. Otherwise, once, pip installs torch 2.11.0 and numpy into

    $GPIPE_HOME/pytorch-2.11.0        (GPIPE_HOME defaults to ~/.cache/gpipe)

and, if asked, torchvision 0.26.0 and pillow, which fit it, into

    $GPIPE_HOME/torchvision-0.26.0    (printed behind the other folder, with a colon between)

aside and renamed, so that a half-made folder is never taken for a whole one. About 3 GB are
fetched. Nothing but the comparisons needs it: gpipe itself is built on what setup.py fetches.
"""

import os
import sys
from pathlib import Path

import packages

VERSION = "2.11.0"
TORCHVISION = "0.26.0"


def main():
    if sys.argv[1:] not in ([], ["--torchvision"]):
        packages.fail(f"it takes --torchvision or nothing, not {' '.join(sys.argv[1:])}")
    if named := os.environ.get("TORCH_PATH"):
        folder, remedy = Path(named).resolve(), "unset TORCH_PATH to let this script install it"
    else:
        folder, remedy = packages.once(f"pytorch-{VERSION}", "numpy", f"torch=={VERSION}")
    found = packages.version_in(str(folder))
    if found != VERSION:
        has = (f"torch {found}, the comparisons need {VERSION}" if found
               else "no torch and numpy for this Python")
        packages.fail(f"{folder} has {has}: {remedy}")
    path = str(folder)
    if sys.argv[1:]:
        # Its dependencies are there or not needed: torch would be fetched again.
        folder, remedy = packages.once(f"torchvision-{TORCHVISION}", "--no-deps", "pillow",
                                       f"torchvision=={TORCHVISION}")
        path += f":{folder}"
        if packages.version_in(path, "torchvision") != TORCHVISION:
            packages.fail(f"{folder} has no torchvision {TORCHVISION} for this Python: {remedy}")
    print(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        packages.fail("interrupted; nothing was left behind")
