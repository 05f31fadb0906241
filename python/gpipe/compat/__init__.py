"""torchgpipe's interface, so that its users change one import:

    from gpipe.compat import GPipe      # was: from torchgpipe import GPipe

`gpipe.compat.skip` and `gpipe.compat.balance` stand for torchgpipe's modules of those names.
Results are the same up to rounding; dropout draws other numbers. What differs is in the guide "From
torchgpipe".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SettingError
from ..pipeline import Pipeline
from . import balance, skip

__all__ = ["GPipe", "balance", "is_checkpointing", "is_recomputing", "skip"]

# Everything but one micro-batch is recomputed, as torchgpipe recomputes all but the last.
_REMATS = {"always": "always", "except_last": "keep:1", "never": "never"}
_CUT = "gpipe.compat.balance.balance_by_time (torchgpipe.balance's, until now) computes one"
_MOVING = TypeError("denied to move parameters and buffers, because GPipe should manage device "
                    "placement")


class GPipe(nn.Module):
    """An `nn.Sequential` as a pipeline, with the interface of `torchgpipe.GPipe`.

    Args:
        module: the layers.
        balance: number of layers of each partition.
        devices: one for each partition; further ones are left out. By default all GPUs, or the CPU
            if there is none.
        chunks: number of micro-batches.
        checkpoint: "always", "except_last" or "never".
        deferred_batch_norm: whether running statistics are updated once for each mini-batch.

    The first call builds the stages, from the shapes of its input.

    Raises:
        TypeError: the module is no `nn.Sequential`.
        ValueError: a setting does not fit.
        IndexError: there are fewer devices than partitions.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str

    def __init__(self, module: nn.Sequential, balance: Iterable[int] | None = None, *,
                 devices: Iterable[Any] | None = None, chunks: int = 1,
                 checkpoint: str = "except_last", deferred_batch_norm: bool = False):
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError("balance is required: give the number of layers of each partition; "
                             + _CUT)
        if self.chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if self.checkpoint not in _REMATS:
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        if not isinstance(module, nn.Sequential):
            raise TypeError("module must be nn.Sequential to be partitioned")
        self.balance = [int(own) for own in balance]
        if len(module) != sum(self.balance):
            raise ValueError(
                f"module and sum of balance have different length (module: {len(module)}, sum of "
                f"balance: {sum(self.balance)}); {_CUT}")
        if any(own <= 0 for own in self.balance):
            raise ValueError(f"all balance numbers must be positive integer (balance: {balance})")
        if devices is None:
            count = torch.cuda.device_count()
            devices = range(count) if count else ["cpu"] * len(self.balance)
        self.devices = [torch.device(own) for own in devices]
        if len(self.balance) > len(self.devices):
            raise IndexError(f"too few devices to hold given partitions (devices: "
                             f"{len(self.devices)}, partitions: {len(self.balance)})")
        del self.devices[len(self.balance):]
        self.deferred_batch_norm = bool(deferred_batch_norm)
        self.partitions = nn.ModuleList(self._partitions(module))
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_pipe", None)
        object.__setattr__(self, "_built_for", None)

    def _partitions(self, module: nn.Sequential) -> Iterator[nn.Sequential]:
        named, start = list(module._modules.items()), 0
        for count in self.balance:
            yield nn.Sequential(OrderedDict(named[start:start + count]))
            start += count

    def __len__(self) -> int:
        return sum(map(len, self.partitions))

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition

    @property
    def module(self) -> nn.Sequential:
        """The module that was given, with its own names: `gpipe.module.state_dict()`."""
        return self._module

    def forward(self, input: Any) -> Any:
        """The module's output for a tensor, or a tuple of tensors, as one mini-batch."""
        _check(input, "input")
        if not self.balance:
            return input
        # Children are shared with the module; only the container's own mode is not.
        self._module.training = self.training
        return self._pipeline(input)(input)

    def _pipeline(self, input: Any) -> Pipeline:
        tensors = input if isinstance(input, tuple) else (input,)
        key = (isinstance(input, tuple), len(tensors), tuple(own.dtype for own in tensors),
               tuple((own.data_ptr(), own.dtype) for own in self._module.parameters()))
        if self._pipe is None or self._built_for != key:
            if self._pipe is not None:
                self._pipe.close()
            detached = tuple(own.detach() for own in tensors)
            example = detached if isinstance(input, tuple) else detached[0]
            made = Pipeline(self._module, example, devices=self.devices, micro_batches=self.chunks,
                            schedule="gpipe", remat=_REMATS[self.checkpoint], balance=self.balance,
                            open_forwards=1024, _plain_outputs=True,
                            _norms_follow_micro_batches=not self.deferred_batch_norm)
            object.__setattr__(self, "_pipe", made)
            object.__setattr__(self, "_built_for", key)
        return self._pipe

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled, builds stages of its own."""
        return {**self.__dict__, "_pipe": None, "_built_for": None}

    def state_dict(self, *args, **settings):
        """The state, with torchgpipe's names (`partitions.0.0.weight`)."""
        # A module's own hook is not called for its partitions.
        if self._pipe is not None:
            self._pipe._catch_up()
        return super().state_dict(*args, **settings)

    def load_state_dict(self, state_dict, *args, **settings):
        """Loads a state dict with torchgpipe's names (`partitions.0.0.weight`), or with the
        module's own (`0.weight`)."""
        if state_dict and not any(name.startswith("partitions.") for name in state_dict):
            return self._module.load_state_dict(state_dict, *args, **settings)
        return super().load_state_dict(state_dict, *args, **settings)

    def cuda(self, device=None):
        raise _MOVING

    def cpu(self):
        raise _MOVING

    def to(self, *args, **settings):
        moved = args and isinstance(args[0], (torch.device, int, str, torch.Tensor))
        if moved or "device" in settings or "tensor" in settings:
            raise _MOVING
        return super().to(*args, **settings)


def _check(value: Any, what: str) -> None:
    tensors = value if isinstance(value, tuple) else (value,)
    for own in tensors:
        if not isinstance(own, torch.Tensor):
            raise TypeError(f"expected Tensor as {what}, but got {type(own).__name__}")


def is_checkpointing() -> bool:
    """Refused: the engine decides for each micro-batch what it recomputes, and modules do not see
    it. Batch norms and random numbers need no such code here."""
    raise SettingError("is_checkpointing() is torchgpipe's: in gpipe a module does not see whether "
                       "it will be recomputed; it must compute the same both times")


def is_recomputing() -> bool:
    """Refused, as `is_checkpointing`."""
    raise SettingError("is_recomputing() is torchgpipe's: in gpipe a module does not see whether "
                       "it is recomputed; it must compute the same both times")
