"""A model cut into stages, in the user's own process."""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _gpipe, batch_norm, skip
from . import loss as losses
from . import random as _  # noqa: F401  keyed dropout inside layers
from .errors import SettingError
from .layer import Layer, Structure, bfloat16_buffers, describe, spec_of
from .optimizer import Mapped, names_of
from .planning import Plan, Profile
from .report import Evaluation, StepReport
from .sequence import layers_of

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pipe in list(_open):
        pipe.close()


class Pipeline:
    """An `nn.Sequential` (or a `gpipe.sequence`) cut into stages that run at the same time.

    Each mini-batch is cut into `micro_batches`, which flow through the stages. The result does not
    depend on `stages`, `schedule`, `remat` or the cuts, to the bit.

    The module keeps the weights: on the CPU, each update is written into the module's own tensors.
    Where that is not possible (stages on a GPU or in other processes, a reduced `dtype` of the
    module itself), `sync()` copies them; `close()` calls it, and so does leaving the `with` block.

    Args:
        model: layers that each take what the one before returned: a tensor, or tensors nested in
            tuples, lists and dictionaries.
        example: a mini-batch's inputs. Only shapes, dtypes and nesting matter. The first size of
            each tensor is the number of samples.
        stages: number of stages, K, each on a CPU device of its own.
        devices: instead of `stages`: one device for each, such as `["cuda:0", "cuda:1"]`.
        micro_batches: number of micro-batches, M.
        schedule: "gpipe", "1f1b", "zb-h1", or "interleaved:V" with V stages on each device.
        loss: a loss of torch.nn, a `gpipe.Loss`, or a function of (output, target) that returns
            (sum, count). None if you compute the loss yourself, from `pipe(x)`.
        optimizer: SGD, Adam, AdamW, RMSprop or Adafactor of torch.optim, over the model's
            parameters. None if you make the updates yourself.
        clip_norm: the largest global norm of the gradients.
        remat: what is discarded in the forward and recomputed for the backward:
            "unless-adjacent" (the default: all but where the backward follows at once), "always",
            "never", "selective", "keep:N", "segments:N"; or one for each stage, separated by
            commas.
        balance: number of layers of each stage. By default the cuts come from measured times.
        plan: a `gpipe.Plan`, which sets stages, micro_batches, schedule, remat and balance.
        threads: CPU threads of each stage. Changing it changes the last bits.
        seed: of dropout and other random operators.
        dtype: of the arithmetic: torch.float32, float64, bfloat16 or float16. By default the
            parameters'. With a smaller one than theirs, parameters, gradient sums and updates stay
            in float32.
        shared_inputs: positions of inputs that have no sample axis, such as a mask for all samples.
        memory_cap: bytes of tensors that a stage may hold; one number, or one for each.
        average: decay of moving averages of the weights (`averages()`).
        keep_gradients: keeps a copy of each step's gradients (`gradients()`).
        open_forwards: the most calls of `pipe(x)` that may wait for their backward.
        deadline: seconds of silence of a stage after which a step fails. Must exceed the longest
            forward of one micro-batch.
        processes: whether to run in the processes that torchrun started. By default, if there are
            several.

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
        deadline: float = 600.0,
        processes: bool | None = None,
        _plain_outputs: bool = False,
        _norms_follow_micro_batches: bool = False,
    ):
        self._engine = None
        if plan is not None:
            if stages not in (None, plan.stages) or balance is not None or remat is not None:
                raise SettingError("plan sets stages, balance and remat: leave them out")
            micro_batches, schedule, remat = plan.micro_batches, plan.schedule, plan.remat
            balance, stages = plan.balance, plan.devices
        if devices is None:
            devices = ["cpu"] * _positive("stages", 1 if stages is None else stages)
        elif stages not in (None, len(devices)):
            raise SettingError(f"stages={stages} and {len(devices)} devices: give one of them")
        _positive("micro_batches", micro_batches)
        _check_settings(schedule=schedule, remat=remat, seed=seed, clip_norm=clip_norm,
                        average=average, deadline=deadline, balance=balance,
                        memory_cap=memory_cap, devices=devices)
        self._threads = _positive("threads", threads)
        self.model = model
        self._dtype = _dtype_of(model, dtype)
        named = layers_of(model)
        if not named:
            raise SettingError("the model has no layers")
        self._layers = self._make_layers(named)
        self._tensors = _tensors_of(self._layers)
        self._master = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._takes, tensors = Structure.of(example)
        if not tensors:
            raise SettingError(f"example {example!r} holds no tensor: give a mini-batch's inputs")
        self._inputs = [spec_of(own) for own in tensors]
        self._samples = tensors[0].size(0) if tensors[0].dim() else 0
        self._shared = list(shared_inputs)
        self._infer(micro_batches)
        if _plain_outputs:
            self._check_plain()
        self._mapped = None
        if optimizer is not None:
            self._mapped = Mapped(optimizer, self._full_names(), self._trained())
        self._loss = None
        if loss is not None:
            each = max(1, self._samples // micro_batches)
            self._loss = _LossOnStages(self._gives, self._outputs, self._samples)
            self._loss.loss = losses.mapped(loss, self._loss.zeros, each)
        self._pending_batches = 0
        self._modes: dict[nn.Module, bool] = {}
        self._gives_input_gradients = False
        settings = {
            "inputs": self._inputs,
            "shared_inputs": self._shared,
            "devices": [str(own) for own in devices],
            "micro_batches": micro_batches,
            "schedule": schedule,
            "remat": remat,
            "threads": threads,
            "seed": seed,
            "dtype": str(self._dtype).removeprefix("torch."),
            "deadline": float(deadline),
            "clip_norm": clip_norm,
            "memory_cap": [memory_cap] if isinstance(memory_cap, int) else memory_cap,
            "optimizer": self._mapped and self._mapped.described(),
            "groups": self._mapped.groups() if self._mapped else [],
            "average": average,
            "input_gradients": False,
            "keep_gradients": keep_gradients,
            "open_forwards": open_forwards,
            "norms_follow_micro_batches": _norms_follow_micro_batches,
            "loss": self._loss and (self._loss.sum, self._loss.count),
        }
        in_processes = _several() if processes is None else processes
        if balance is None and len(devices) > 1 and not in_processes:
            self._time_layers(tensors, micro_batches)
        settings["balance"] = None if balance is None else [int(own) for own in balance]
        settings["layers"] = [own.described() for own in self._layers]
        self._mode(self.model.training)
        self._engine = _gpipe.Engine(settings, in_processes, float(deadline))
        self._rank, self._size = self._engine.processes
        self._on_cpu = all(str(own) == "cpu" for own in devices)
        reference = weakref.ref(self)

        def before_state_dict(*_):
            pipe = reference()
            if pipe is not None and pipe._engine is not None and pipe._size == 1:
                pipe.sync()

        ties = any(own["tie"] for layer in self._layers for own in layer.parameters)
        self._has_copies = ties or self._dtype in (torch.bfloat16, torch.float16)
        self._remember()
        self._hook = model.register_state_dict_pre_hook(before_state_dict)
        _open.add(self)

    # Training.

    def train_step(self, x: Any, y: Any) -> StepReport:
        """Trains on one mini-batch: all micro-batches forward and backward, and one update.

        `x` is nested like `example`; `y` is what the loss takes. They have the same number of
        samples, which may differ from the example's.

        A step that fails, or that Ctrl-C ends, changes nothing. What a module raises arrives as it
        is, with a note of layer, stage and micro-batch.
        """
        self._needs(loss=True, optimizer=True)
        self._needs_train_mode()
        lr, groups = self._mapped.changed()
        if groups is not None:
            self._engine.regroup(groups)
        self._mode(True)
        self._refresh()
        fields = self._engine.train_step(self._flat(x), self._targets(y), lr)
        self._remember()
        report = StepReport.of(fields)
        if not report.skipped:
            self._pending_batches += 1
        self._mapped.stepped()
        return report

    def accumulate(self, x: Any, y: Any, count: float | None = None) -> Evaluation:
        """Computes the gradients of a mini-batch under the schedule, and adds them to
        `parameter.grad`, as `loss.backward()` would.

        The update is yours: `optimizer.step()` on the model's parameters, with any optimizer. It
        is not all or nothing, as `train_step` is: if it fails half-way, some parameters are
        changed. `count` divides the loss in the place of this mini-batch's own count, so that
        several mini-batches add up to the mean over all.
        """
        self._needs(loss=True)
        self._needs_train_mode()
        self._mode(True)
        self._refresh()
        found, gradients = self._engine.accumulate(self._flat(x), self._targets(y), count)
        self._add_gradients(gradients)
        self._pending_batches += 1
        return Evaluation(**found)

    def __call__(self, *inputs: Any) -> Any:
        """The model's outputs, as a part of your own computation: `backward()` on a loss made of
        them goes back through the stages, to `parameter.grad` and to the inputs.

        The module's own modes apply (`model.train()`, `model.eval()`). Without gradients
        (`torch.no_grad()`) nothing is kept. A backward runs once.
        """
        value = inputs[0] if len(inputs) == 1 else inputs
        return self._as_layer(self._flat(value))

    # Without training.

    def evaluate(self, x: Any, y: Any) -> Evaluation:
        """The mean loss of a mini-batch in evaluation mode, without an update."""
        self._needs(loss=True)
        self._mode(False)
        self._refresh()
        return Evaluation(**self._engine.evaluate(self._flat(x), self._targets(y)))

    def predict(self, x: Any) -> Any:
        """The model's outputs for a mini-batch in evaluation mode, without gradients."""
        self._mode(False)
        self._refresh()
        return self._nested(self._engine.predict(self._flat(x)))

    # State.

    def sync(self) -> None:
        """Brings the module up to date, where it does not share the stages' tensors. With several
        processes, all of them call it."""
        self._needs()
        self._count_batches()
        if self._size == 1 and self._on_cpu and not any(own.is_copied for own in self._tensors):
            return
        values = dict(self._engine.parameters())
        if self._size > 1:
            values = self._of_all_processes(values)
        with torch.no_grad():
            for own in self._tensors:
                value = values.get(own.name)
                if value is not None and own.is_copied or self._size > 1:
                    own.tensor.copy_(value)
        self._remember()

    def save(self, folder: str | os.PathLike, *, keep: int = 2) -> Path:
        """Saves everything between two steps (parameters, optimizer state, averages, counters) as a
        checkpoint in `folder`, in the `gpipe` command's format. Returns the checkpoint's folder.

        `keep` is how many of the newest checkpoints stay.
        """
        self._needs()
        return Path(self._engine.save(os.fspath(folder), keep))

    def load(self, folder: str | os.PathLike) -> Path:
        """Restores the newest checkpoint in `folder`, or the checkpoint that `folder` is. It may
        have been saved with another number of stages. Returns the checkpoint's folder."""
        self._needs()
        found = Path(self._engine.restore(os.fspath(folder)))
        self._restore_batches()
        self._remember()
        return found

    def averages(self) -> dict[str, torch.Tensor]:
        """The moving averages of the weights, by `state_dict` name."""
        self._needs()
        return dict(self._engine.averages())

    def gradients(self) -> dict[str, torch.Tensor]:
        """The last step's gradients before clipping, by name (`keep_gradients=True`)."""
        self._needs()
        return dict(self._engine.gradients())

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        self._needs()
        return self._engine.steps

    @property
    def balance(self) -> list[int]:
        """Number of layers of each stage."""
        self._needs()
        return self._engine.balance

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    def profile(self, x: Any, y: Any, *, micro_batches: Iterable[int] = (4, 8),
                schedules: Iterable[str] = ("1f1b", "gpipe", "zb-h1"), steps: int = 5) -> Profile:
        """Measures the time and memory of each layer by training a few steps on this machine, for
        `gpipe.plan`. The pipeline's own parameters stay as they are."""
        self._needs(loss=True, optimizer=True)
        self._mode(True)
        flat = self._flat(x)
        text = self._engine.profile(flat, self._targets(y), list(micro_batches),
                                    list(schedules), steps)
        return Profile(json.loads(text), flat[0].size(0))

    def close(self) -> None:
        """Ends the stages. The module then has the trained weights, and is as usable as before."""
        if self._engine is None:
            return
        try:
            if self._size == 1:
                self.sync()
        finally:
            self._engine = None
            self._hook.remove()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind, *_) -> None:
        if self._engine is not None and self._size > 1 and kind is None:
            self.sync()
        self.close()

    def __del__(self):
        self._engine = None

    def __reduce__(self):
        raise TypeError("a pipeline has threads, so it cannot be pickled or copied: pickle "
                        "model.state_dict(), or use Pipeline.save")

    def __repr__(self) -> str:
        if self._engine is None:
            return "Pipeline(closed)"
        return f"Pipeline({len(self._layers)} layers, balance {self.balance})"

    # Building.

    def _make_layers(self, named) -> list[Layer]:
        ties = _ties(named)
        layers, names = [], set()
        for name, module in named:
            if name in names:
                raise SettingError(f"two layers are named '{name}'")
            names.add(name)
            if not isinstance(module, nn.Module):
                raise SettingError(f"layer '{name}' is {type(module).__name__}, no nn.Module")
            layers.append(Layer(name, module, ties, self._dtype))
        _check_norms(layers)
        _check_storage(layers)
        for layer in layers:
            for own in layer.parameters:
                self._share_or_copy(own)
            if self._dtype in (torch.bfloat16, torch.float16):
                bfloat16_buffers(layer, self._dtype)
        return layers

    def _share_or_copy(self, own: dict) -> None:
        """Decides whether the module's tensor can be the engine's parameter."""
        master = torch.float64 if self._dtype == torch.float64 else torch.float32
        value = own["value"]
        if value.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            raise SettingError(f"parameter '{own['name']}' is {value.dtype}: gpipe trains floating "
                               f"point; make it a buffer")
        fits = value.dtype == master and value.device.type == "cpu" and value.is_contiguous()
        if not (own["shared"] and fits):
            own["shared"] = False
            with torch.no_grad():
                own["value"] = value.detach().to("cpu", master).contiguous()

    def _infer(self, micro_batches: int) -> None:
        """Finds how each layer's output is nested."""
        takes, skips, specs = self._takes, {}, self._inputs
        declared: set[str] = set()
        for layer in self._layers:
            layer.takes = takes
            layer.absent = frozenset(declared - skips.keys())
            layer.pops = [name for name in layer.pops if name not in layer.absent]
            declared.update(layer.stashes)
            missing = [name for name in layer.pops if name not in skips]
            if missing:
                raise SettingError(f"layer '{layer.name}': Pop({missing[0]!r}), but no earlier "
                                   f"layer stashes '{missing[0]}'")
            try:
                specs, stashed = layer.infer(specs, [skips[name] for name in layer.pops])
            except Exception as error:
                error.add_note(f"gpipe: layer '{layer.name}' ({layer.kind}), inferring the shapes "
                               f"of its outputs from the example")
                raise
            skips.update(zip(layer.stashes, stashed))
            takes = layer.gives
        self._gives, self._outputs = takes, specs

    def _check_plain(self) -> None:
        """Refuses values between layers that are no tensors, or tuples of tensors."""
        for layer in self._layers:
            for _, value in layer.gives.constants:
                raise TypeError(f"layer '{layer.name}': expected Tensor in its output, but got "
                                f"{type(value).__name__}")

    def _time_layers(self, tensors, micro_batches: int) -> None:
        """Measures forward and backward of each layer on one micro-batch, for the cuts. Layers that
        do not run on the example's values alone are cut by their sizes."""
        each = max(1, self._samples // micro_batches)
        values = [own if at in self._shared else own[:each] for at, own in enumerate(tensors)]
        skips: dict[str, torch.Tensor] = {}
        times = []
        self._mode(self.model.training)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                for layer in self._layers:
                    spent, values, skips = _timed(layer, values, skips)
                    times.append(spent)
        except Exception:  # of the user's module; a step shows it if it is real
            return
        finally:
            torch.set_num_threads(threads)
        for layer, spent in zip(self._layers, times):
            layer.flops = spent

    def _full_names(self) -> dict[int, str]:
        """The engine's name of each tensor of the module's."""
        return {id(own.tensor): own.name for own in self._tensors}

    def _trained(self) -> set[str]:
        return {own.name for own in self._tensors if own.tensor.requires_grad}

    # Calls.

    def _needs(self, *, loss: bool = False, optimizer: bool = False) -> None:
        if self._engine is None:
            raise SettingError("the pipeline is closed: make a new one")
        if loss and self._loss is None:
            raise SettingError("the pipeline has no loss: give Pipeline(loss=...)")
        if optimizer and self._mapped is None:
            raise SettingError("the pipeline has no optimizer: give Pipeline(optimizer=...), or "
                               "use accumulate and make the update yourself")

    def _needs_train_mode(self) -> None:
        if not self.model.training:
            raise SettingError("the model is in evaluation mode: call model.train() to train")

    def _mode(self, training: bool) -> None:
        """Sets the modes of the layers' modules: those of the model, or evaluation."""
        for layer in self._layers:
            for own, original in layer.pairs:
                wanted = training and original.training
                if own.training != wanted:
                    if batch_norm.is_deferred(original):
                        self._count_batches()
                    own.training = wanted

    def _flat(self, value: Any) -> list[torch.Tensor]:
        self._needs()
        given, tensors = Structure.of(value)
        if not given.is_same(self._takes):
            raise SettingError(f"the input is {describe(given)}, the example was "
                               f"{describe(self._takes)}")
        return tensors

    def _targets(self, value: Any) -> list[torch.Tensor]:
        given, tensors = Structure.of(value)
        if self._loss is not None:
            self._loss.target = given
        if not tensors:
            raise SettingError(f"the target {value!r} holds no tensor")
        return tensors

    def _nested(self, tensors) -> Any:
        return self._gives.fill(list(tensors))

    def _refresh(self) -> None:
        """Lets the stages see what the user has changed in the module's tensors, where they have
        copies of them."""
        changed = []
        for own in self._tensors:
            if own.is_replaced():
                raise SettingError(
                    f"'{own.name}' is not the tensor, or has not the memory, that it had when the "
                    f"pipeline was made (model.to(...), p.data = ..., another nn.Parameter): make "
                    f"a new pipeline")
            if own.tensor._version != own.version:
                changed.append(own)
        if not changed:
            return
        copied = [(own.name, own.tensor.detach().to("cpu", self._master).contiguous())
                  for own in changed if own.is_copied]
        if copied:
            self._engine.set_parameters(copied)
        if self._has_copies:
            self._engine.refresh()
        self._remember()

    def _remember(self) -> None:
        """Later changes of the module's tensors are the user's."""
        for own in self._tensors:
            own.version = own.tensor._version

    def _count_batches(self) -> None:
        """Adds the mini-batches since the last time to batch norms' counters."""
        if not self._pending_batches:
            return
        pending, self._pending_batches = self._pending_batches, 0
        for layer in self._layers:
            for own, original in layer.pairs:
                counts = batch_norm.is_deferred(original) and own.training
                if counts and original.num_batches_tracked is not None:
                    original.num_batches_tracked += pending

    def _restore_batches(self) -> None:
        """Takes batch norms' counters from the engine, after a checkpoint was restored."""
        self._pending_batches = 0
        values = dict(self._engine.parameters())
        for layer in self._layers:
            originals = dict(layer.original.named_modules(remove_duplicate=False))
            for own in layer.parameters:
                path, _, name = own["name"].rpartition(".")
                if name == "num_batches_tracked" and own["buffer"]:
                    count = values.get(f"{layer.name}.{own['name']}")
                    if count is not None:
                        originals[path].num_batches_tracked.fill_(int(count))

    def _add_gradients(self, gradients) -> None:
        """Adds gradients to the module's parameters, as autograd does."""
        given = dict(gradients)
        with torch.no_grad():
            for name, tensor in ((own.name, own.tensor) for own in self._tensors):
                gradient = given.get(name)
                if gradient is None:
                    continue
                gradient = gradient.to(tensor.device, tensor.dtype)
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

    def _as_layer(self, tensors) -> Any:
        from .autograd import run

        return run(self, tensors)

    def _of_all_processes(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from .processes import gather

        return gather(self._engine, own)


class _ModuleTensor:
    """A parameter or running statistic of the user's module."""

    def __init__(self, name: str, table: dict, key: str, is_copied: bool):
        self.name, self.is_copied = name, is_copied
        self.table, self.key = table, key
        self.tensor: torch.Tensor = table[key]
        self.address, self.version = self.tensor.data_ptr(), self.tensor._version

    def is_replaced(self) -> bool:
        """Whether the module has another tensor now, or the tensor other memory."""
        same = self.table[self.key] is self.tensor
        return not same or self.tensor.data_ptr() != self.address


def _tensors_of(layers: list[Layer]) -> list[_ModuleTensor]:
    """The module's own tensors that the engine trains or keeps, each once."""
    found: dict[int, _ModuleTensor] = {}
    for layer in layers:
        originals = dict(layer.original.named_modules(remove_duplicate=False))
        for own in layer.parameters:
            path, _, key = own["name"].rpartition(".")
            module = originals[path]
            table = module._parameters if key in module._parameters else module._buffers
            # The engine counts mini-batches in a number of its own; see `_count_batches`.
            if table.get(key) is not None and key != "num_batches_tracked":
                full = f"{layer.name}.{own['name']}"
                made = _ModuleTensor(full, table, key, not own["shared"])
                found.setdefault(id(made.tensor), made)
    return list(found.values())


class _LossOnStages:
    """The loss as the engine calls it, on tensors without nesting. It knows nothing of the
    pipeline, which would otherwise never be freed: the engine holds it."""

    loss: losses.Loss

    def __init__(self, gives: Structure, outputs: list, samples: int):
        self.gives, self.outputs, self.samples = gives, outputs, samples
        self.target: Structure | None = None

    def sum(self, outputs, targets):
        return self.loss.sum(self.gives.fill(outputs), self.target.fill(targets))

    def count(self, targets):
        return float(self.loss.count(self.target.fill(targets)))

    def zeros(self, samples: int) -> Any:
        """Outputs of zeros."""
        shapes = [([samples, *shape[1:]] if shape and shape[0] == self.samples else shape, dtype)
                  for shape, dtype in self.outputs]
        return self.gives.fill([torch.zeros(shape, dtype=getattr(torch, dtype))
                                for shape, dtype in shapes])


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(f"{name}={value!r}: give a whole number of at least 1")
    return value


def _check_settings(*, schedule, remat, seed, clip_norm, average, deadline, balance, memory_cap,
                    devices) -> None:
    """Checks types in the user's words, before the engine does in its own."""
    def wrong(name, value, remedy):
        raise SettingError(f"{name}={value!r}: {remedy}")

    def is_whole(value):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    for name, value in (("schedule", schedule), ("remat", remat)):
        if not isinstance(value, str) and (name == "schedule" or value is not None):
            wrong(name, value, "give a text, such as '1f1b'" if name == "schedule" else
                  "give a text, such as 'always'")
    if not is_whole(seed):
        wrong("seed", seed, "give a whole number of at least 0")
    for name, value in (("clip_norm", clip_norm), ("average", average), ("deadline", deadline)):
        needed = name == "deadline"
        if (needed or value is not None) and not isinstance(value, (int, float)):
            wrong(name, value, "give a number")
    if not deadline > 0:
        wrong("deadline", deadline, "give seconds above 0")
    if balance is not None and (isinstance(balance, str) or not all(map(is_whole, balance))):
        wrong("balance", balance, "give the number of layers of each stage, such as [3, 3]; leave "
                                  "it out to cut by measured times")
    caps = [] if memory_cap is None else [memory_cap] if not isinstance(
        memory_cap, (list, tuple)) else memory_cap
    if not all(map(is_whole, caps)):
        wrong("memory_cap", memory_cap, "give bytes as a whole number, such as 2 << 30, or one for "
                                        "each stage")
    for own in map(torch.device, [own for own in devices if str(own).startswith("cuda")]):
        if (own.index or 0) >= torch.cuda.device_count():
            wrong("devices", [str(own) for own in devices],
                  f"PyTorch sees {torch.cuda.device_count()} GPUs here")


def _several() -> bool:
    """Whether torchrun (or a launcher like it) started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _dtype_of(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    kinds = {own.dtype for own in model.parameters() if own.is_floating_point()}
    if wanted is None:
        if len(kinds) > 1:
            listed = ", ".join(sorted(map(str, kinds)))
            raise SettingError(f"the model's parameters are {listed}: give dtype=, or convert the "
                               f"model with .to(dtype)")
        wanted = next(iter(kinds), torch.float32)
    known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    if wanted not in known:
        raise SettingError(f"dtype={wanted}: use torch.float32, float64, bfloat16 or float16")
    return wanted


def _ties(named) -> dict[int, str]:
    """A name for each parameter that is used more than once."""
    uses: dict[int, list[str]] = {}
    for layer, module in named:
        for path, own in module.named_modules(remove_duplicate=False):
            for name, value in own._parameters.items():
                if value is not None:
                    full = ".".join(part for part in (layer, path, name) if part)
                    uses.setdefault(id(value), []).append(full)
    return {key: names[0] for key, names in uses.items() if len(names) > 1}


def _check_norms(layers: list[Layer]) -> None:
    owners: dict[int, str] = {}
    for layer in layers:
        for own in layer.original.modules():
            if batch_norm.is_deferred(own) and owners.setdefault(id(own), layer.name) != layer.name:
                raise SettingError(
                    f"layers '{owners[id(own)]}' and '{layer.name}' use one batch norm: its "
                    f"running statistics would be of both. Give each its own")


def _check_storage(layers: list[Layer]) -> None:
    """Refuses two parameters in one storage, which are not one parameter."""
    owners: dict[int, tuple[int, str]] = {}
    for layer in layers:
        for own in layer.parameters:
            value, full = own["value"], f"{layer.name}.{own['name']}"
            if value.numel() == 0 or own["buffer"]:
                continue
            first = owners.setdefault(value.data_ptr(), (id(value), full))
            if first[0] != id(value):
                raise SettingError(
                    f"'{first[1]}' and '{full}' are two parameters in one storage: make them one, "
                    f"by b.weight = a.weight")


def _timed(layer: Layer, values, skips):
    """Nanoseconds of a forward and backward of one layer; its outputs; the skips that are open."""

    def leaf(tensor):
        tensor = tensor.detach()
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    popped = {name: skips[name] for name in layer.pops}
    best = float("inf")
    for _ in range(3):
        inputs = [leaf(own) for own in values]
        start = time.perf_counter()
        with skip.Recorder({name: leaf(own) for name, own in popped.items()}) as recorder:
            output = layer.module(layer.takes.fill(inputs))
        given, tensors = Structure.of(output)
        if layer.gives is None:
            layer.gives = given
        outputs = [own for own in tensors if own.requires_grad]
        leaves = [own for own in (*layer.module.parameters(), *inputs) if own.requires_grad]
        if outputs and leaves:
            ones = [torch.ones_like(own) for own in outputs]
            torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
        best = min(best, time.perf_counter() - start)
    kept = {name: own for name, own in skips.items() if name not in popped}
    kept.update({name: own.detach() for name, own in recorder.stashed})
    return best * 1e9, [own.detach() for own in tensors], kept
