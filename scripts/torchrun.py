#!/usr/bin/env python3
"""A training that torchrun starts in two processes ends with the weights of one process, byte for
byte.

Needs PyTorch (PYTHONPATH) and target/debug/gpipe; `.ci/run` calls it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import tiny

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "debug" / "gpipe"
DEADLINE_S = 300


def run(folder, out, *launcher):
    arguments = [*launcher, str(GPIPE), "train", "tiny.toml", "--out", out]
    result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True,
                            timeout=DEADLINE_S)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n"
                 f"{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return (folder / out / "weights.safetensors").read_bytes()


def main():
    if not GPIPE.exists():
        sys.exit(f"{GPIPE} is not there: cargo build --package gpipe-cli")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tiny.write(folder)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
                    "--nproc-per-node", "2"]
        one, two = run(folder, "one"), run(folder, "two", *torchrun)
        if one != two:
            sys.exit("torchrun: the weights of two processes are not those of one")
    print(f"torchrun: two processes end with the {len(one)} bytes of weights of one")


if __name__ == "__main__":
    main()
