"""torchgpipe's `balance`: how many layers each partition gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layer import Layer, Structure
from ..pipeline import _timed

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
    def one(value):
        return value[:max(1, value.size(0) // chunks)] if value.dim() else value

    value = tuple(map(one, input)) if isinstance(input, tuple) else one(input)
    sizes = []
    for (_, made), layer in zip(_measure(module, value), module):
        held = sum(own.numel() * own.element_size() for own in layer.parameters())
        latent = sum(own.numel() * own.element_size() for own in made)
        sizes.append(latent + held * param_scale)
    return _cut(sizes, partitions)


def _measure(module: nn.Sequential, sample: Any):
    takes, values = Structure.of(sample)
    found, skips = [], {}
    with torch.random.fork_rng(devices=[]):
        for name, own in module._modules.items():
            layer = Layer(name, own, {}, torch.float32)
            layer.takes = takes
            spent, values, skips = _timed(layer, values, skips)
            takes = layer.gives
            found.append((spent, values))
    return found


def _cut(costs: list[float], partitions: int) -> list[int]:
    """The cut whose most expensive part is as cheap as possible."""
    count = len(costs)
    if partitions < 1 or partitions > count:
        raise ValueError(f"{partitions} partitions of {count} layers: give 1 to {count}")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for parts in range(1, partitions + 1):
        for end in range(parts, count - (partitions - parts) + 1):
            options = [(max(best[parts - 1, start][0], before[end] - before[start]), start)
                       for start in range(parts - 1, end) if (parts - 1, start) in best]
            best[parts, end] = min(options)
    cut, end = [], count
    for parts in range(partitions, 0, -1):
        start = best[parts, end][1]
        cut.append(end - start)
        end = start
    return cut[::-1]
