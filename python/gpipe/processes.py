"""Values of all processes of a pipeline."""

from __future__ import annotations

import io

import torch


def gather(engine, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of all processes, in each of them. All processes call it."""
    stream = io.BytesIO()
    torch.save(own, stream)
    found: dict[str, torch.Tensor] = {}
    for part in engine.gather(stream.getvalue()):
        found.update(torch.load(io.BytesIO(bytes(part)), weights_only=True))
    return found
