"""A model cut into stages, in the user's own process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _gpipe, autograd, checkpoint, checks, threads, timing, updates
from . import random as _  # noqa: F401  keyed dropout inside layers
from .errors import CheckpointError, SettingError
from .exchange import Exchange, one_at_a_time
from .loss import OnStages
from .network import Network
from .optimizer import Mapped
from .planning import Plan, Profile
from .processes import started
from .report import Evaluation, StepReport
from .sequence import Sequence as Parts


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as ends:  # each of them is called, whatever the others raise
        ends.callback(threads.end_layers)
        for pipe in list(updates.opened):
            ends.callback(pipe.close)


class Pipeline(Exchange):
    """An `nn.Sequential` (or a `gpipe.sequence`) cut into stages that run at the same time.

    Each mini-batch is cut into `micro_batches`, which flow through the stages. The result does not
    depend on `stages`, `schedule`, `remat` or the cuts, to the bit.

    The module keeps the weights: on the CPU, each update is written into the module's own tensors.
    Where that is not possible (stages on a GPU or in other processes, a reduced `dtype` of the
    module itself), `sync()` copies them. Leaving the `with` block calls it. In one process,
    `close()` and `model.state_dict()` do so, too.

    Args:
        model: layers that each take what the one before returned: a tensor, or tensors nested in
            tuples, lists and dictionaries.
        example: a mini-batch's inputs. Shapes, dtypes and nesting are taken from it, and layers are
            timed on its values. The first size of each tensor is the number of samples.
        stages: number of stages, K, each on its own CPU device. With "interleaved:V", the number
            of devices, each of which holds V stages.
        devices: instead of `stages`: one device for each, such as `["cuda:0", "cuda:1"]`.
        micro_batches: number of micro-batches, M. With one, stages do not overlap: use at least
            two to four times the number of stages. A mini-batch of fewer samples has one
            micro-batch for each sample.
        schedule: "gpipe", "1f1b" or "zb-h1"; "zb-v", "v-half" or "v-min" with two stages on each
            device; "interleaved:V", "interleaved-zb:V" or "breadth-first:V" with V.
        loss: a loss of torch.nn (the guide lists which), a `gpipe.Loss`, or a function of (output,
            target) that returns (sum, count). None if you compute the loss yourself, from
            `pipe(x)`.
        optimizer: SGD, Adam, AdamW, RMSprop or Adafactor of torch.optim, over the model's
            parameters. None if you make the updates yourself.
        clip_norm: the largest global norm of the gradients. Needs an optimizer.
        remat: what is discarded in the forward and recomputed for the backward:
            "unless-adjacent" (the default: all but where the backward follows at once), "always",
            "never", "selective", "keep:N", "segments:N"; or one for each stage, separated by
            commas.
        balance: number of layers of each stage. By default the cuts come from measured times.
        plan: a `gpipe.Plan`, which sets stages, micro_batches, schedule, remat and balance.
            `devices` may name as many devices as the plan has.
        threads: CPU threads of each stage. Changing it changes the last bits.
        seed: of dropout and other random operators.
        dtype: of the arithmetic: torch.float32, float64, bfloat16 or float16. By default the
            parameters'. With a smaller one than theirs, parameters, gradient sums and updates stay
            in float32.
        shared_inputs: positions of inputs that have no sample axis, such as a mask for all samples.
        memory_cap: bytes of tensors that a device may hold, all its stages together; one number, or
            one for each device.
        average: decay of moving averages of the weights (`averages()`). Needs an optimizer.
        keep_gradients: keeps a copy of each step's gradients (`gradients()`).
        open_forwards: the most calls of `pipe(x)` that may wait for their backward.
        timeout: seconds without progress of a stage after which a step fails. Must exceed the
            longest forward or backward of a layer on one micro-batch.
        processes: whether to run in the processes that torchrun started. By default, if there are
            several.
        links: how values pass between processes: "gloo", through the memory of the CPU, or "nccl",
            from GPU to GPU. With "nccl" each process has one stage, on a GPU.
        input_gradients: whether `pipe(x)` can give gradients of x from the first call on. They cost
            a product in the first layer. By default they begin with the first x that requires
            gradients, for which no earlier call may wait for its backward.

    Raises:
        SettingError: a setting, module, loss or optimizer does not fit; the message has the remedy.
        ModelError: layers or the example do not fit each other.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        stages: int | None = None,
        devices: Sequence[str | torch.device] | None = None,
        micro_batches: int = 1,
        schedule: str = "1f1b",
        loss: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        remat: str | None = None,
        balance: Sequence[int] | None = None,
        plan: Plan | None = None,
        threads: int = 1,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        shared_inputs: Sequence[int] = (),
        memory_cap: int | Sequence[int] | None = None,
        average: float | None = None,
        keep_gradients: bool = False,
        open_forwards: int = 8,
        timeout: float = 300.0,
        processes: bool | None = None,
        links: str = "gloo",
        input_gradients: bool = False,
        _plain_outputs: bool = False,
        _norms_follow_micro_batches: bool = False,
    ):
        self._engine = None
        self._lock = threading.RLock()
        if plan is not None:
            given = (stages, balance, remat, micro_batches, schedule)
            if given != (None, None, None, 1, "1f1b"):
                raise SettingError("plan sets stages, balance, remat, micro_batches and schedule: "
                                   "leave them out")
            micro_batches, schedule, remat = plan.micro_batches, plan.schedule, plan.remat
            balance, stages = plan.balance, plan.devices
        checks.types(schedule=schedule, links=links, remat=remat, seed=seed, clip_norm=clip_norm,
                     average=average, timeout=timeout, balance=balance, memory_cap=memory_cap)
        checks.positive("micro_batches", micro_batches)
        checks.positive("threads", threads)
        checks.positive("open_forwards", open_forwards)
        if optimizer is None and (clip_norm is not None or average is not None):
            name = "average" if clip_norm is None else "clip_norm"
            raise SettingError(f"{name}= needs optimizer=: gpipe makes no update without one")
        checks.is_module(model)
        placed = checks.devices_of(stages, devices, plan is not None)
        shared = list(shared_inputs)
        dtype = checks.dtype_of(model, dtype)
        network = Network(model, example, dtype, can_share=set(placed) == {"cpu"},
                          shared=shared)
        if _plain_outputs:
            network.check_plain()
        self.model, self._network = model, network
        self._mapped = None
        if optimizer is not None:
            self._mapped = Mapped(optimizer, network.tensors.names(), network.tensors.trained())
        micro_batch = max(1, network.samples // micro_batches)
        self._loss = None
        if loss is not None:
            self._loss = OnStages(loss, network.gives, network.outputs, network.samples,
                                  micro_batch)
        self._gives_input_gradients = input_gradients
        self._keeps_gradients = keep_gradients
        self._micro_batches = micro_batches
        self._on_cpu = set(placed) == {"cpu"}
        self._is_behind = self._has_newer_statistics = False
        in_processes = started() if processes is None else processes
        network.set_mode(model.training)
        if balance is None and len(placed) > 1 and not in_processes:
            timing.measure(network.layers, network.part(micro_batch), threads)
        settings = {
            "layers": [own.described() for own in network.layers],
            "inputs": network.inputs,
            "shared_inputs": shared,
            "devices": placed,
            "micro_batches": micro_batches,
            "schedule": schedule,
            "remat": remat,
            "balance": None if balance is None else list(balance),
            "threads": threads,
            "seed": seed,
            "dtype": str(dtype).removeprefix("torch."),
            "timeout": float(timeout),
            "clip_norm": clip_norm,
            "memory_cap": [memory_cap] if isinstance(memory_cap, int) else memory_cap,
            "optimizer": self._mapped and self._mapped.described(),
            "groups": self._mapped.groups() if self._mapped else [],
            "average": average,
            "keep_gradients": keep_gradients,
            "input_gradients": input_gradients,
            "open_forwards": open_forwards,
            "norms_follow_micro_batches": _norms_follow_micro_batches,
            "loss": self._loss and (self._loss.sum, self._loss.count),
        }
        self._engine = _gpipe.Engine(settings, in_processes, links)
        self._rank, self._size = self._engine.processes
        self._steps = 0
        network.tensors.remember()
        # A sequence's state is its model's.
        owner = model
        while isinstance(owner, Parts):
            owner = owner.model
        self._hook = owner.register_state_dict_pre_hook(_Syncs(self))
        updates.opened.add(self)

    # Training.

    @one_at_a_time
    def train_step(self, x: Any, y: Any) -> StepReport:
        """Trains on one mini-batch: all micro-batches forward and backward, and one update.

        `x` is nested like `example`; `y` is what the loss takes. They have the same number of
        samples, which may differ from the example's. Neither requires gradients.

        A step that fails, or that Ctrl-C ends before its update, changes nothing. What a module
        raises arrives as it is, with a note of layer, stage and micro-batch.
        """
        self._needs(loss=True, optimizer=True, training=True)
        tensors, targets = self._network.flat(x), self._loss.flat(y)
        checks.no_gradients_of(tensors + targets)
        self._prepare(training=True)
        self._network.tensors.check_hooks()
        rates, groups = self._mapped.changed()
        if groups is not None:
            self._engine.regroup(groups)
        self._mapped.has_sent(rates)
        steps, was_behind = self._steps, self._is_behind
        try:
            # Set before the update, because an interrupt may come right after it.
            self._is_behind |= self._size == 1 and any(
                own.is_stale for own in self._network.tensors)
            report = StepReport.of(self._engine.train_step(tensors, targets, rates.lr))
            self._has_updated(report.step)
        except BaseException:
            made = steps
            with contextlib.suppress(Exception):  # the pipeline's thread may be gone
                made = self._engine.steps
            if made == steps:
                self._is_behind = was_behind
            else:
                with contextlib.suppress(Exception):
                    self._has_updated(made)
            raise
        return report

    @one_at_a_time
    def accumulate(self, x: Any, y: Any, count: float | None = None) -> Evaluation:
        """Computes the gradients of a mini-batch under the schedule, and adds them to
        `parameter.grad`, as `loss.backward()` would.

        The update is yours: `optimizer.step()` on the model's parameters, with any optimizer. It
        is not all or nothing, as `train_step` is: if it fails half-way, some parameters are
        changed. `count` divides the loss in the place of this mini-batch's own count, so that
        several mini-batches add up to the mean over all. If a gradient overflows in float16, it
        raises NotFiniteError and halves the loss scale: call it again.
        """
        self._needs(loss=True, training=True)
        tensors, targets = self._network.flat(x), self._loss.flat(y)
        checks.no_gradients_of(tensors + targets)
        self._prepare(training=True)
        self._network.tensors.check_hooks()
        found, gradients = self._engine.accumulate(tensors, targets, count)
        self._network.tensors.add_gradients(gradients)
        self._note_statistics()
        self._finish()
        return Evaluation(**found)

    @one_at_a_time
    def __call__(self, *inputs: Any) -> Any:
        """The model's outputs, as a part of your own computation: `backward()` on a loss made of
        them goes back through the stages, to `parameter.grad` and to the inputs.

        The module's own modes apply (`model.train()`, `model.eval()`). Without gradients
        (`torch.no_grad()`) nothing is kept. A backward runs once.
        """
        self._needs()
        tensors = self._network.flat(inputs[0] if len(inputs) == 1 else inputs)
        self._prepare(training=True)
        if torch.is_grad_enabled():
            wants = any(own.requires_grad for own in tensors)
            if wants and not self._gives_input_gradients:
                self._engine.set_input_gradients(True)
                self._gives_input_gradients = True
            parameters = [own for own in self._network.tensors if not own.is_buffer]
            outputs = autograd.run(self._engine, self._network, self._lock, parameters, tensors)
        elif self._network.is_training():
            outputs, _ = self._engine.forward(tensors)
        else:
            outputs = self._engine.predict(tensors)
        self._note_statistics()
        self._finish()
        return self._network.nested(outputs, tensors, self._micro_batches)

    # Without training.

    @one_at_a_time
    def evaluate(self, x: Any, y: Any) -> Evaluation:
        """The mean loss of a mini-batch in evaluation mode, without an update."""
        self._needs(loss=True)
        tensors, targets = self._network.flat(x), self._loss.flat(y)
        self._prepare(training=False)
        return Evaluation(**self._engine.evaluate(tensors, targets))

    @one_at_a_time
    def predict(self, x: Any) -> Any:
        """The model's outputs for a mini-batch in evaluation mode, without gradients, on the CPU.
        Those in bfloat16 or float16 are returned in float32."""
        self._needs()
        tensors = self._network.flat(x)
        self._prepare(training=False)
        outputs = self._engine.predict(tensors)
        return self._network.nested(outputs, tensors, self._micro_batches)

    # State.

    @one_at_a_time
    def save(self, folder: str | os.PathLike, *, keep: int = 2) -> Path:
        """Saves parameters, buffers, optimizer state and rates, averages and the number of steps as
        a checkpoint in `folder`, in the `gpipe` command's format. Returns the checkpoint's folder.

        `keep` is how many of the newest checkpoints stay.
        """
        self._needs()
        self._send_changes()
        own = {"buffers": self._network.tensors.buffers(),
               "rates": self._mapped and self._mapped.saved()}
        saved, untidy = self._engine.save(os.fspath(folder), keep, [checkpoint.packed(own)])
        if untidy is not None:
            warnings.warn(f"the checkpoint is complete, but {untidy}", stacklevel=3)
        return Path(saved)

    @one_at_a_time
    def load(self, folder: str | os.PathLike) -> Path:
        """Restores the newest checkpoint in `folder`, or the checkpoint that `folder` is. It may
        have been saved with another number of stages. Returns the checkpoint's folder.

        The optimizer's groups get the learning rates that they had. Make a scheduler before, and
        call its `load_state_dict` afterwards.
        """
        self._needs()
        found, own = checkpoint.unpacked(folder)
        buffers, rates = own.get("buffers"), own.get("rates") if self._mapped else None
        try:
            if buffers is not None:
                self._network.tensors.check_buffers(buffers)
            if rates is not None:
                self._mapped.check_saved(rates)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {found} does not fit: {error}") from None
        self._send_toggles()  # before: what is frozen on the stages gets no optimizer state
        self._engine.restore(os.fspath(found))
        self._steps = self._engine.steps
        self._count_updates()
        if buffers is not None:
            self._network.tensors.set_buffers(buffers)
        if rates is not None:
            self._mapped.restore(rates)
        if self._size == 1:
            self._write_back()
        self._sync_counters()
        self._network.tensors.remember()
        return found

    @one_at_a_time
    def accept_torn_update(self) -> bool:
        """Uses the parameters as they are after an update that only some stages made, or after a
        forward that changed a parameter. Returns whether there was such a failure. Raises an error
        with several processes: load a checkpoint there."""
        self._needs()
        accepted = self._engine.accept_torn_update()
        if accepted:
            self._write_back()
            self._finish()
        return accepted

    @one_at_a_time
    def averages(self) -> dict[str, torch.Tensor]:
        """The moving averages of the weights, by `state_dict` name."""
        self._needs()
        return dict(self._engine.averages())

    @one_at_a_time
    def gradients(self) -> dict[str, torch.Tensor]:
        """The last step's gradients before clipping, by name (`keep_gradients=True`)."""
        self._needs()
        if not self._keeps_gradients:
            raise SettingError("the pipeline keeps no gradients: give "
                               "Pipeline(keep_gradients=True)")
        return dict(self._engine.gradients())

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        self._needs()
        return self._steps

    @property
    def balance(self) -> list[int]:
        """Number of layers of each stage. With "interleaved:V" there are V for each device."""
        self._needs()
        return self._engine.balance

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @one_at_a_time
    def profile(self, x: Any, y: Any, *, micro_batches: Iterable[int] = (4, 8),
                schedules: Iterable[str] = ("1f1b", "gpipe", "zb-h1"), steps: int = 5) -> Profile:
        """Measures the time and memory of each layer by training a few steps on this machine, for
        `gpipe.plan`. The pipeline's own parameters stay as they are."""
        self._needs(loss=True, optimizer=True)
        tensors, targets = self._network.flat(x), self._loss.flat(y)
        self._prepare(training=True)
        text = self._engine.profile(tensors, targets, list(micro_batches), list(schedules), steps)
        return Profile(json.loads(text), self._network.samples_of(tensors))

    def close(self) -> None:
        """Ends the stages. The module then has the trained weights, and is as usable as before."""
        if self._engine is None:
            return
        if not self._engine.is_here:
            self._engine = None  # a fork has no threads to end
            return
        with self._lock:  # after a call of another thread, which has ended then
            if self._engine is None:
                return
            try:
                if self._size == 1:
                    self.sync()
            finally:
                self._engine = None
                updates.opened.discard(self)
                self._hook.remove()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self._engine is not None and self._size > 1 and error is None:
                self.sync()
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"gpipe: the module may lack the last updates: {own}")

    def __del__(self):
        if self._engine is not None and self._has_newer_values and self._engine.is_here:
            done = "the module has them now"
            try:
                self.close()
            except Exception as error:
                done = f"they are lost: {error}"
            warnings.warn(f"a pipeline was dropped whose stages had newer values than its module "
                          f"({done}): call close() first, or use a with block", ResourceWarning,
                          stacklevel=2)
        self._engine = None

    def __reduce__(self):
        raise TypeError("a pipeline has threads, so it cannot be pickled or copied: pickle "
                        "model.state_dict(), or use Pipeline.save")

    def __repr__(self) -> str:
        if self._engine is None:
            return "Pipeline(closed)"
        return f"Pipeline({len(self._network.layers)} layers, balance {self.balance})"


class _Syncs:
    """What a module calls before its state is read. A copy of the module has no pipeline."""

    def __init__(self, pipe: Pipeline | None = None):
        self.reference = pipe and weakref.ref(pipe)

    def __call__(self, *_: Any) -> None:
        pipe = self.reference and self.reference()
        if pipe is not None:
            pipe._catch_up()

    def __reduce__(self):
        return _Syncs, ()
