#!/usr/bin/env python3
"""Builds and runs a crate outside of the workspace, from nothing, with the files that
docs/guides/library.md has.

    python3 scripts/outside_crate.py

The page's files, and no others, are written into a new folder beside a link to this repository. The
variables by which this shell finds libtorch are taken away first. The lock file is copied, so that
the crate has the versions that are tested.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "library.md"
FILES = {"Cargo.toml", ".cargo/config.toml", "build.rs", "src/main.rs"}
UNSET = ("LIBTORCH", "LIBTORCH_USE_PYTORCH", "LD_LIBRARY_PATH", "CARGO_TARGET_DIR", "RUSTFLAGS")


def files_of(page):
    """The files of a page: `mine/NAME` in a paragraph, and the block of code behind it."""
    return dict(re.findall(r"^`mine/([^`]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", page,
                           re.MULTILINE | re.DOTALL))


def main():
    files = files_of(PAGE.read_text(encoding="utf-8"))
    if set(files) != FILES:
        sys.exit(f"outside_crate: {PAGE.name} has {sorted(files)}, not {sorted(FILES)}")
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "gpipe").symlink_to(ROOT)
        mine = Path(folder) / "mine"
        for name, content in files.items():
            (mine / name).parent.mkdir(parents=True, exist_ok=True)
            (mine / name).write_text(content, encoding="utf-8")
        shutil.copy(ROOT / "Cargo.lock", mine)
        ran = subprocess.run(["cargo", "run", "--quiet"], cwd=mine, env=environment, text=True,
                             stdout=subprocess.PIPE)
    if ran.returncode or not re.fullmatch(r"loss \d+\.\d{4} in 2 stages\n", ran.stdout):
        sys.exit(f"outside_crate: the crate of {PAGE.name} failed ({ran.returncode}):"
                 f" {ran.stdout!r}")
    print(f"outside_crate: a crate made of docs/guides/library.md says: {ran.stdout.strip()}")


if __name__ == "__main__":
    main()
