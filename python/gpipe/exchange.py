"""What the user's module and the stages tell each other, before and after each call of a pipeline:
values that one of the two has changed, and parameters that are frozen or trained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _gpipe, checks, updates
from .errors import SettingError
from .loss import OnStages
from .network import Network
from .optimizer import Mapped
from .processes import gather


def one_at_a_time(method: Callable) -> Callable:
    """Lets one thread at a time call the pipeline: modes of modules, and how a target is nested,
    are those of one call."""

    @functools.wraps(method)
    def called(self: Exchange, *args: Any, **settings: Any) -> Any:
        if self._engine is not None:
            self._engine.check_caller()
        with self._lock:
            return method(self, *args, **settings)

    return called


class Exchange:
    """The part of a pipeline that keeps the module and the stages alike."""

    model: nn.Module
    _engine: _gpipe.Engine | None = None
    """None before the pipeline is made, and once it is closed."""
    _lock: threading.RLock
    _network: Network
    _loss: OnStages | None
    _mapped: Mapped | None
    _on_cpu: bool
    _size: int
    """Number of processes."""
    _steps: int
    _is_behind: bool
    """Whether the module waits for `sync`."""
    _has_newer_statistics: bool
    """Whether copies on the stages have newer running statistics than the module."""

    @one_at_a_time
    def sync(self) -> None:
        """Brings the module up to date, where it does not share the stages' tensors. With several
        processes, all of them call it."""
        self._needs()
        self._send_changes()
        self._write_back()

    def _catch_up(self) -> None:
        """Calls `sync` if the stages have newer values than the module. Before its state is read.
        """
        if self._engine is not None and self._has_newer_values:
            self.sync()

    @property
    def _has_newer_values(self) -> bool:
        """Whether the stages have newer values than the module."""
        return self._is_behind or self._has_newer_statistics

    def _needs(self, *, loss: bool = False, optimizer: bool = False,
               training: bool = False) -> None:
        if self._engine is None:
            raise SettingError("the pipeline is closed: make a new one")
        if loss and self._loss is None:
            raise SettingError("the pipeline has no loss: give Pipeline(loss=...)")
        if optimizer and self._mapped is None:
            raise SettingError("the pipeline has no optimizer: give Pipeline(optimizer=...), or "
                               "use accumulate and make the update yourself")
        if training and not self.model.training:
            raise SettingError("the model is in evaluation mode: call model.train() to train")
        if training and torch.is_inference_mode_enabled():
            raise SettingError("torch.inference_mode() keeps no gradients: train outside of it")

    def _prepare(self, *, training: bool) -> None:
        """Brings the stages up to date with what the user has changed in the module."""
        checks.no_autocast()
        self._network.tensors.check_replaced()
        self._network.set_mode(training)
        self._send_changes()
        self._send_toggles()

    def _send_changes(self) -> None:
        """Sends the values that the user has changed to the stages, where they have copies."""
        tensors = self._network.tensors
        changed = [own for own in tensors if own.is_changed()]
        copied = [own for own in changed if own.is_copied]
        if copied:
            behind = [own.name for own in copied if own.is_stale and self._is_behind]
            if behind:
                raise SettingError(
                    f"'{behind[0]}' was changed in the module while the stages hold newer "
                    f"values: call sync() before you change the weights, or make a new pipeline")
            values = dict(self._engine.parameters("*"))
            self._engine.set_parameters([(own.name, own.read(values[own.name]))
                                         for own in copied if own.name in values])
        if changed and self._network.has_copies:
            # It writes a tied weight's own values into the weight too, which is no change.
            with updates.uncounted(own.tensor for own in tensors):
                self._engine.refresh()
        for own in changed:
            own.version = own.tensor._version

    def _send_toggles(self) -> None:
        """Freezes and trains the parameters for which the user has called `requires_grad_`."""
        tensors = self._network.tensors
        toggled = [own for own in tensors if own.tensor.requires_grad != own.is_trained]
        if not toggled:
            return
        if self._mapped is not None:
            self._mapped.check_trained(tensors.trained())
        frozen, trained = (
            [name for own in toggled if own.is_trained == was for name in own.names]
            for was in (True, False))
        self._engine.set_trained(frozen, trained)
        for own in toggled:
            own.is_trained = own.tensor.requires_grad

    def _count_updates(self) -> None:
        """Counts what the stages have written into the memory of the module's tensors. Other
        pipelines over the module may have copies."""
        updates.count(own.tensor for own in self._network.tensors
                      if not own.is_copied and (own.is_buffer or own.is_trained))

    def _has_updated(self, steps: int) -> None:
        """Brings the module up to date with an update of the stages, the one of that number."""
        self._steps = steps
        self._count_updates()
        if self._is_behind and self._on_cpu:
            self._write_back()
        self._finish()
        self._mapped.stepped()

    def _write_back(self) -> None:
        """Writes the stages' values into the module, where it does not share them."""
        tensors = self._network.tensors
        if self._size > 1:
            tensors.write(gather(self._engine, dict(self._engine.parameters("*"))))
        elif any(own.is_stale for own in tensors):
            tensors.write(dict(self._engine.parameters("*")))
        self._is_behind = self._has_newer_statistics = False

    def _finish(self) -> None:
        """Brings the module up to date with what a call has changed."""
        if self._network.is_training():
            self._sync_counters()
        self._network.tensors.remember()

    def _note_statistics(self) -> None:
        """Notes that a forward has changed copies of running statistics on the stages."""
        if self._network.is_training() and self._size == 1:
            self._has_newer_statistics |= any(own.is_stale and own.is_buffer
                                              for own in self._network.tensors)

    def _sync_counters(self) -> None:
        """Brings the counters of batch norms up to date, which the engine keeps as floats."""
        if any(own.is_counter for own in self._network.tensors):
            values = self._engine.parameters("*.num_batches_tracked")
            self._network.tensors.write(dict(values))
