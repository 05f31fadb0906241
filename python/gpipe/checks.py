"""Checks of a pipeline's settings in the user's words, before the engine makes them in its own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from .errors import SettingError

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
SEED_MAX = 2 ** 64 - 1
TIMEOUT_MAX = 366 * 24 * 3600  # seconds, as the engine's


def is_module(model: Any) -> None:
    """Refuses a model that is none."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"the model is a {type(model).__name__}: give an nn.Sequential, or "
                           f"gpipe.sequence(model, parts)")
    if type(model).__name__ == "OptimizedModule":
        raise SettingError("the model is compiled (torch.compile), which hides its layers: give it "
                           "as it was before torch.compile")


def positive(name: str, value: Any) -> int:
    """`value`, if it is a whole number of at least 1."""
    if not _is_whole(value) or value < 1:
        _wrong(name, value, "give a whole number of at least 1")
    return value


def devices_of(stages: int | None, devices: Any, is_planned: bool) -> list[str]:
    """The devices: those that are named, or as many CPUs as there are `stages`, which a plan may
    have set."""
    if devices is None:
        return ["cpu"] * positive("stages", 1 if stages is None else stages)
    if isinstance(devices, (str, torch.device)):
        _wrong("devices", devices, "give a list with a device for each stage")
    listed = [str(own) for own in devices]
    if stages not in (None, len(listed)):
        raise SettingError(f"the plan is for {stages} devices, and devices= names {len(listed)}"
                           if is_planned else
                           f"stages={stages} and {len(listed)} devices: give one of them")
    for own in map(torch.device, [own for own in listed if own.startswith("cuda")]):
        if (own.index or 0) >= torch.cuda.device_count():
            _wrong("devices", listed, f"PyTorch sees {torch.cuda.device_count()} GPUs here")
    return listed


def dtype_of(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of the arithmetic: `wanted`, or that of the model's parameters."""
    if wanted is None:
        kinds = {own.dtype for own in model.parameters() if own.is_floating_point()}
        if len(kinds) > 1:
            listed = ", ".join(sorted(map(str, kinds)))
            raise SettingError(f"the model's parameters are {listed}: give dtype=, or convert the "
                               f"model with .to(dtype)")
        wanted = next(iter(kinds), torch.float32)
    if wanted not in DTYPES:
        _wrong("dtype", wanted, "use torch.float32, float64, bfloat16 or float16")
    return wanted


def no_autocast() -> None:
    """Refuses a call inside `torch.autocast`, which is of the calling thread."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise SettingError("torch.autocast does not reach the stages' threads: give the pipeline "
                           "dtype=torch.bfloat16 or float16, and call it outside of autocast")


def no_gradients_of(tensors: list[torch.Tensor]) -> None:
    """Refuses a mini-batch whose own gradients are wanted, where none are given."""
    if torch.is_grad_enabled() and any(own.requires_grad for own in tensors):
        raise SettingError(
            "an input or target requires gradients, which train_step and accumulate do not give: "
            "compute the loss yourself, from pipe(x), or give the tensor as x.detach()")


def types(*, schedule: Any, links: Any, remat: Any, seed: Any, clip_norm: Any, average: Any,
          timeout: Any, balance: Any, memory_cap: Any) -> None:
    """Refuses settings of another type than the documented one."""
    if not isinstance(schedule, str):
        _wrong("schedule", schedule, "give a string, such as '1f1b'")
    if links not in ("gloo", "nccl"):
        _wrong("links", links, "give 'gloo' or 'nccl'")
    if remat is not None and not isinstance(remat, str):
        _wrong("remat", remat, "give a string, such as 'always'")
    if not _is_whole(seed) or seed > SEED_MAX:
        _wrong("seed", seed, f"give a whole number from 0 to {SEED_MAX}")
    for name, value in (("clip_norm", clip_norm), ("average", average)):
        if value is not None and not (_is_number(value) and value > 0):
            _wrong(name, value, "give a number above 0")
    if not _is_number(timeout) or not 0 < timeout <= TIMEOUT_MAX:
        _wrong("timeout", timeout, "give seconds above 0, at most 366 days")
    if balance is not None and not _are_whole(balance):
        _wrong("balance", balance, "give the number of layers of each stage, such as [3, 3]; leave "
                                   "it out to cut by measured times")
    if memory_cap is not None and not (_is_whole(memory_cap) or _are_whole(memory_cap)):
        _wrong("memory_cap", memory_cap, "give bytes as a whole number, such as 2 << 30, or one "
                                         "for each device")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_whole(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_whole, value))


def _wrong(name: str, value: Any, remedy: str) -> NoReturn:
    raise SettingError(f"{name}={value!r}: {remedy}")
