"""Compares a model's training between numbers of stages, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from . import _gpipe, checks
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
    plain: list[str]
    """What was also compared with the module itself, within rounding. What is random is not."""

    def __str__(self) -> str:
        plain = f"; the module itself gives the same {' and '.join(self.plain)}"
        return (f"{len(self.runs)} runs of {self.steps} steps are equal in {self.compared} values: "
                + "; ".join(self.runs) + (plain if self.plain else ""))


def verify(
    model: nn.Module,
    example: Any,
    stages: Sequence[int] | int = (1, 2, 4),
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
    Then compares outputs and gradients with those of the module itself, within rounding. Warns if
    outputs depend on the number of micro-batches.

    It finds modules whose results depend on something that a pipeline cannot key or count: Python
    state that a forward changes, numbers of NumPy's generator, the clock. And it finds modules that
    a pipeline runs in another way than PyTorch does, such as one whose first axis is not that of
    the samples.

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
    checks.is_module(model)
    most = len(layers_of(model))
    stages = [stages] if isinstance(stages, int) else stages
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
    if not runs or len(runs) == 1 and any(number > 1 for number in stages):
        warnings.warn(f"nothing was compared: a model of {most} layers has too few for "
                      f"stages={list(stages)} with schedules={list(schedules)}", stacklevel=2)
    return Verified(runs, steps, len(reference),
                    _compare_with_module(model, example, micro_batches, seed, dtype))


def _train(model: nn.Module, example: Any, target: Any, loss: Any, stages: int, schedule: str,
           remat: str, micro_batches: int, steps: int, seed: int,
           dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    example = pytree.tree_map_only(torch.Tensor, torch.detach, example)
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
    if number.isdecimal():
        return int(number)
    return 2 if name in ("zb-v", "v-half", "v-min", "breadth-first") else 1


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


def _compare_with_module(model: nn.Module, example: Any, micro_batches: int, seed: int,
                         dtype: torch.dtype | None) -> list[str]:
    """Compares with the module's own outputs and gradients. Returns which could be compared."""
    kinds = {own.dtype for own in model.parameters()} | ({dtype} if dtype else set())
    if kinds & {torch.bfloat16, torch.float16} or len(kinds) > 1:
        return []  # rounding would hide what is looked for
    found = []
    for what, training in (("outputs", False), ("gradients", True)):
        twice = [_of_module(model, example, training, number) for number in range(2)]
        if any(not torch.equal(a, b) for a, b in zip(*twice)):
            continue  # it is random, or has state
        own = _of_pipeline(model, example, training, 1, seed, dtype)
        difference = _difference(own, twice[0])
        if difference is not None:
            raise VerificationError(f"{what} of a pipeline of one micro-batch differ from the "
                                    f"module's own: {difference}. Look for code of the model that "
                                    f"a pipeline does not run")
        if not training:
            own = _of_pipeline(model, example, training, micro_batches, seed, dtype)
            difference = _difference(own, twice[0])
            if difference is not None:
                warnings.warn(f"{what} depend on the number of micro-batches: {difference}. Is the "
                              f"first axis of each value the samples, and does a layer look at "
                              f"several samples at once?", stacklevel=3)
        found.append(what)
    return found


def _of_module(model: nn.Module, example: Any, training: bool, seed: int) -> list[torch.Tensor]:
    """Outputs in evaluation mode, or gradients in training mode."""
    model = copy.deepcopy(model).train(training)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        torch.manual_seed(seed)
        return _values(model, model(example))


def _of_pipeline(model: nn.Module, example: Any, training: bool, micro_batches: int, seed: int,
                 dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The same, of a pipeline of one stage."""
    model = copy.deepcopy(model).train(training)
    with Pipeline(model, example, micro_batches=micro_batches, seed=seed, dtype=dtype,
                  processes=False) as pipe, torch.set_grad_enabled(training):
        return _values(model, pipe(example))


def _values(model: nn.Module, output: Any) -> list[torch.Tensor]:
    tensors = [own for own in _tensors(output) if own.requires_grad]
    if not tensors:
        return [own.detach() for own in _tensors(output)]
    sum((own ** 2).sum() for own in tensors).backward()
    return [own.grad if own.grad is not None else torch.zeros_like(own)
            for own in model.parameters()]


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> str | None:
    """What is looked for is far above rounding, which is some 1e-6 of the largest value in
    float32."""
    for a, b in zip(ours, theirs):
        if a.shape != b.shape:
            return f"{list(a.shape)} instead of {list(b.shape)}"
    pairs = [(a, b) for a, b in zip(ours, theirs) if b.numel()]
    largest = max((b.abs().max().item() for _, b in pairs), default=0.0)
    most = max(((a - b).abs().max().item() for a, b in pairs), default=0.0)
    return f"by {most:.3g}, where the largest is {largest:.3g}" if most > 1e-3 * largest else None


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
