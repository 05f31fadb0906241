"""Compares a model's training between numbers of stages, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from . import _gpipe
from .errors import VerificationError
from .loss import Loss
from .pipeline import Pipeline
from .sequence import layers_of


@dataclass(frozen=True)
class Verified:
    """What was compared, and found equal."""

    runs: list[str]
    steps: int
    compared: int
    """Number of losses, norms, gradients, parameters and buffers of each run."""

    def __str__(self) -> str:
        return (f"{len(self.runs)} runs of {self.steps} steps are equal in {self.compared} values: "
                + "; ".join(self.runs))


def verify(
    model: nn.Module,
    example: Any,
    stages: Sequence[int] = (1, 2, 4),
    *,
    target: Any = None,
    loss: Any = None,
    schedules: Sequence[str] = ("1f1b",),
    remats: Sequence[str] = ("unless-adjacent",),
    micro_batches: int = 4,
    steps: int = 2,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Verified:
    """Trains copies of a model with every number of stages, schedule and re-materialization policy,
    and compares losses, gradients, parameters and buffers with those of one stage, bit for bit.

    It finds modules whose results depend on something that a pipeline cannot key or count: Python
    state that a forward changes, numbers of NumPy's generator, the clock.

    Args:
        model: as for `Pipeline`. It stays as it is.
        example: a mini-batch's inputs, whose values are trained on.
        stages: numbers of stages; those above the number of layers are left out.
        target: what the loss takes; by default a fixed random tensor like the output.
        loss: by default the mean square of the difference.
        schedules, remats: those to compare, each with every number of stages.
        micro_batches: number of micro-batches of every run.
        steps: number of updates (SGD with a rate of 0.01).
        seed: of random operators.
        dtype: of the arithmetic.

    Raises:
        VerificationError: the first value that differs, with both runs.
    """
    most = len(layers_of(model))
    first, reference, runs = None, {}, []
    for number in dict.fromkeys([1, *stages]):
        for schedule in schedules:
            if number * _chunks(schedule) > most:
                continue
            for remat in remats:
                name = f"K={number} {schedule} {remat}"
                found = _train(model, example, target, loss, number, schedule, remat,
                               micro_batches, steps, seed, dtype)
                runs.append(name)
                if first is None:
                    first, reference = name, found
                else:
                    _compare(reference, found, first, name)
    return Verified(runs, steps, len(reference))


def _train(model: nn.Module, example: Any, target: Any, loss: Any, stages: int, schedule: str,
           remat: str, micro_batches: int, steps: int, seed: int,
           dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    if not model.training:
        model.train()
    trained = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01) if trained else None
    if loss is None:
        loss = Loss(lambda output, target: _square(output, target), _elements)
    found: dict[str, torch.Tensor] = {}
    balance = _gpipe.cut([1] * len(layers_of(model)), stages * _chunks(schedule))
    with Pipeline(model, example, stages=stages, schedule=schedule, remat=remat,
                  micro_batches=micro_batches, loss=loss, optimizer=optimizer, seed=seed,
                  dtype=dtype, keep_gradients=True, balance=balance) as pipe:
        if target is None:
            target = _target(pipe.predict(example))
        for step in range(steps):
            if optimizer is None:
                found[f"step {step}: the loss"] = torch.tensor(pipe.evaluate(example, target).loss)
                continue
            report = pipe.train_step(example, target)
            found[f"step {step}: the loss"] = torch.tensor(report.loss, dtype=torch.float64)
            found[f"step {step}: the norm"] = torch.tensor(report.grad_norm, dtype=torch.float64)
            for name, value in pipe.gradients().items():
                found[f"step {step}: the gradient of {name}"] = value
        found["the evaluation"] = torch.tensor(pipe.evaluate(example, target).loss)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            found[f"after {steps} steps: {name}"] = value.clone()
    return found


def _chunks(schedule: str) -> int:
    """Stages on each device."""
    name, _, number = schedule.partition(":")
    return int(number) if name == "interleaved" else 1


def _tensors(value: Any) -> list[torch.Tensor]:
    return [own for own in pytree.tree_leaves(value)
            if isinstance(own, torch.Tensor) and own.is_floating_point()]


def _square(output: Any, target: Any) -> torch.Tensor:
    pairs = zip(_tensors(output), _tensors(target))
    return sum(((a.float() - b.float()) ** 2).sum() for a, b in pairs)


def _elements(target: Any) -> int:
    return sum(own.numel() for own in _tensors(target))


def _target(output: Any) -> Any:
    generator = torch.Generator().manual_seed(1)

    def like(own):
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            return torch.randn(own.shape, generator=generator).to(own.dtype)
        return own

    return pytree.tree_map(like, output)


def _compare(reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor], first: str,
             name: str) -> None:
    if reference.keys() != found.keys():
        raise VerificationError(f"{first} and {name} give different values")
    for key, value in reference.items():
        other = found[key]
        same = value.shape == other.shape and torch.equal(
            value.contiguous().view(torch.uint8) if value.dim() else value,
            other.contiguous().view(torch.uint8) if other.dim() else other)
        if not same and not (value.isnan().all() and other.isnan().all()):
            raise VerificationError(
                f"{key} differs between {first} and {name}; the largest difference is "
                f"{(value.double() - other.double()).abs().max().item():.3g}. Look for state in "
                f"Python that a forward changes, and for random numbers that are not PyTorch's")
