"""torchgpipe's `balance`: how many layers each partition gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import _gpipe, checks, timing
from ..network import Network

__all__ = ["balance_by_size", "balance_by_time"]


def balance_by_time(partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0,
                    device: torch.device | None = None) -> list[int]:
    """Cuts by the measured time of a forward and backward of each layer on `sample`.

    `Pipeline` does that by itself. `timeout` and `device` are torchgpipe's: layers are timed where
    they are, at least three times.
    """
    return _cut([spent for spent, _ in _measure(module, sample)], partitions)


def balance_by_size(partitions: int, module: nn.Sequential, input: Any, *, chunks: int = 1,
                    param_scale: float = 2.0, device: torch.device | None = None) -> list[int]:
    """Cuts by what each layer holds: its output for one of `chunks` micro-batches, and its
    parameters times `param_scale` (2 for SGD: weight and gradient; 4 for Adam)."""
    def one(value: torch.Tensor) -> torch.Tensor:
        return value[:max(1, value.size(0) // chunks)] if value.dim() else value

    value = tuple(map(one, input)) if isinstance(input, tuple) else one(input)
    sizes = []
    for (_, made), layer in zip(_measure(module, value), module):
        held = sum(own.numel() * own.element_size() for own in layer.parameters())
        latent = sum(own.numel() * own.element_size() for own in made)
        sizes.append(latent + held * param_scale)
    return _cut(sizes, partitions)


def _measure(module: nn.Sequential, sample: Any) -> list[tuple[float, list[torch.Tensor]]]:
    network = Network(module, sample, checks.dtype_of(module, None), can_share=True)
    return timing.timed(network.layers, network.example)


def _cut(costs: Iterable[float], partitions: int) -> list[int]:
    """The cut whose most expensive part is as cheap as possible."""
    return _gpipe.cut([round(own) for own in costs], partitions)
