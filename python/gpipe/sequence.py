"""A model that is no `nn.Sequential`, as the sequence of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .errors import SettingError


class Sequence(nn.Module):
    """Modules that run one after the other, under the names that they have in their model.

    It has the model's own parameters, so training it trains the model, and `model.state_dict()`
    keeps its names. Made by `gpipe.sequence`.
    """

    def __init__(self, model: nn.Module, layers: list[tuple[str, nn.Module]]):
        super().__init__()
        # Not registered under names of its own: names are the model's.
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "layers", layers)
        for at, (_, module) in enumerate(layers):
            self._modules[str(at)] = module

    @property
    def training(self) -> bool:
        """The model's mode."""
        model = self.__dict__.get("model")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def train(self, mode: bool = True) -> Sequence:
        self.model.train(mode)
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        for _, module in self.layers:
            x = module(x)
        return x

    def state_dict(self, *args, **settings):
        self._check_names()
        return self.model.state_dict(*args, **settings)

    def load_state_dict(self, *args, **settings):
        self._check_names()
        return self.model.load_state_dict(*args, **settings)

    def _check_names(self) -> None:
        """Refuses to leave out parameters of parts that are not the model's."""
        own = {id(value) for value in self.model.parameters()}
        for name, module in self.layers:
            if any(id(value) not in own for value in module.parameters()):
                raise SettingError(f"part '{name}' has parameters that are not the model's, so the "
                                   f"model's state_dict has none of them: make it a module of the "
                                   f"model, or save {type(module).__name__}.state_dict() itself")


Part = str | tuple[str, nn.Module] | nn.Module


def sequence(model: nn.Module, parts: Iterable[Part]) -> Sequence:
    """The sequence of a model's parts, in the order of the call.

    A part is the name of a module of the model, such as `"embed"`; `"layers.*"` stands for all
    children of `layers`, in their order. What lies between them and is no module of the model (a
    reshape, a mask) is given as a module itself, or as `(name, module)`. Each part takes what the
    part before returned.

        gpipe.sequence(model, ["embed", "layers.*", "norm", nn.Flatten(), "head"])

    Raises SettingError if a name is none of the model's, or if trained parameters of the model are
    in no part.
    """
    layers: list[tuple[str, nn.Module]] = []
    for part in parts:
        if isinstance(part, nn.Module):
            layers.append((f"between_{len(layers)}", part))
        elif isinstance(part, tuple) and len(part) == 2:
            layers.append(part)
        elif not isinstance(part, str):
            raise SettingError(f"part {part!r}: give the name of a module, a module, or (name, "
                               f"module); a function goes into a module of your own")
        elif part.endswith(".*"):
            parent = _module(model, part[:-2])
            # `named_children` would leave out a module's second use.
            children = [(name, own) for name, own in parent._modules.items() if own is not None]
            if not children:
                raise SettingError(f"'{part}': {type(parent).__name__} has no children")
            layers.extend((f"{part[:-2]}.{name}", child) for name, child in children)
        else:
            found = _module(model, part)
            if isinstance(found, (nn.ModuleList, nn.ModuleDict)):
                raise SettingError(f"'{part}' is a {type(found).__name__}, which has no forward: "
                                   f"'{part}.*' stands for its children")
            layers.append((part, found))
    if not layers:
        raise SettingError("a sequence needs at least one part")
    inside = {id(own) for _, module in layers for own in module.parameters()}
    left = [name for name, own in model.named_parameters()
            if own.requires_grad and id(own) not in inside]
    if left:
        more = f" and {len(left) - 1} more" if left[1:] else ""
        raise SettingError(
            f"in no part of the sequence: '{left[0]}'{more}. It would not be trained. Name the "
            f"module that has it; give what the model itself has (model.pos) to a module of your "
            f"own; or freeze it with requires_grad_(False)")
    return Sequence(model, layers)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(own for own, _ in model.named_children())
        raise SettingError(f"the model has no module '{name}'; it has {known}") from None


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model that is a sequence.

    Raises SettingError for another model, with the way to make it one.
    """
    if isinstance(model, (Sequence, nn.Sequential)):
        hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks,
                 model._backward_pre_hooks)
        if any(hooks) or "forward" in vars(model):
            raise SettingError("the model itself has hooks, or a forward of its own, which a "
                               "pipeline would not call: put them on its layers")
    if isinstance(model, Sequence):
        return list(model.layers)
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise SettingError(
                f"{type(model).__name__} has a forward of its own, so it is no plain sequence: "
                + _remedy(model))
        return list(model._modules.items())
    raise SettingError(f"{type(model).__name__} is no nn.Sequential: " + _remedy(model))


def _remedy(model: nn.Module) -> str:
    parts = []
    for name, child in model.named_children():
        many = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 0
        parts.append(f'"{name}.*"' if many else f'"{name}"')
    shown = ", ".join(parts[:8]) + (", ..." if len(parts) > 8 else "")
    return (f"say in which order its parts run, such as gpipe.sequence(model, [{shown}]), where "
            f"each part takes one argument, what the part before returned. A module of your own, "
            f"given in the list, does what the model does between them")
