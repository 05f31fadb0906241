"""What the GPU kit runs: its parts, most valuable first, each as programs that one after another
say what they found.

A part is a generator of steps. It is sent what each step found (None where nothing is run), so that
a search can go on from there. A step is one process, of the kit or of `peers/`, and prints JSON
lines; the test prints text.
"""

import dataclasses
import types
from pathlib import Path
from typing import Callable

from memory import search
from rounds import Runner, Workload, gpipe, peer

# What makes cuBLAS give the same bits on several streams; and float32 that is float32.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
DTYPES = ["float32", "bfloat16"]
WARM_UP = 5  # steps of every program before those that count; torch.compile compiles in the first
STEPS = WARM_UP + 10
ROUNDS = 3
CAP = 8_000_000_000  # the paper's accelerator of table 1
MOST_TRIES = 12  # of a search
STEP_LIMIT_S = 150  # of one process; compiling takes longest


@dataclasses.dataclass(frozen=True)
class Step:
    """One process: what it is called in the report, its command, and variables set for it."""

    name: str
    command: list
    environment: dict
    # What the report groups by.
    of: dict = dataclasses.field(default_factory=dict)
    # Whether it is run again where an earlier run has its result: its files are gone.
    always: bool = False
    limit_s: float = STEP_LIMIT_S


@dataclasses.dataclass(frozen=True)
class Context:
    """Where the parts run: programs, device, the Python of the peers, a folder for weights; at tiny
    sizes or at full ones."""

    kit: Path
    device: str
    python: str
    scratch: Path
    tiny: bool

    def program(self, name, **settings):
        return [str(self.kit / name), *(f"{key}={value}" for key, value in settings.items())]


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    title: str
    # Seconds that it may take, and on what it runs: without a GPU only parts on CPUs run.
    limit_s: int
    needs_gpu: bool
    steps: Callable


def gpu_tests(context):
    """crates/gpipe/tests/gpu.rs. One test at a time: each looks at the whole GPU's memory."""
    yield Step(
        "gpu.rs", [str(context.kit / "gpu"), "--test-threads=1"], {"GPIPE_SKIP_LOG": "/dev/stderr"}
    )


# Long enough that attention's backward takes the keys in several blocks, whose sums could differ.
GPT_BITS = {"network": "gpt", "blocks": 4, "samples": 8, "length": 1024, "micro_batches": 4}
AMOEBA_BITS = {"network": "amoeba", "samples": 64, "micro_batches": 4}
TINY_BITS = {
    "gpt": {
        "vocabulary": 256,
        "length": 16,
        "features": 64,
        "heads": 1,
        "hidden": 256,
        "samples": 8,
    },
    "amoeba": {"cells": 3, "filters": 16, "size": 32, "samples": 8},
}
# What is asked of libtorch, by the name that the report uses.
SETTINGS = {
    "all settings": ({"deterministic": "true"}, DETERMINISTIC),
    "gpipe's own": ({"deterministic": "true"}, {}),
    "none": ({"deterministic": "false"}, {}),
}


def bits(context):
    """K = 1 to 4 against K = 1, with every setting for determinism; then with fewer, to see whether
    they matter."""
    for setting, (own, environment) in SETTINGS.items():
        stages = "1,2,3,4" if setting == "all settings" else "2,4"
        for dtype in DTYPES:
            for network in [GPT_BITS, AMOEBA_BITS]:
                sizes = network | (TINY_BITS[network["network"]] if context.tiny else {})
                of = {"network": network["network"], "dtype": dtype, "settings": setting}
                command = context.program(
                    "bits", device=context.device, dtype=dtype, stages=stages, **sizes, **own
                )
                yield Step(f"{of['network']} {dtype}, {setting}", command, environment, of)


@dataclasses.dataclass(frozen=True)
class Size:
    """A network of one size: gpipe's settings (the peers read sizes from the weights), and the jobs
    that it goes without."""

    name: str
    title: str
    settings: dict
    micro_batches: int
    without: tuple = ()


GPT = [
    Size("base", "30 million parameters, 32 x 128 tokens", {"samples": 32}, 8),
    Size(
        "large",
        "162 million parameters (GPT-2 small, untied), 16 x 1024 tokens",
        {
            "samples": 16,
            "vocabulary": 50304,
            "length": 1024,
            "features": 768,
            "heads": 12,
            "hidden": 3072,
            "blocks": 12,
        },
        4,
        without=("selective", "K=2"),
    ),
]
AMOEBA = [
    Size("base", "AmoebaNet-D(6, 128), 32 images of 64 x 64", {"samples": 32}, 8),
    Size(
        "large",
        "AmoebaNet-D(18, 208), 32 images of 224 x 224",
        {"samples": 32, "cells": 18, "filters": 208, "size": 224},
        4,
        without=("compiled", "selective", "K=2"),
    ),
]
TINY_GPT = [
    Size(
        "tiny",
        "a tiny one",
        {
            "samples": 8,
            "vocabulary": 256,
            "length": 16,
            "features": 128,
            "heads": 2,
            "hidden": 256,
            "blocks": 2,
        },
        2,
        without=("compiled",),
    )
]
TINY_AMOEBA = [
    Size(
        "tiny",
        "a tiny one",
        {"samples": 8, "cells": 3, "filters": 16, "size": 32},
        2,
        without=("compiled",),
    )
]


def jobs(size, dtype, device, images):
    """name -> job of one size in one dtype, most valuable first: gpipe, and PyTorch with the same
    optimizer, mini-batch and warm-up."""
    m = size.micro_batches
    ours = {"device": device, "dtype": dtype, "steps": STEPS, **size.settings}
    plain = {"stages": 1, "micro_batches": 1, "remat": "never", **ours}
    again = {"stages": 1, "micro_batches": m, "schedule": "gpipe", **ours}
    theirs = {"device": device, "dtype": dtype, "warm_up": WARM_UP, "micro_batches": 1}
    checkpoint = theirs | {"micro_batches": m, "checkpoint": True}
    all_ = {
        "gpipe K=1 M=1": gpipe(**plain),
        "PyTorch eager M=1": peer("plain", **theirs),
    }
    if images:
        all_["PyTorch eager M=1 channels-last"] = peer("plain", channels_last=True, **theirs)
        all_["gpipe K=1 M=1 aten"] = gpipe(kernels="aten", **plain)
    all_[f"gpipe K=1 M={m} always"] = gpipe(remat="always", **again)
    all_[f"PyTorch eager M={m} checkpoint"] = peer("plain", **checkpoint)
    if images:
        channels_last = peer("plain", channels_last=True, **checkpoint)
        all_[f"PyTorch eager M={m} checkpoint, channels-last"] = channels_last
    all_["PyTorch compiled M=1"] = peer("plain", compile=True, **theirs)
    all_[f"gpipe K=1 M={m} selective"] = gpipe(remat="selective", **again)
    all_[f"gpipe K=2 M={m} 1f1b"] = gpipe(
        **(ours | {"stages": 2, "micro_batches": m, "remat": "never"})
    )
    return {
        name: job for name, job in all_.items() if not any(part in name for part in size.without)
    }


def workload(context, name, sizes):
    """Interleaved rounds: the first of every size, then more of each as long as there is time."""
    for number in range(1 if context.tiny else ROUNDS):
        for size in sizes:
            folder = context.scratch / f"{name}-{size.name}"
            python = types.SimpleNamespace(program=context.python)
            runner = Runner(Workload(name, {}, STEPS, None, ""), folder, python, context.kit)
            of = {"workload": name, "size": size.name, "title": size.title, "round": number}
            if number == 0:
                folder.mkdir(parents=True, exist_ok=True)
                first = gpipe(stages=1, micro_batches=1, steps=0, folder=folder, **size.settings)
                yield Step(
                    f"{size.name}: weights for the peers",
                    runner.command(first),
                    NO_GPU,
                    always=True,
                )
            by_dtype = {
                dtype: jobs(size, dtype, context.device, name == "amoeba") for dtype in DTYPES
            }
            names = by_dtype[DTYPES[0]]
            runs = [(dtype, job, by_dtype[dtype][job]) for job in names for dtype in DTYPES]
            shift = number * 7 % len(runs)
            for dtype, job, found in runs[shift:] + runs[:shift]:
                yield Step(
                    f"{size.name} {dtype}, {job}, round {number + 1}",
                    runner.command(found),
                    NO_TF32,
                    {**of, "dtype": dtype, "job": job},
                )


def gpt(context):
    yield from workload(context, "gpt", TINY_GPT if context.tiny else GPT)


def amoeba(context):
    yield from workload(context, "amoeba", TINY_AMOEBA if context.tiny else AMOEBA)


# Variant -> (settings, filters to begin with: the paper's in table 1, by how much two tries differ
# at least).
LARGEST = {
    "plain": ({"micro_batches": 1, "schedule": "gpipe", "remat": "never"}, 208, 16),
    "pipeline": ({"micro_batches": 32, "schedule": "gpipe", "remat": "always"}, 416, 32),
}


def largest(context):
    """The largest AmoebaNet-D(18, D) whose two steps stay under the cap, without and with
    micro-batches and recomputation."""
    cap, sizes = CAP, {"cells": 18, "size": 224, "samples": 128}
    if context.tiny:
        cap, sizes = 80_000_000, {"cells": 3, "size": 32, "samples": 128}
    for dtype in DTYPES:
        for variant, (settings, guess, least) in LARGEST.items():
            if context.tiny:
                guess, least = 32, 16
            tries, count = search(guess, least), 0
            filters = next(tries)
            while filters and count < MOST_TRIES:
                count += 1
                of = {
                    "variant": variant,
                    "dtype": dtype,
                    "filters": filters,
                    "cap": cap,
                    "least": least,
                }
                command = context.program(
                    "memory",
                    network="amoeba",
                    filters=filters,
                    cap=cap,
                    stages=1,
                    device=context.device,
                    dtype=dtype,
                    **sizes,
                    **settings,
                )
                found = yield Step(f"{variant} {dtype}, D = {filters}", command, NO_TF32, of)
                filters = following(tries, found)


def following(tries, found):
    """The next size to try; None where the search is over, or where a step found nothing, which
    says no more than that."""
    if not found:
        return None
    try:
        return tries.send("refused" not in found[-1])
    except StopIteration:
        return None


def cpu(context):
    """K = 4 and 8 on the machine's cores: each step beside what the simulator predicted from a
    profile before it."""
    names, pairs = (["gpt-tiny"], 2) if context.tiny else (["gpt", "amoeba"], 3)
    for name in names:
        for stages in [4, 8]:
            command = context.program(
                "prediction",
                workload=name,
                stages=stages,
                micro_batches=8,
                schedules="1f1b",
                pairs=pairs,
            )
            yield Step(
                f"{name}, K = {stages}", command, NO_GPU, {"workload": name, "stages": stages}
            )


# In order of value. The first three fit a command of ten minutes, and so do the last three.
PARTS = [
    Part("tests", "the tests that need a GPU", 100, True, gpu_tests),
    Part("bits", "the same bits at K = 1 to 4", 160, True, bits),
    Part("gpt", "the transformer beside PyTorch", 320, True, gpt),
    Part("amoeba", "AmoebaNet-D beside PyTorch", 320, True, amoeba),
    Part("largest", "the largest AmoebaNet-D under 8 GB", 150, True, largest),
    Part("cpu", "4 and 8 stages on CPUs beside the simulator", 100, False, cpu),
]
