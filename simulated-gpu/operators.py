#!/usr/bin/env python3
"""Writes cpp/missing_operators.inc: the operators that have a kernel for CPUs and none for CUDA.

Usage: PYTHONPATH=$(python3 scripts/pytorch.py) python3 simulated-gpu/operators.py [--check]

It asks PyTorch itself, which needs no GPU. Run it again when the version of PyTorch changes.
--check only tells whether the list is up to date.
"""

import sys
from pathlib import Path

import torch

LIST = Path(__file__).resolve().parent / "cpp" / "missing_operators.inc"


def missing():
    """The names, sorted."""
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return [name for name in sorted(torch._C._dispatch_get_all_op_names())
            if name.startswith("aten::") and has(name, "CPU") and not has(name, "CUDA")]


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    text = (f"// By operators.py, of PyTorch {torch.__version__.split('+')[0]}.\n"
            + "".join(f'"{name}",\n' for name in missing()))
    if sys.argv[1:]:
        if text != LIST.read_text():
            sys.exit(f"{LIST.name} is not PyTorch {torch.__version__}'s: run operators.py again")
        return
    LIST.write_text(text)


if __name__ == "__main__":
    main()
