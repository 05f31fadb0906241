"""torchgpipe's `skip`: `@skippable` modules that yield `stash` and `pop`.

New code is shorter with `gpipe.skip.Stash` and `gpipe.skip.Pop`.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import nn

from .. import skip as skips

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]


class Namespace:
    """Keeps skips of equal names apart (`Skippable.isolate`)."""

    _numbers = itertools.count(1)

    def __init__(self):
        self.number = next(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class stash:
    """`yield stash(name, tensor)` sends a tensor, or None, to the module that pops it."""

    def __init__(self, name: str, tensor: torch.Tensor | None):
        self.name, self.tensor = name, tensor


class pop:
    """`tensor = yield pop(name)` takes what an earlier module stashed."""

    def __init__(self, name: str):
        self.name = name


class Skippable(nn.Module):
    """A module made by `skippable`."""

    module_cls: type[nn.Module]
    stashable_names: frozenset[str]
    poppable_names: frozenset[str]

    def __init__(self, *args: Any, **settings: Any):
        super().__init__()
        self.module = self.module_cls(*args, **settings)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Puts the module's skips, or some of them, into a namespace."""
        names = self.stashable_names | self.poppable_names if only is None else set(only)
        self.namespaces.update({name: ns for name in names})
        return self

    def full(self, name: str) -> str:
        """The name of a skip, with its namespace."""
        namespace = self.namespaces.get(name)
        return name if namespace is None else f"{name}@{namespace.number}"

    def skip_names(self) -> tuple[list[str], list[str]]:
        """Full names of what it stashes and pops."""
        return (sorted(map(self.full, self.stashable_names)),
                sorted(map(self.full, self.poppable_names)))

    def forward(self, input: Any) -> Any:
        generator = self.module(input)
        if not isinstance(generator, Generator):
            return generator
        to_pop = {name: skips.take(self.full(name)) for name in sorted(self.poppable_names)}
        stashed: dict[str, torch.Tensor | None] = {}
        try:
            command = next(generator)
            while True:
                if isinstance(command, stash):
                    if command.name not in self.stashable_names:
                        raise RuntimeError(f"'{command.name}' has not been declared as stashable")
                    stashed[command.name] = command.tensor
                    command = next(generator)
                elif isinstance(command, pop):
                    if command.name not in self.poppable_names:
                        raise RuntimeError(f"'{command.name}' has not been declared as poppable")
                    command = generator.send(to_pop.pop(command.name))
                else:
                    raise TypeError(f"{command!r} is not a command from @skippable")
        except StopIteration as stop:
            output = stop.value
        missing = sorted(self.stashable_names - stashed.keys())
        if missing:
            raise RuntimeError(f"{', '.join(map(repr, missing))} must be stashed but have not")
        if to_pop:
            raise RuntimeError(f"{', '.join(map(repr, to_pop))} must be popped but have not")
        for name in sorted(stashed):
            skips.keep(self.full(name), stashed[name])
        return output


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()):
    """Decorates a module class whose forward yields `stash` and `pop` of the declared names."""
    stashed, popped = frozenset(stash), frozenset(pop)

    def extend(module_cls: type[nn.Module]) -> type[Skippable]:
        return type(module_cls.__name__, (Skippable,),
                    {"module_cls": module_cls, "stashable_names": stashed,
                     "poppable_names": popped})

    return extend


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip is stashed once and popped once, later.

    Raises TypeError with all that is wrong.
    """
    stashed: set[str] = set()
    popped: set[str] = set()
    wrong: list[str] = []
    for name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        for own in sorted(layer.stashable_names & layer.poppable_names):
            wrong.append(f"'{name}' declared '{own}' both as stashable and as poppable")
        both = layer.stashable_names & layer.poppable_names
        for own in sorted(layer.stashable_names - both):
            if layer.full(own) in stashed:
                wrong.append(f"'{name}' redeclared '{own}' as stashable but not isolated by "
                             f"namespace")
            stashed.add(layer.full(own))
        for own in sorted(layer.poppable_names - both):
            full = layer.full(own)
            if full in popped:
                wrong.append(
                    f"'{name}' redeclared '{own}' as poppable but not isolated by namespace")
            elif full not in stashed:
                wrong.append(f"'{name}' declared '{own}' as poppable but it was not stashed")
            popped.add(full)
    for own in sorted(stashed - popped):
        wrong.append(f"no module declared '{own}' as poppable but stashed")
    if wrong:
        raise TypeError("one or more pairs of stash and pop do not match:\n\n"
                        + "\n".join(f"* {text}" for text in wrong))
