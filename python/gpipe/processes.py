"""A pipeline in several processes."""

from __future__ import annotations

import io
import os

import torch

from . import _gpipe
from .errors import SettingError


def started() -> bool:
    """Whether torchrun (or a launcher like it) started several processes.

    Raises SettingError where there are several and this one does not know which it is: each would
    train alone.
    """
    size = os.environ.get("WORLD_SIZE", "1").strip()
    if size == "1":
        return False
    if "RANK" not in os.environ:
        raise SettingError(
            f"the environment sets WORLD_SIZE={size}, but not RANK: set RANK, MASTER_ADDR and"
            " MASTER_PORT, too, as torchrun does, or pass processes=False"
        )
    return True


def gather(engine: _gpipe.Engine, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of all processes, in each of them. All processes call it."""
    stream = io.BytesIO()
    torch.save(own, stream)
    found: dict[str, torch.Tensor] = {}
    for part in engine.gather(stream.getvalue()):
        found.update(torch.load(io.BytesIO(bytes(part)), weights_only=True))
    return found
