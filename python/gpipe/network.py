"""The user's model as a network of the engine's layers, and the tensors that the two share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import batch_norm
from .checks import DTYPES
from .errors import CheckpointError, SettingError
from .layer import Layer, cast_buffers
from .sequence import layers_of
from .structure import Spec, Structure, describe, spec_of, usable


class Network:
    """The layers of a module, how values are nested between them, and the module's tensors.

    Args:
        module: a sequence of layers.
        example: a mini-batch's inputs.
        dtype: of the arithmetic.
        can_share: whether a stage may update the module's own tensors: it runs on the CPU.
        shared: positions of the inputs that have no sample axis.
    """

    def __init__(self, module: nn.Module, example: Any, dtype: torch.dtype, *, can_share: bool,
                 shared: Sequence[int] = ()):
        self.shared = set(shared)
        self.module = module
        self.dtype = dtype
        self.master = torch.float64 if dtype == torch.float64 else torch.float32
        self.layers = self._make_layers()
        self.layers[0].shared = self.shared
        for layer in self.layers:
            for own in layer.parameters:
                self._share_or_copy(layer.name, own, can_share)
            if self.is_reduced:
                cast_buffers(layer, dtype)
        self.tensors = Tensors(self.layers)
        self.takes, self.example = Structure.of(example)
        if not self.example:
            raise SettingError(f"example {example!r} holds no tensor: give a mini-batch's inputs")
        self.inputs = [spec_of(own) for own in self.example]
        self.samples = self.samples_of(self.example)
        self.gives, self.outputs = self._infer()

    @property
    def is_reduced(self) -> bool:
        """Whether layers compute in copies of the parameters with fewer bits."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def has_copies(self) -> bool:
        """Whether stages keep copies of tensors that they share: ties, and those of fewer bits."""
        return self.is_reduced or any(own.is_tied for own in self.tensors)

    def part(self, samples: int) -> list[torch.Tensor]:
        """The example's first samples. Inputs without a sample axis stay whole."""
        return [own if at in self.shared else own[:samples] for at, own in enumerate(self.example)]

    def samples_of(self, tensors: list[torch.Tensor]) -> int:
        """The number of samples of a mini-batch: the first size of its first input with samples."""
        own = next((own for at, own in enumerate(tensors) if at not in self.shared), tensors[0])
        return own.size(0) if own.dim() else 0

    def flat(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a mini-batch's inputs, which are nested like the example."""
        given, tensors = Structure.of(value)
        if not given.is_same(self.takes):
            raise SettingError(f"the input is {describe(given)}, the example was "
                               f"{describe(self.takes)}")
        return usable(tensors)

    def nested(self, tensors: Iterable[torch.Tensor], inputs: list[torch.Tensor],
               micro_batches: int) -> Any:
        """Outputs for these inputs, nested as the last layer gives them. Those of the
        micro-batches, of which there are at most `micro_batches`, were put together along the first
        axis."""
        tensors, samples = list(tensors), self.samples_of(inputs)
        if min(samples, micro_batches) > 1:
            # The first axis may also depend on the other axes of the inputs.
            is_like = all(list(own.shape[1:]) == shape[1:]
                          for own, (shape, _) in zip(inputs, self.inputs))
            for (shape, _), own in zip(self.outputs, tensors):
                if shape and not self._has_samples(shape[0], own.size(0), samples, is_like):
                    raise SettingError(
                        f"an output of shape {shape} has no sample axis, so those of the "
                        f"micro-batches cannot be put together: give it a first axis of samples, "
                        f"or use it in a loss")
        return self.gives.fill(tensors)

    def _has_samples(self, of_example: int, size: int, samples: int, is_like: bool) -> bool:
        """Whether an axis of size `of_example` for the example, and of `size` for this number of
        samples, is one of samples. `is_like`: the inputs differ in the number of samples alone."""
        each, rest = divmod(of_example, max(1, self.samples))
        return rest == 0 and (size == each * samples if is_like else size % samples == 0)

    def is_training(self) -> bool:
        """Whether one of the module's parts is in training mode."""
        return any(own.training for layer in self.layers for _, own in layer.pairs)

    def set_mode(self, training: bool) -> None:
        """Gives the layers the modes of the user's module, or evaluation mode."""
        for layer in self.layers:
            for own, original in layer.pairs:
                own.training = training and original.training

    def modes(self) -> list[bool]:
        """Whether each part of each layer is in training mode."""
        return [own.training for layer in self.layers for own, _ in layer.pairs]

    def set_modes(self, modes: list[bool]) -> None:
        """Gives the layers the modes that `modes` found."""
        parts = [own for layer in self.layers for own, _ in layer.pairs]
        for own, training in zip(parts, modes):
            own.training = training

    def check_plain(self) -> None:
        """Refuses values between layers that are neither tensors nor tuples of tensors."""
        for layer in self.layers:
            for _, value in layer.gives.constants:
                raise TypeError(f"layer '{layer.name}': expected Tensor in its output, but got "
                                f"{type(value).__name__}")

    def _make_layers(self) -> list[Layer]:
        named = layers_of(self.module)
        if not named:
            raise SettingError("the model has no layers")
        ties = _ties(named)
        layers, names = [], set()
        for name, module in named:
            if name in names:
                raise SettingError(f"two layers are named '{name}': in gpipe.sequence, give one of "
                                   f"them another name, as (name, module)")
            names.add(name)
            if not isinstance(module, nn.Module):
                raise SettingError(f"layer '{name}' is {type(module).__name__}, no nn.Module")
            layers.append(Layer(name, module, ties, self.dtype))
        for layer in layers:
            for own in layer.parameters:
                if own["value"].device.type == "meta":
                    raise SettingError(f"'{layer.name}.{own['name']}' has no values (meta device): "
                                       f"load the model before you make the pipeline")
                if own["value"].is_inference():
                    raise SettingError(f"'{layer.name}.{own['name']}' was made in "
                                       f"torch.inference_mode(): make the model outside of it")
        _check_norms(layers)
        _check_storage(layers)
        return layers

    def _share_or_copy(self, layer: str, own: dict, can_share: bool) -> None:
        """Decides whether the module's tensor can be the engine's parameter."""
        value = own["value"]
        if value.dtype not in DTYPES:
            raise SettingError(f"parameter '{layer}.{own['name']}' is {value.dtype}: gpipe trains "
                               f"floating point; make it a buffer")
        fits = value.dtype == self.master and value.device.type == "cpu" and value.is_contiguous()
        if not (own["shared"] and fits and can_share):
            own["shared"] = False
        # The engine's tensor is another one with the same memory, without the user's hooks.
        own["value"] = value.detach().to("cpu", self.master).contiguous()

    def _infer(self) -> tuple[Structure, list[Spec]]:
        """Finds how each layer's output is nested. Returns that of the last, and its specs."""
        takes, specs = self.takes, self.inputs
        skips: dict[str, Spec] = {}
        declared: set[str] = set()
        for layer in self.layers:
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
        return takes, specs


class ModuleTensor:
    """A parameter or running statistic of the user's module."""

    def __init__(self, tensor: torch.Tensor, described: dict):
        self.names: list[str] = []
        """The engine's name of each of its uses. The first is the tensor's own."""
        self.places: list[tuple[dict, str]] = []
        """Where the module keeps it for each use: a table of a module's, and a name in it."""
        self.tensor = tensor
        self.is_buffer: bool = described["buffer"]
        self.is_copied: bool = not described["shared"]
        self.is_tied: bool = described["tie"] is not None
        self.is_trained: bool = tensor.requires_grad
        """Whether the engine trains it. It does not hear of `requires_grad_` by itself."""
        self.shape: list[int] = list(described["value"].shape)
        self.address = self.tensor.data_ptr()
        self.remember()

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.names[0]

    @property
    def is_stale(self) -> bool:
        """Whether it lags behind the engine's copy, until `Pipeline.sync`."""
        return self.is_copied and not self.is_counter

    @property
    def is_counter(self) -> bool:
        """Whether it counts mini-batches: an integer that the engine keeps as a number of its own.
        """
        return not self.tensor.is_floating_point()

    def remember(self) -> None:
        """Later changes are the user's."""
        self.version = self.tensor._version

    def is_changed(self) -> bool:
        """Whether the user has changed its values."""
        return self.tensor._version != self.version

    def replaced(self) -> str | None:
        """The engine's name of a use for which the module has another tensor now, or the tensor
        other memory."""
        has_moved = self.tensor.data_ptr() != self.address
        return next((name for name, (table, key) in zip(self.names, self.places)
                     if has_moved or table.get(key) is not self.tensor), None)

    def read(self, engines: torch.Tensor) -> torch.Tensor:
        """Its values, as the engine takes them. Where they are the engine's, but for rounding, the
        engine's own remain."""
        value = self.tensor.detach().to("cpu").reshape(self.shape)
        same = value == engines.to(value.dtype)
        return torch.where(same, engines, value.to(engines.dtype)).contiguous()

    def write(self, value: torch.Tensor) -> None:
        """Writes the engine's values into it. Where they are there already, nothing is changed, so
        that other pipelines over the module see no change."""
        value = value.reshape(self.tensor.shape).to(self.tensor)
        if not torch.equal(self.tensor, value):
            self.tensor.copy_(value)
            self.remember()


class OtherBuffer:
    """A buffer of the user's module that the engine does not know. The pipeline's copy of the
    module has it, or a copy of it."""

    def __init__(self, name: str, module: nn.Module, copies: dict, key: str):
        self.name, self.table, self.copies, self.key = name, module._buffers, copies, key
        self.value: torch.Tensor = module._buffers[key]
        self.is_persistent = key not in module._non_persistent_buffers_set
        self.version = self.value._version

    @property
    def is_shared(self) -> bool:
        """Whether the pipeline's copy of the module has the same tensor. A stage on a GPU gets one
        of its own with its first call."""
        return self.copies.get(self.key) is self.value

    def is_changed(self) -> bool:
        """Whether the user has changed it, and the pipeline's copy has not changed with it."""
        if self.is_shared:
            self.version = self.value._version  # a copy that is made later has this value
        is_kept = self.value._version == self.version
        return not (self.table.get(self.key) is self.value and is_kept)

    def write(self, value: torch.Tensor) -> None:
        """Writes a value into it, and into the pipeline's copy."""
        with torch.no_grad():
            self.value.copy_(value)
            if not self.is_shared:
                self.copies[self.key].copy_(value)
        self.version = self.value._version


class Tensors(list[ModuleTensor]):
    """The module's own tensors that the engine trains or keeps, each once."""

    def __init__(self, layers: list[Layer]):
        found: dict[int, ModuleTensor] = {}
        for layer in layers:
            originals = dict(layer.original.named_modules(remove_duplicate=False))
            for own in layer.parameters:
                path, _, key = own["name"].rpartition(".")
                module = originals[path]
                table = module._parameters if key in module._parameters else module._buffers
                if table.get(key) is None:
                    continue
                name = f"{layer.name}.{own['name']}"
                if "*" in name:
                    raise SettingError(f"'{name}' has a * in its name, which stands for any text "
                                       f"where gpipe selects parameters: name the module otherwise")
                tensor = table[key]
                module_tensor = found.setdefault(id(tensor), ModuleTensor(tensor, own))
                module_tensor.names.append(name)
                module_tensor.places.append((table, key))
        super().__init__(found.values())
        self.others = [
            OtherBuffer(f"{layer.name}.{path}.{key}" if path else f"{layer.name}.{key}", original,
                        own._buffers, key)
            for layer in layers
            for (path, original), own in zip(layer.original.named_modules(), layer.module.modules())
            for key, value in original._buffers.items()
            if value is not None and id(value) not in found
        ]

    def names(self) -> dict[int, str]:
        """The engine's name of each tensor, by the tensor's `id`."""
        return {id(own.tensor): own.name for own in self}

    def trained(self) -> set[str]:
        """Names of the parameters that require gradients."""
        return {own.name for own in self if own.tensor.requires_grad}

    def check_replaced(self) -> None:
        """Refuses tensors that are not those that the pipeline was made with."""
        for own in self:
            name = own.replaced()
            if name is not None:
                raise SettingError(
                    f"'{name}' is not the tensor, or has not the memory, that it had when the "
                    f"pipeline was made (model.to(...), p.data = ..., another nn.Parameter): make "
                    f"a new pipeline")
        for own in self.others:
            if own.is_changed():
                raise SettingError(f"the buffer '{own.name}' has changed since the pipeline was "
                                   f"made, which has a copy of it: make a new pipeline")

    def buffers(self) -> dict[str, torch.Tensor]:
        """Values of the buffers of the user's own that belong to the module's state."""
        return {own.name: own.value.detach().cpu().clone() for own in self.others
                if own.is_persistent}

    def check_buffers(self, values: dict[str, torch.Tensor]) -> None:
        """Refuses values that are not those of the module's buffers."""
        for name, own in self.buffers().items():
            if name not in values:
                raise CheckpointError(f"it has no buffer '{name}'")
            if values[name].shape != own.shape:
                raise CheckpointError(f"the buffer '{name}' is {list(own.shape)}, the "
                                      f"checkpoint's {list(values[name].shape)}")

    def set_buffers(self, values: dict[str, torch.Tensor]) -> None:
        """Gives the buffers of the user's own these values."""
        for own in self.others:
            if own.is_persistent:
                own.write(values[own.name])

    def check_hooks(self) -> None:
        """Refuses hooks of parameters that only a backward of autograd's would call."""
        for own in self:
            if own.tensor._backward_hooks or own.tensor._post_accumulate_grad_hooks:
                raise SettingError(
                    f"'{own.name}' has a gradient hook, which the stages do not call: remove it, "
                    f"or compute the gradients by a backward of your own, from pipe(x)")

    def remember(self) -> None:
        """Later changes of the tensors are the user's."""
        for own in self:
            own.remember()

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Writes the engine's values, by name, into the tensors."""
        with torch.no_grad():
            for own in self:
                if own.name in values:
                    own.write(values[own.name])

    def add_gradients(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adds gradients to the parameters', as autograd does."""
        by_name = {own.name: own.tensor for own in self}
        with torch.no_grad():
            for name, gradient in gradients:
                tensor = by_name[name]
                gradient = gradient.to(tensor.device, tensor.dtype)
                if tensor.grad is None:
                    tensor.grad = gradient
                else:
                    tensor.grad.add_(gradient)


def _ties(named: list[tuple[str, nn.Module]]) -> dict[int, str]:
    """A name for each parameter that is used more than once."""
    uses: dict[int, list[str]] = {}
    for layer, module in named:
        if not isinstance(module, nn.Module):
            continue
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
