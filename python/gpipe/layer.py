"""A module as a layer of the engine: its parameters, how it is called, the shapes that it gives.

The engine runs a copy of the module's structure, not the module itself. Parameters and buffers are
not copied: where a stage computes on the CPU in the parameters' own dtype, the tensors that it
updates are the module's own.
"""

from __future__ import annotations

import logging
import operator
import warnings
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from . import batch_norm, skip
from .errors import ModelError, SettingError
from .modules import (are_equal, check, foreign_leaf, is_made_out_of_place, kept_buffers,
                      structure_of, without_fakes)
from .structure import Spec, Structure, describe, spec_of


class Buffer(NamedTuple):
    """A buffer of the engine's copy of a module, which a forward may read and not change."""

    name: str
    table: dict
    key: str
    value: torch.Tensor


def _are_close(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether outputs differ by no more than the order of sums may change them: an activation that
    is lost changes far more."""
    for a, b in zip(some, others):
        if a is None or b is None or not a.is_floating_point():
            if a is not b and (a is None or b is None or not are_equal(a, b)):
                return False
            continue
        a, b = a.double(), b.double()
        largest = a.nan_to_num(0.0).abs().max().item() if a.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, 1e-3, 1e-3 * largest, equal_nan=True):
            return False
    return True


def _fingerprint(tensor: torch.Tensor | None) -> tuple[str, str] | None:
    """Sum and norm, without memory of the tensor's size, as text in which NaN equals NaN. What they
    miss: permutations, and changes below their precision."""
    if tensor is None or not tensor.is_floating_point():
        return None
    tensor = tensor.detach()
    return str(tensor.sum().item()), str(torch.linalg.vector_norm(tensor).item())


def _changed(layer: str, name: str) -> str:
    return (f"layer '{layer}': its forward changes its buffer '{name}', which would change again "
            f"when the forward is recomputed, and in another order with other stages; batch norms "
            f"are the exception that gpipe counts once. Leave the change to a step of your own "
            f"between training steps")


class Layer:
    """One module of a sequence, as the engine sees it."""

    def __init__(self, name: str, module: nn.Module, ties: dict[int, str], dtype: torch.dtype):
        self.name = name
        self.original = module
        self.kind = type(module).__name__
        check(module, name)
        self.module = structure_of(module, name)
        self.stashes, self.pops, self.inside = skip.names(module)
        # Skips that are None: they are stashed and popped, and nothing is sent.
        self.absent: frozenset[str] = frozenset()
        self.takes: Structure | None = None
        self.gives: Structure | None = None
        # Positions of the model's inputs that have no sample axis, if this is its first layer.
        self.shared: set[int] = set()
        self.dtype = dtype
        self.cost: float | None = None  # measured nanoseconds
        self.parameters: list[dict] = []
        # Where each parameter is kept: a table of a module's, and a name in it.
        self.places: list[tuple[dict, str] | None] = []
        self._collect(ties)
        self.held: tuple | None = None  # until the first call
        self.is_unchecked = True  # until a call with gradients
        self.is_plain = False
        self.recurrent = [own for own in self.module.modules() if isinstance(own, nn.RNNBase)]
        self.buffers: list[Buffer] = []
        self.find_buffers({id(own["value"]) for own in self.parameters})
        self.pairs = list(zip(self.module.modules(), module.modules()))
        self.inplace = [own for own, original in self.pairs if is_made_out_of_place(original)]

    @property
    def has_skips(self) -> bool:
        """Whether the module stashes or pops."""
        return bool(self.stashes or self.pops or self.absent or self.inside)

    def _collect(self, ties: dict[int, str]) -> None:
        """Lists parameters, and the running statistics of batch norms, in the order of their
        names."""
        originals = dict(self.original.named_modules(remove_duplicate=False))
        seen: set[int] = set()
        for path, own in self.module.named_modules(remove_duplicate=False):
            original, prefix = originals[path], f"{path}." if path else ""
            if batch_norm.is_deferred(own):
                if id(own) in seen:
                    continue
                seen.add(id(own))
                batch_norm.defer(own, len(self.parameters))
                self._add_batch_norm(original, own, prefix, ties)
                continue
            for name, value in original._parameters.items():
                if value is not None:
                    self._add(prefix + name, value, (own._parameters, name), ties)

    def _add(self, name, value, place, ties, *, buffer=False, shared=True):
        self.parameters.append({
            "name": name,
            "value": value,
            "trainable": value.requires_grad,
            "buffer": buffer,
            "tie": ties.get(id(value)),
            "shared": shared,
        })
        self.places.append(place)

    def _add_batch_norm(self, original, own, prefix, ties):
        size, like = original.num_features, original.running_mean
        for name, fill in (("weight", 1.0), ("bias", 0.0)):
            value = getattr(original, name)
            if value is None:  # without affine parameters: constants that nothing trains
                constant = torch.full((size,), fill, dtype=like.dtype)
                self._add(prefix + name, constant, None, {}, shared=False)
            else:
                self._add(prefix + name, value, (own._parameters, name), ties)
        for name in ("running_mean", "running_var"):
            value = getattr(original, name)
            if value.dtype in (torch.float32, torch.float64):
                self._add(prefix + name, value, (own._buffers, name), {}, buffer=True)
            else:
                raise SettingError(f"layer '{self.name}': {prefix}{name} is {value.dtype}: keep "
                                   f"batch norms' running statistics in float32")
        batches = original.num_batches_tracked
        count = torch.tensor([float(batches) if batches is not None else 0.0], dtype=like.dtype)
        self._add(prefix + "num_batches_tracked", count, None, {}, buffer=True, shared=False)

    def described(self) -> dict:
        """What the engine is told of the layer."""
        return {"name": self.name, "call": self, "infer": self.infer,
                "parameters": self.parameters, "stashes": self.stashes, "pops": self.pops,
                "cost": self.cost}

    # Called by the engine, on a stage's thread.

    def __call__(self, parameters: tuple, inputs: tuple):
        held = self.held
        if self.is_unchecked and (held is None or torch.is_grad_enabled()):
            self.hold(parameters, inputs)
            return self.watched(inputs)
        if not all(map(operator.is_, parameters, held)):
            self.hold(parameters, inputs)
        if self.is_plain:  # one tensor to one tensor, and nothing to look after
            output = self.module(inputs[0])
            if type(output) is torch.Tensor:
                return output
            return self.flattened(output)
        if self.has_skips:
            skip.enter(self.absent, self.inside)
        takes = self.takes
        value = inputs[0] if takes.is_tensor else takes.fill(inputs)
        if not self.buffers:
            output = self.module(value)
        else:
            versions = [own.value._version for own in self.buffers]
            output = self.module(value)
            self.check_buffers(versions)
        return self.flattened(output)

    def watched(self, inputs: tuple):
        """The first call, and the first with gradients: warns if the forward changes numbers or
        strings that the module keeps, and refuses parameters that are not the layer's."""
        plain = self.is_plain
        before = self.attributes()
        buffers = [own.value.clone() for own in self.buffers]
        parameters = [_fingerprint(own) for own in self.held]
        try:
            self.is_plain = self.is_unchecked = False
            outputs = self(self.held, inputs)
            self.check_values(buffers)
            self.note_changes(parameters)
            if torch.is_grad_enabled() and not self.pops:
                self.check_leaves(outputs, inputs)
            if self.inplace and not self.has_skips:
                self.check_inplace(inputs)
            return outputs
        except BaseException:
            self.is_unchecked = True
            self.restore(buffers)
            raise
        finally:
            self.is_plain = plain
            self.is_unchecked = self.is_unchecked or not torch.is_grad_enabled()
            after = self.attributes()
            changed = [name for name, value in after.items() if before.get(name, value) != value]
            if changed:
                warnings.warn(
                    f"layer '{self.name}': its forward changes {changed[0]} from "
                    f"{before[changed[0]]!r} to {after[changed[0]]!r}. If outputs depend on it, a "
                    f"recomputation and other stages see other values: run "
                    f"gpipe.verify(model, example) to find out", stacklevel=1)

    def check_leaves(self, outputs: Any, inputs: tuple) -> None:
        """Refuses parameters that the forward uses and the engine does not know of."""
        foreign = foreign_leaf(pytree.tree_leaves(outputs), (*self.held, *inputs))
        if foreign is not None:
            raise SettingError(
                f"layer '{self.name}': its forward uses a parameter of shape "
                f"{list(foreign.shape)} that is not registered in it (in a list, a closure, or "
                f"another module's), and would get no gradient: register it, such as by "
                f"self.weight = other.weight")

    def check_inplace(self, inputs: tuple) -> None:
        """Refuses a module whose output depends on what an activation changes in place, such as one
        that calls `self.relu(x)` and goes on with `x`: activations run out of place here. One
        sample shows it."""
        modes = [(own, own.training) for own in self.module.modules()]
        samples = next((own.size(0) for at, own in enumerate(inputs)
                        if own is not None and own.dim() and at not in self.shared), 0)

        def one_sample(at: int, own: torch.Tensor | None) -> torch.Tensor | None:
            if own is None:
                return None
            has_samples = own.dim() and own.size(0) == samples and at not in self.shared
            return (own[:1] if has_samples else own).clone()

        def outputs(inplace: bool) -> list[torch.Tensor]:
            for own in self.inplace:
                own.inplace = inplace
            given = [one_sample(at, own) for at, own in enumerate(inputs)]
            value = given[0] if self.takes.is_tensor else self.takes.fill(given)
            return Structure.of(self.module(value))[1]

        try:
            # Without dropout, and without new statistics.
            for own, _ in modes:
                own.training = False
            with torch.no_grad(), kept_buffers(self.module):
                apart = outputs(False)
                # A layer that draws random numbers differs from itself.
                differs = not _are_close(apart, outputs(True)) and _are_close(apart, outputs(False))
        finally:
            for own, mode in modes:
                own.training = mode
            for own in self.inplace:
                own.inplace = False
        if differs:
            raise SettingError(
                f"layer '{self.name}': its output depends on what {type(self.inplace[0]).__name__} "
                f"(inplace=True) changes in place, and a pipeline runs activations out of place: "
                f"use what the activation returns, as in x = self.relu(x), or set inplace=False if "
                f"no change was meant")

    def attributes(self) -> dict[str, Any]:
        """What the modules keep in Python: numbers and strings, by name."""
        found = {}
        for path, own in self.module.named_modules():
            for name, value in vars(own).items():
                if type(value) in (int, float, str):
                    found[f"{path}.{name}" if path else name] = value
        return found

    def flattened(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of an output, which is nested as it was when its shapes were inferred."""
        given, tensors = Structure.of(output)
        if not given.is_same(self.gives):
            raise ModelError(
                f"its output is nested differently than when its shapes were inferred, or holds "
                f"another value that is no tensor: {describe(given)}, it was "
                f"{describe(self.gives)}")
        return tuple(tensors)

    def hold(self, parameters: tuple, inputs: tuple) -> None:
        """Puts the engine's tensors into the module."""
        for place, tensor in zip(self.places, parameters):
            if place is not None:
                table, name = place
                table[name] = tensor
        for own in self.recurrent:  # they keep a second list of their weights
            own._flat_weights = [getattr(own, name, None) for name in own._flat_weights_names]
        self.held = parameters
        here = next((own.device for own in (*parameters, *inputs) if own is not None), None)
        if here is not None and here.type != "cpu":
            self.move_buffers(here)
        self.is_plain = (self.takes.is_tensor and self.gives.is_tensor
                         and not self.buffers and not self.has_skips)

    def move_buffers(self, device: torch.device) -> None:
        """Moves the buffers of the engine's copy of the module to its stage's device."""
        for own in self.module.modules():
            for name, buffer in own._buffers.items():
                if buffer is not None and buffer.device != device:
                    own._buffers[name] = buffer.to(device)
        self.find_buffers({id(value) for value in self.held})

    def find_buffers(self, known: set[int]) -> None:
        """Lists the buffers that the engine does not know: those that are not `known`, by id."""
        self.buffers = [
            Buffer(f"{path}.{name}" if path else name, own._buffers, name, value)
            for path, own in self.module.named_modules() for name, value in own._buffers.items()
            if value is not None and id(value) not in known
        ]

    def device(self) -> torch.device:
        """Where the module's tensors are: at first on the CPU, later on its stage's device."""
        for own in (*self.module.parameters(), *self.module.buffers()):
            return own.device
        return torch.device("cpu")

    def check_buffers(self, versions: list[int]) -> None:
        """Refuses a forward that has changed a buffer in place, or given it another value."""
        for own, version in zip(self.buffers, versions):
            now = own.table.get(own.key)
            if now is not own.value:
                own.table[own.key] = own.value
                # Its own value in another dtype, say, is no change.
                if now is None or not are_equal(own.value, now):
                    raise SettingError(_changed(self.name, own.name))
            if own.value._version != version:
                raise SettingError(_changed(self.name, own.name))

    def check_values(self, before: list[torch.Tensor]) -> None:
        """As `check_buffers`, for a change through `.data`, which raises no version."""
        for own, value in zip(self.buffers, before):
            if not are_equal(own.value, value):
                raise SettingError(_changed(self.name, own.name))

    def restore(self, before: list[torch.Tensor]) -> None:
        """Gives buffers the values back that a failed forward has changed."""
        for own, value in zip(self.buffers, before):
            if not are_equal(own.value, value):
                own.value.data.copy_(value)

    def note_changes(self, before: list) -> None:
        """Raises the version of parameters that have changed through `.data`, which raises none.
        The engine refuses a forward that has changed a parameter."""
        for tensor, own in zip(self.held, before):
            if tensor is not None and _fingerprint(tensor) != own:
                torch.autograd.graph.increment_version(tensor)

    # Called by the engine once for each shape.

    def infer(self, inputs: list[Spec], popped: list[Spec]) -> tuple[list[Spec], list[Spec]]:
        """The specs of the outputs and of the stashed skips."""
        # PyTorch logs what it then raises.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, log.disabled = log.disabled, True
        try:
            with without_fakes(self.module):
                outputs, stashed = self._infer_fake(inputs, popped)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            # Code that looks at values cannot run on shapes alone. A real error comes again.
            try:
                outputs, stashed = self._infer_small(inputs, popped)
            except Exception as again:
                if isinstance(again, type(error)):
                    raise again from None
                raise again from error
        finally:
            log.disabled = was_disabled
        return outputs, stashed

    def _infer_fake(self, inputs, popped):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            device = self.device()

            def made(specs):
                return [torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                        for shape, dtype in specs]

            values = {}
            for own in self.module.modules():
                for table in (own._parameters, own._buffers):
                    for name, value in table.items():
                        if value is not None:
                            values[id(table), name] = (table, name, value)
            fakes = {key: mode.from_tensor(value.detach())
                     for key, (_, _, value) in values.items()}
            if self.dtype in (torch.bfloat16, torch.float16):
                fakes = {key: fake.to(self.dtype) if fake.dtype == torch.float32 else fake
                         for key, fake in fakes.items()}
            try:
                for key, (table, name, _) in values.items():
                    table[name] = fakes[key]
                for own in self.recurrent:
                    own._flat_weights = [getattr(own, n, None) for n in own._flat_weights_names]
                return self._run(made(inputs), made(popped))
            finally:
                for table, name, value in values.values():
                    table[name] = value
                for own in self.recurrent:
                    own._flat_weights = [getattr(own, n, None) for n in own._flat_weights_names]

    def _infer_small(self, inputs, popped):
        """Runs the module with one sample and with two, on zeros, and extends the sizes."""
        samples = next((shape[0] for at, (shape, _) in enumerate(inputs)
                        if shape and at not in self.shared), 0)
        device, found = self.device(), []
        for count in (1, 2):
            def made(specs, whole=frozenset()):
                return [torch.zeros(
                            [count, *shape[1:]] if shape and shape[0] == samples
                            and at not in whole else shape,
                            dtype=getattr(torch, dtype), device=device)
                        for at, (shape, dtype) in enumerate(specs)]

            with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_buffers(self.module):
                found.append(self._run(made(inputs, self.shared), made(popped)))

        def extended(one: Spec, two: Spec) -> Spec:
            shape = [a if a == b else (b - a) * (samples - 1) + a for a, b in zip(one[0], two[0])]
            return shape, one[1]

        (outputs, stashed), (outputs_of_2, stashed_of_2) = found
        return ([extended(*pair) for pair in zip(outputs, outputs_of_2)],
                [extended(*pair) for pair in zip(stashed, stashed_of_2)])

    def _run(self, inputs, popped):
        with skip.Recorder(dict(zip(self.pops, popped))) as recorder:
            output = self.module(self.takes.fill(inputs))
        given, tensors = Structure.of(output)
        if not tensors:
            raise TypeError(f"layer '{self.name}' ({self.kind}) gives no tensor, but "
                            f"{type(output).__name__}: the next layer would have no input")
        if self.gives is None:
            self.gives = given
        stashed = dict(recorder.stashed)
        self.stashes = [name for name in self.stashes if stashed.get(name) is not None]
        return ([spec_of(own) for own in tensors],
                [spec_of(stashed[name]) for name in self.stashes if name in stashed])


def cast_buffers(layer: Layer, dtype: torch.dtype) -> None:
    """Casts floating-point buffers, as `module.to(dtype)` would, in the engine's copy."""
    deferred = {id(buffer) for own in layer.module.modules() if batch_norm.is_deferred(own)
                for buffer in own._buffers.values() if buffer is not None}
    for own in layer.module.modules():
        for name, buffer in own._buffers.items():
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in deferred:
                own._buffers[name] = buffer.to(dtype)
    layer.find_buffers({id(own["value"]) for own in layer.parameters} | deferred)
