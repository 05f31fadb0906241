#!/usr/bin/env python3
"""Puts translations where gpipe looks for them, to learn translating from.      (make catalogues)

Fetches the Debian packages listed in catalogue_packages.txt and keeps their gettext catalogues and copyright files in

    $GPIPE_HOME/catalogues        (GPIPE_HOME defaults to ~/.cache/gpipe)

aside and renamed, so that a half-made folder is never taken for a whole one. No root is needed and nothing is
installed; that a system leaves translations out when it installs packages (slim images do) makes no difference. Prints
the folder and how much is in it. Run again, it does nothing unless catalogue_packages.txt has changed.

Not on Debian or the like: name a folder that has catalogues, such as /usr/share/locale, in the configuration.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import debian  # noqa: E402

FEWEST = 20  # packages; with fewer there is too little to learn from


def listed():
    lines = Path(__file__).with_name("catalogue_packages.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def is_catalogue(path):
    """Whether a path is that of a compiled catalogue, .../de/LC_MESSAGES/program.mo."""
    return path.suffix == ".mo" and path.parent.name == "LC_MESSAGES"


def main():
    folder = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe") / "catalogues"
    try:
        debian.fetch(listed(), folder, keep=is_catalogue, fewest=FEWEST)
    except (debian.Failed, OSError) as error:
        sys.exit(f"catalogues: {error}")
    packages = sum(path.is_dir() for path in folder.iterdir())
    catalogues = [path for path in folder.rglob("*.mo") if is_catalogue(path)]
    languages = {path.parent.parent.name for path in catalogues}
    print(f"{folder}: {len(catalogues)} catalogues in {len(languages)} languages of {packages} packages")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("catalogues: interrupted; nothing was left behind")
