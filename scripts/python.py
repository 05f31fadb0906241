#!/usr/bin/env python3
"""Builds the Python package into an environment, python/env, over the PyTorch that pytorch.py
caches.

Usage: python.py [--dev] [--tests] [--simulated-gpus]        (make python, make test-python)

The environment refers to the cached PyTorch by a .pth file, so there is no second copy. pip
fetches maturin into it, and cargo the crates that the package is made of. --dev builds faster and
runs slower. --simulated-gpus also builds simulated GPUs, by the package's feature of that name, and
adds them to the environment. --tests adds what the tests need: those, pytest, transformers and what
it imports. The wheel stays in python/wheels, and works in any environment with PyTorch 2.11.0:

    pip install --no-deps python/wheels/gpipe_torch-*.whl

On Debian and Ubuntu it needs the packages python3-venv and python3-dev.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import packages

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "python"
ENVIRONMENT = FOLDER / "env"
WHEELS = FOLDER / "wheels"
MATURIN = "maturin>=1.8,<2"
TESTS = ["pytest>=8,<10", f"transformers=={packages.TRANSFORMERS}"]


def run(*command, **settings):
    if subprocess.run([str(own) for own in command], **settings).returncode:
        packages.fail(f"{Path(command[0]).name} failed: see its message above")


def check():
    """Names what the system lacks, before anything is built."""
    if sys.version_info < (3, 11):
        packages.fail(f"this is Python {sys.version.split()[0]}, the package needs 3.11")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        packages.fail("Python has no venv here: apt install python3-venv")
    if not header.exists():
        packages.fail(f"{header} is missing: apt install python3-dev")
    if shutil.which("cargo") is None:
        packages.fail("there is no cargo: install Rust (rustup.rs)")


def torch_folders():
    """The cached PyTorch and torchvision, which pytorch.py fetches if they are missing."""
    found = subprocess.run([sys.executable, ROOT / "scripts/pytorch.py", "--torchvision"],
                           text=True, stdout=subprocess.PIPE)
    if found.returncode:
        sys.exit(found.returncode)
    return found.stdout.strip().split(":")


def environment(folders, tests):
    """The environment's interpreter."""
    interpreter = ENVIRONMENT / "bin/python"
    if not interpreter.exists():
        run(sys.executable, "-m", "venv", ENVIRONMENT)
    site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    (site / "pytorch.pth").write_text("\n".join(folders) + "\n")
    wanted = [MATURIN, *(TESTS if tests else [])]
    run(interpreter, "-m", "pip", "install", "--quiet", *wanted)
    return interpreter


def build(interpreter, dev, simulated_gpus):
    """Builds the wheel and installs it. Puts simulated GPUs beside the installed package and its
    sources."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    own = dict(os.environ, LIBTORCH_USE_PYTORCH="1", VIRTUAL_ENV=str(ENVIRONMENT),
               PATH=f"{interpreter.parent}:{os.environ['PATH']}")
    own.pop("LIBTORCH", None)
    profile = [] if dev else ["--release"]
    features = ["--features", "simulated-gpus"] if simulated_gpus else []
    run(interpreter.parent / "maturin", "build", *profile, *features, "--auditwheel", "skip",
        "--locked", "--interpreter", interpreter, "--out", WHEELS, cwd=FOLDER, env=own)
    wheel = next(WHEELS.glob("*.whl"))
    run(interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    if not simulated_gpus:
        return
    programs = FOLDER / "target" / ("debug" if dev else "release")
    site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    for folder in (site / "gpipe", FOLDER / "gpipe"):
        shutil.copy(programs / "simulated-gpu/libtorch_cuda.so",
                    folder / "libgpipe_simulated_gpus.so")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dev", action="store_true", help="build faster, run slower")
    parser.add_argument("--tests", action="store_true", help="install what the tests need")
    parser.add_argument("--simulated-gpus", action="store_true", help="add simulated GPUs")
    options = parser.parse_args()
    check()
    interpreter = environment(torch_folders(), options.tests)
    build(interpreter, options.dev, options.tests or options.simulated_gpus)
    print(f"{packages.PROGRAM}: gpipe is in {ENVIRONMENT}: run {interpreter}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        packages.fail("interrupted")
