#!/usr/bin/env python3
"""Builds the bridge with NCCL, against the PyTorch with CUDA of the comparisons, and starts NCCL up
to the point where it needs a GPU.

Usage: nccl.py [FOLDER]      (FOLDER: what pytorch.py prints; part of .ci/run)

No GPU is needed. Two of CUDA's headers' packages are fetched once (4 MB). What is built is in
target/nccl.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import packages
from setup import CUDA_HEADERS

ROOT = Path(__file__).resolve().parent.parent
TEST = "nccl_starts_up_to_the_point_where_it_needs_a_gpu"


def links(source, destination):
    """A tree of folders with links to the files of `source`."""
    shutil.copytree(source, destination, copy_function=os.symlink, dirs_exist_ok=True)


def libtorch(pytorch, headers, folder):
    """A libtorch with all headers of CUDA beside it, where the bridge's build looks for them."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("torch/include", "torch/lib"):
        links(pytorch / part, folder / part)
    os.symlink(pytorch / "torch/version.py", folder / "torch/version.py")
    for packages_of in (pytorch, headers):
        links(packages_of / "nvidia", folder / "nvidia")
    return folder / "torch"


def main():
    named = sys.argv[1] if len(sys.argv) > 1 else None
    pytorch = Path(named.split(":")[0]) if named else packages.once(
        "pytorch-2.11.0", "numpy", "torch==2.11.0")[0]
    headers, _ = packages.once("cuda-headers-13.0", "--no-deps", *CUDA_HEADERS)
    target = ROOT / "target/nccl"
    torch = libtorch(Path(pytorch), Path(headers), target / "libtorch")
    own = {name: value for name, value in os.environ.items() if name != "LIBTORCH_USE_PYTORCH"}
    libraries = sorted((torch.parent / "nvidia").glob("*/lib"))
    # One test of a few calls: what takes time is to build it.
    own |= {"CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_TEST_OPT_LEVEL": "0"}
    own |= {"LIBTORCH": str(torch), "CARGO_TARGET_DIR": str(target),
            "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    command = ["cargo", "test", "--locked", "--package", "gpipe-bridge", "--lib", TEST, "--",
               "--nocapture"]
    done = subprocess.run(command, cwd=ROOT, env=own, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr[-4000:], sep="\n")
    # The test passes without NCCL, too, and then says so.
    if done.returncode or "1 passed" not in done.stdout or "built without NCCL" in done.stdout:
        packages.fail("NCCL was not built, or did not start")


if __name__ == "__main__":
    main()
