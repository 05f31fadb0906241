"""Whether the GPU kit can run here: its programs, the Python with PyTorch whose libtorch they use,
the GPU."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import machine
from figures import said_by
from rounds import TORCH

PREPARE = (
    "run `scripts/gpu_first_hour.sh prepare` where there is a network, and take its folder along"
)
LOADS_S = 180  # longest start of a program, which loads libtorch's CUDA part
PROBE = """
import json, torch
from pathlib import Path
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
one = torch.cuda.get_device_properties(0) if gpus else None
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(), "lib": str(Path(torch.__file__).parent / "lib"),
    "gpus": gpus, "gpu": one.name if one else None, "gpu_bytes": one.total_memory if one else None,
}))
"""


def fail(message):
    sys.exit(f"gpu_first_hour.sh: {message}")


def check_kit(kit):
    """The kit's manifest, once all its programs are there as they were built."""
    path = kit / "manifest.json"
    if not path.is_file():
        fail(f"there is no kit in {kit}: {PREPARE}, or name one with --kit")
    manifest = json.loads(path.read_text())
    for name, entry in manifest["programs"].items():
        program = kit / name
        if not program.is_file():
            fail(f"{kit} has no {name}: {PREPARE}")
        if hashlib.sha256(program.read_bytes()).hexdigest() != entry["sha256"]:
            fail(
                f"{program} is not what the manifest says (SHA-256): copy the kit again, or"
                f" {PREPARE}"
            )
        if not os.access(program, os.X_OK):
            program.chmod(0o755)
    return manifest


def torch_of(python, wanted=TORCH):
    """What a Python's PyTorch says of itself and of the GPU."""
    command = [python, "-W", "ignore", "-c", PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=LOADS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        fail(f"{python} does not run ({error}): name one that has torch {wanted} with TORCH_PYTHON")
    if probe.returncode:
        why = (probe.stderr.strip().splitlines() or ["it says nothing"])[-1]
        fail(
            f"{python} cannot import PyTorch ({why}): name a Python that has torch {wanted} with"
            " TORCH_PYTHON"
        )
    found = json.loads(probe.stdout.strip().splitlines()[-1])
    if found["torch"].split("+")[0] != wanted:
        fail(
            f"{python} has torch {found['torch']}, the kit was built against {wanted}: name another"
            " Python with TORCH_PYTHON"
        )
    if not found["cuda"]:
        fail(
            f"{python} has a torch {found['torch']} without CUDA: name another Python with"
            " TORCH_PYTHON"
        )
    return found


def environment(torch):
    """Variables of every process: this libtorch, and nothing that changes kernels by chance."""
    chosen = ["CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"]
    own = {key: value for key, value in os.environ.items() if key not in chosen}
    paths = [torch["lib"], *filter(None, [own.get("LD_LIBRARY_PATH")])]
    return own | {"LD_LIBRARY_PATH": ":".join(paths)}


def starts(program, environment):
    """None if a program starts, or what it says instead. The loader's failures have code 127."""
    try:
        done = subprocess.run(
            [program, "--list" if program.name == "gpu" else "start"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=LOADS_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode in (0, 1):
        return None
    return f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"


def check_programs(kit, manifest, environment):
    """Every program starts; all at once, because each loads gigabytes."""
    names = list(manifest["programs"])
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: starts(kit / name, environment), names))
    for name, wrong in zip(names, found, strict=True):
        if wrong:
            fail(
                f"{kit / name} does not start ({wrong}): it needs glibc"
                f" {manifest['programs'][name]['glibc']} and the libraries of"
                f" {environment['LD_LIBRARY_PATH']}"
            )


def describe(manifest, torch):
    """Kit, machine and versions, for the results."""
    driver = (
        said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if torch["gpus"]
        else None
    )
    return {
        "kit": {key: manifest[key] for key in ("commit", "rustc", "libtorch")},
        "machine": machine.here().title(),
        "processor": dataclasses.asdict(machine.here()),
        "python": sys.version.split()[0],
        "driver": driver,
        **{key: torch[key] for key in ("torch", "cuda", "cudnn", "gpus", "gpu", "gpu_bytes")},
    }
