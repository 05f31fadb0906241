#!/usr/bin/env python3
"""Puts free fonts where gpipe looks for them, to draw images of characters from.      (make fonts)

Fetches the Debian packages listed in font_packages.txt (about 40 MB) and keeps their fonts and copyright files in

    $GPIPE_HOME/fonts        (GPIPE_HOME defaults to ~/.cache/gpipe)

aside and renamed, so that a half-made folder is never taken for a whole one. No root is needed and nothing is
installed. Prints the folder and how much is in it. Run again, it does nothing unless font_packages.txt has changed.

Not on Debian or the like: install fonts with the system's package manager, or put .ttf and .otf files below
~/.local/share/fonts. gpipe looks there and below /usr/share/fonts, too.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import debian  # noqa: E402

SUFFIXES = {".ttf", ".otf"}
FEWEST = 20  # packages; with fewer there is too little to learn from


def listed():
    lines = Path(__file__).with_name("font_packages.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def main():
    folder = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe") / "fonts"
    try:
        debian.fetch(listed(), folder, keep=lambda path: path.suffix.lower() in SUFFIXES, fewest=FEWEST)
    except (debian.Failed, OSError) as error:
        sys.exit(f"fonts: {error}")
    packages = sum(path.is_dir() for path in folder.iterdir())
    fonts = sum(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))
    print(f"{folder}: {fonts} fonts of {packages} packages")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("fonts: interrupted; nothing was left behind")
