#!/usr/bin/env python3
"""A training that torchrun starts in two processes ends with the weights of one process, byte for
byte.

Needs PyTorch (PYTHONPATH) and target/debug/gpipe; `.ci/run` calls it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "debug" / "gpipe"
DEADLINE_S = 300
CONFIG = """
[model]
vocabulary = 300
features = 16
heads = 2
hidden = 32
blocks = 1
dropout = 0.1
[data]
sequence = 8
[pipeline]
stages = 2
micro_batches = 3
timeout_s = 60
[train]
steps = 6
mini_batch = 7
validation_tokens = 100
"""


def run(folder, out, *launcher):
    arguments = [*launcher, str(GPIPE), "train", "tiny.toml", "--text", "text.txt", "--out", out]
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
        (folder / "tiny.toml").write_text(CONFIG)
        (folder / "text.txt").write_text("".join(f"stage {n * n % 89} sends to stage {n}.\n"
                                                 for n in range(3000)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
                    "--nproc-per-node", "2"]
        one, two = run(folder, "one"), run(folder, "two", *torchrun)
        if one != two:
            sys.exit("torchrun: the weights of two processes are not those of one")
    print(f"torchrun: two processes end with the {len(one)} bytes of weights of one")


if __name__ == "__main__":
    main()
