"""Times of layers, by which a model is cut into stages."""

from __future__ import annotations

import time

import torch

from . import skip
from .layer import Layer
from .modules import kept_buffers
from .structure import Structure

ROUNDS = 3


def measure(layers: list[Layer], inputs: list[torch.Tensor], threads: int) -> None:
    """Measures `cost`, a forward and backward of each layer on one micro-batch. If a layer does not
    run on these values alone, none has a cost, and the engine cuts by the sizes of inputs and
    outputs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = [spent for spent, _ in timed(layers, inputs)]
    except Exception:  # of the user's module; a step shows it if it is real
        return
    finally:
        torch.set_num_threads(before)
    for layer, spent in zip(layers, times):
        layer.cost = spent


def timed(
    layers: list[Layer], inputs: list[torch.Tensor]
) -> list[tuple[float, list[torch.Tensor]]]:
    """Nanoseconds of a forward and backward of each layer, and its outputs."""
    values, skips, found = inputs, {}, []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for layer in layers:
            with kept_buffers(layer.module):
                spent, values, skips = _timed(layer, values, skips)
            found.append((spent, values))
    return found


def _timed(
    layer: Layer, values: list[torch.Tensor], skips: dict[str, torch.Tensor]
) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The layer's time, its outputs, and the skips that are open after it."""
    popped = {name: skips[name] for name in layer.pops}
    best = float("inf")
    for _ in range(ROUNDS):
        inputs = [_leaf(own) for own in values]
        _wait(inputs)
        start = time.perf_counter()
        with skip.Recorder({name: _leaf(own) for name, own in popped.items()}) as recorder:
            output = layer.module(layer.takes.fill(inputs))
        _, tensors = Structure.of(output)
        outputs = [own for own in tensors if own.requires_grad]
        leaves = [own for own in (*layer.module.parameters(), *inputs) if own.requires_grad]
        if outputs and leaves:
            ones = [torch.ones_like(own) for own in outputs]
            torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
        _wait(tensors)
        best = min(best, time.perf_counter() - start)
    kept = {name: own for name, own in skips.items() if name not in popped}
    kept.update({name: own.detach() for name, own in recorder.stashed if own is not None})
    return best * 1e9, [own.detach() for own in tensors], kept


def _wait(tensors: list[torch.Tensor]) -> None:
    """Waits for kernels on GPUs, which run beside Python."""
    for device in {own.device for own in tensors if own.is_cuda}:
        torch.cuda.synchronize(device)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
