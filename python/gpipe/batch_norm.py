"""Batch norms in a pipeline: each micro-batch is normalised by its own statistics, and the running
statistics are updated once for each mini-batch, from all of it (GPipe paper, section 2.2)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import _gpipe
from .errors import SettingError


def is_deferred(module: nn.Module) -> bool:
    """Whether the engine keeps the module's running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def check(module: nn.Module, name: str) -> None:
    """Refuses what the engine cannot defer."""
    if isinstance(module, nn.SyncBatchNorm):
        raise SettingError(
            f"layer '{name}': SyncBatchNorm sums over processes of its own; use BatchNorm: the "
            f"pipeline's running statistics are of the whole mini-batch")
    if is_deferred(module) and type(module).forward is not _BatchNorm.forward:
        raise SettingError(
            f"layer '{name}': {type(module).__name__} is a batch norm with a forward of its own, "
            f"which would be left out: use PyTorch's BatchNorm, and put the rest in a module of "
            f"its own")


def defer(module: nn.Module, first: int) -> None:
    """Lets the copy of a batch norm that a pipeline runs compute through the engine. `first` is the
    number of its first parameter in the layer."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if module.training and _gpipe.in_layer():
            return _gpipe.batch_norm(x, first, module.num_features, module.eps, module.momentum)
        # In evaluation, or where shapes are inferred or the layer is timed: nothing is counted.
        training = module.training and x.numel() > x.size(1)
        mean, variance = module.running_mean, module.running_var
        if training:
            return F.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
        # Statistics keep their dtype where layers compute in a smaller one. PyTorch wants one.
        wide, weight, bias = (None if own is None else own.to(mean)
                              for own in (x, module.weight, module.bias))
        return F.batch_norm(wide, mean, variance, weight, bias, False, 0.0, module.eps).to(x.dtype)

    module.forward = forward
