"""A pipeline in several processes."""

from __future__ import annotations

import io
import os

import torch

from . import _gpipe


def started() -> bool:
    """Whether torchrun (or a launcher like it) started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def gather(engine: _gpipe.Engine, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of all processes, in each of them. All processes call it."""
    stream = io.BytesIO()
    torch.save(own, stream)
    found: dict[str, torch.Tensor] = {}
    for part in engine.gather(stream.getvalue()):
        found.update(torch.load(io.BytesIO(bytes(part)), weights_only=True))
    return found
