"""Simulated GPUs, which the environment variable GPIPE_SIMULATED_GPUS asks for.

PyTorch looks for GPUs once, as it is imported, so they have to be there before.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

VARIABLE = "GPIPE_SIMULATED_GPUS"
LIBRARY = Path(__file__).with_name("libgpipe_simulated_gpus.so")
# In the order in which they need each other. A PyTorch for CPUs lacks those of CUDA.
_PYTORCHS = ["libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libc10_cuda.so",
             "libtorch_cuda.so"]


def are_wanted():
    return os.environ.get(VARIABLE, "") not in ("", "0")


def load():
    """Puts simulated GPUs in the place of real ones. Called before PyTorch is imported."""
    if not are_wanted():
        return
    if "torch" in sys.modules:
        raise ImportError(f"{VARIABLE} is set, and PyTorch has looked for GPUs already: import "
                          "gpipe before torch")
    if not LIBRARY.exists():
        raise ImportError(f"{VARIABLE} is set, and there are no simulated GPUs at {LIBRARY}: build "
                          "the package with make python ARGS=--simulated-gpus, or unset it")
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("there is no PyTorch: pip install torch==2.11.0")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    for path in [*(folder / name for name in _PYTORCHS), LIBRARY]:
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    print(f"gpipe: GPUs are simulated ({VARIABLE}={os.environ[VARIABLE]})", file=sys.stderr)


def tell(torch):
    """Tells PyTorch's Python part, which would ask a driver."""
    if not are_wanted():
        return
    count = int(os.environ[VARIABLE])
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    # These choose by the properties of a real GPU.
    torch.backends.cudnn.enabled = False
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
