"""Updates of a module's tensors that PyTorch does not count.

A pipeline sees by a tensor's version that its values have changed. Fused optimizers raise no
version, nor do those that write through `.data`, nor the stages, which write into the memory of the
module's own tensors. What is here raises it for them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Pipelines that are not closed.
opened: weakref.WeakSet = weakref.WeakSet()


def count(tensors: Iterable[torch.Tensor]) -> None:
    """Counts a change of each tensor: pipelines that hold copies of it take the new values, and a
    backward that needs the old ones is refused."""
    torch.autograd.graph.increment_version(list(tensors))


def uncounted(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager:
    """Counts no changes inside of the block, which leaves all values as they are."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called after a step of any optimizer."""
    if not opened or torch.compiler.is_compiling():
        return
    ours = {id(own.tensor) for pipe in list(opened) for own in pipe._network.tensors}
    count(own for group in optimizer.param_groups for own in group["params"]
          if id(own) in ours and own.grad is not None)


register_optimizer_step_post_hook(_stepped)
