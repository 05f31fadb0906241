"""Losses. A loss is a sum over samples (or tokens) and a count, kept apart, so that micro-batches
of unequal size give the exact loss of the mini-batch: `sum` over all of them, divided by `count`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .errors import SettingError
from .modules import foreign_leaf
from .structure import Spec, Structure, usable

class Loss:
    """A loss of your own.

    `sum(output, target)` gives the sum over the samples of a micro-batch: a scalar. `count(target)`
    gives the number that the sum over the whole mini-batch is divided by: it must not depend on how
    the mini-batch is cut. `output` and `target` are nested as your model and your loader nest them.
    Outputs in bfloat16 or float16 arrive in float32.
    """

    def __init__(self, sum: Callable[[Any, Any], torch.Tensor], count: Callable[[Any], float]):
        self.sum, self.count = sum, count


def _elements(loss: nn.Module, target: torch.Tensor) -> float:
    return target.numel()


def _samples(loss: nn.Module, target: torch.Tensor) -> float:
    return target.size(0)


def _kl(loss: nn.Module, target: torch.Tensor) -> float:
    return target.size(0) if loss.reduction == "batchmean" else target.numel()


def _classes(loss: nn.Module, target: torch.Tensor) -> float:
    """The weight of the targets that count: what PyTorch divides by."""
    if target.is_floating_point():  # probabilities of classes
        return target.numel() / target.size(1) if target.dim() > 1 else 1
    counted = target[target != loss.ignore_index]
    return counted.numel() if loss.weight is None else float(loss.weight.cpu()[counted].sum())


# What PyTorch's losses with reduction="mean" divide by.
COUNTS = {
    nn.CrossEntropyLoss: _classes,
    nn.NLLLoss: _classes,
    nn.MSELoss: _elements,
    nn.L1Loss: _elements,
    nn.SmoothL1Loss: _elements,
    nn.HuberLoss: _elements,
    nn.BCELoss: _elements,
    nn.BCEWithLogitsLoss: _elements,
    nn.PoissonNLLLoss: _elements,
    nn.SoftMarginLoss: _elements,
    nn.HingeEmbeddingLoss: _elements,
    nn.MultiMarginLoss: _samples,
    nn.MultiLabelMarginLoss: _samples,
    nn.KLDivLoss: _kl,
}


# Losses whose targets are floating point.
FLOATING = nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss


class LastAxis(nn.Module):
    """Cross entropy whose classes are the last axis: output [..., classes], target [...]."""

    def __init__(self, loss: nn.CrossEntropyLoss | None = None):
        super().__init__()
        self.loss = loss or nn.CrossEntropyLoss()


class OnStages:
    """A loss as the engine calls it, on tensors without nesting.

    It knows nothing of the pipeline, which would otherwise never be freed: the engine holds it.
    """

    def __init__(self, loss: Any, gives: Structure, outputs: list[Spec], samples: int,
                 micro_batch: int):
        self.gives, self.outputs, self.samples = gives, outputs, samples
        self.loss = mapped(loss, self.zeros, micro_batch)
        self.target: Structure | None = None
        self.is_unchecked = True  # until a call with gradients

    def flat(self, target: Any) -> list[torch.Tensor]:
        """The tensors of a mini-batch's target. The next calls nest them alike."""
        self.target, tensors = Structure.of(target)
        if not tensors:
            raise SettingError(f"the target {target!r} holds no tensor")
        return usable(tensors)

    def sum(self, outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
        """The sum of a micro-batch."""
        found = self.loss.sum(self.gives.fill(outputs), self.target.fill(targets))
        if self.is_unchecked and torch.is_grad_enabled():
            foreign = foreign_leaf([found], (*outputs, *targets))
            if foreign is not None:
                raise SettingError(
                    f"the loss uses a parameter of shape {list(foreign.shape)}, which would get "
                    f"no gradient: give it to the last layer, or compute the loss from pipe(x)")
            self.is_unchecked = False
        return found

    def count(self, targets: list[torch.Tensor]) -> float:
        """The count of a mini-batch."""
        return float(self.loss.count(self.target.fill(targets)))

    def zeros(self, samples: int) -> Any:
        """Outputs of zeros, for this number of samples."""
        made = []
        for shape, dtype in self.outputs:
            per_sample = shape and shape[0] == self.samples
            made.append(torch.zeros([samples, *shape[1:]] if per_sample else shape,
                                    dtype=getattr(torch, dtype)))
        return self.gives.fill(made)


def mapped(loss: Any, zeros: Callable[[int], Any], micro_batch: int) -> Loss:
    """The loss as a sum and a count. `zeros` makes outputs for a number of samples; `micro_batch`
    is the most samples that a function returning both is called with to count."""
    if isinstance(loss, type):
        raise SettingError(f"loss={loss.__name__} is a class: give a loss, {loss.__name__}()")
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, LastAxis):
        return _cross_entropy(loss.loss, last_axis=True)
    if type(loss) is nn.CrossEntropyLoss:
        return _cross_entropy(loss, last_axis=False)
    if type(loss) in COUNTS:
        return _reduced(loss, COUNTS[type(loss)])
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        raise SettingError(
            f"loss {type(loss).__name__}: gpipe does not know what it divides by. Give "
            f"gpipe.Loss(sum, count), where sum(output, target) is its sum (reduction='sum') and "
            f"count(target) what the mean divides by")
    if callable(loss):
        return _returning_both(loss, zeros, micro_batch)
    raise SettingError(f"loss {loss!r}: give a loss of torch.nn, a gpipe.Loss, or a function of "
                       f"(output, target) that returns (sum, count)")


def _summing(loss: nn.Module) -> nn.Module:
    """The same loss with reduction="sum"."""
    if loss.reduction == "none":
        raise SettingError(f"loss {type(loss).__name__}(reduction='none') gives no number: use "
                           f"reduction='mean' or 'sum'")
    own = copy.deepcopy(loss)
    own.reduction = "sum"
    return own


def _reduced(loss: nn.Module, count: Callable[[nn.Module, torch.Tensor], float]) -> Loss:
    own = _summing(loss)

    def total(output, target):
        _check_tensors(loss, output=output)
        if count is _elements and output.shape != target.shape:
            raise SettingError(
                f"loss {type(loss).__name__}: the output is {list(output.shape)}, the target "
                f"{list(target.shape)}, which PyTorch would broadcast: give both one shape")
        # Outputs of fewer bits arrive in float32. PyTorch's losses want one dtype.
        return own(output, target.to(output.dtype) if target.is_floating_point() else target)

    def counted(target):
        _check_tensors(loss, target=target)
        return 1.0 if loss.reduction == "sum" else count(loss, target)

    return Loss(total, counted)


def _cross_entropy(loss: nn.CrossEntropyLoss, *, last_axis: bool) -> Loss:
    reduced = _reduced(loss, _classes)

    def total(output, target):
        _check_tensors(loss, output=output)
        if last_axis or _is_last_axis(output, target):
            output, target = output.flatten(0, -2), target.flatten()
        return reduced.sum(output, target)

    return Loss(total, reduced.count)


def _check_tensors(loss: nn.Module, **values: Any) -> None:
    """Refuses what PyTorch would refuse in words of its own, perhaps not before the backward."""
    name = type(loss).__name__
    for what, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise SettingError(f"loss {name}: the {what} is a {type(value).__name__}, it takes a "
                               f"tensor: give a gpipe.Loss(sum, count) that picks one")
        if isinstance(loss, FLOATING) and not value.is_floating_point():
            raise SettingError(f"loss {name}: the {what} is {value.dtype}, it takes floating "
                               f"point: give {what}.float()")


def _is_last_axis(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the classes are the last axis of the output, as transformers give them. PyTorch's
    own axis is the second one."""
    if output.dim() < 3 or target.dim() != output.dim() - 1 or target.is_floating_point():
        return False
    second = output.shape[:1] + output.shape[2:] == target.shape
    last = output.shape[:-1] == target.shape
    if second and last:
        raise SettingError(
            f"output {list(output.shape)} and target {list(target.shape)}: classes may be the "
            f"second axis or the last one. Give loss=gpipe.LastAxis(nn.CrossEntropyLoss()) for the "
            f"last, or transpose the output")
    return last


def _returning_both(loss: Callable, zeros: Callable[[int], Any], micro_batch: int) -> Loss:
    def both(output, target):
        found = loss(output, target)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise SettingError(
                f"the loss returned {type(found).__name__}: return (sum, count), the sum over the "
                f"samples and the number that it is divided by, or give a gpipe.Loss(sum, count)")
        return found

    def counted(target):
        # Before the step there is no output yet. The count may not depend on it, so zeros will do.
        _, tensors = Structure.of(target)
        samples = tensors[0].size(0)
        total = 0.0
        for start in range(0, samples, micro_batch):
            count = min(micro_batch, samples - start)
            part = pytree.tree_map_only(torch.Tensor, lambda own: own.narrow(0, start, count),
                                        target)
            with torch.no_grad():
                total += float(both(zeros(count), part)[1])
        return total

    return Loss(lambda output, target: both(output, target)[0], counted)
