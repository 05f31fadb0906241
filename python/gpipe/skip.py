"""Long skips: a tensor that goes from one layer to a later one, past those between.

    nn.Sequential(
        nn.Linear(8, 8), Stash("early"), nn.Linear(8, 8), nn.ReLU(), Pop("early"), nn.Linear(8, 1),
    )

The tensor goes to the stage of its `Pop` directly, whatever stages lie between.
"""

import threading
from collections.abc import Callable

import torch
from torch import nn

from . import _gpipe

# The skips of a module that runs outside of a pipeline, such as for comparison.
_outside: dict[str, torch.Tensor] = {}


class Stash(nn.Module):
    """Keeps its input under `name` for the `Pop` of that name, and passes it on unchanged."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"Stash({self.name!r}) takes one tensor, it got {type(x).__name__}")
        keep(self.name, x)
        return x

    def skip_names(self) -> tuple[list[str], list[str]]:
        """What it stashes, and what it pops."""
        return [self.name], []

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Combines its input with what was stashed under `name`.

    `combine(x, skip)` gives the output. Without it the two are added.
    """

    def __init__(self, name: str, combine: Callable[..., torch.Tensor] | None = None):
        super().__init__()
        self.name = name
        self.combine = combine

    def forward(self, x):
        skip = take(self.name)
        return x + skip if self.combine is None else self.combine(x, skip)

    def skip_names(self) -> tuple[list[str], list[str]]:
        """What it stashes, and what it pops."""
        return [], [self.name]

    def extra_repr(self) -> str:
        return repr(self.name)


def keep(name: str, x: torch.Tensor | None) -> None:
    """Stashes a tensor, or None, on this thread."""
    recorder = _recorder()
    if recorder is not None:
        recorder.stashed.append((name, x))
    elif _gpipe.in_layer() and name in _threads.inside:
        _threads.kept[name] = x
    elif _gpipe.in_layer():
        if x is not None:
            _gpipe.stash(name, x)
    else:
        _outside[name] = x


def take(name: str) -> torch.Tensor | None:
    """Pops a tensor, or None, on this thread."""
    recorder = _recorder()
    if recorder is not None:
        return recorder.popped.get(name, dict(recorder.stashed).get(name))
    if _gpipe.in_layer() and name in _threads.inside:
        return _threads.kept.pop(name)
    if _gpipe.in_layer():
        return None if name in _threads.absent else _gpipe.pop(name)
    if name not in _outside:
        raise KeyError(f"no earlier layer stashes {name!r}")
    return _outside.pop(name)


class Recorder:
    """While it is entered, this thread's stashes and pops go through it, to infer shapes."""

    def __init__(self, popped: dict[str, torch.Tensor]):
        self.popped = popped
        self.stashed: list[tuple[str, torch.Tensor]] = []

    def __enter__(self):
        _threads.recorders.append(self)
        return self

    def __exit__(self, *_):
        _threads.recorders.pop()


class _Threads(threading.local):
    def __init__(self):
        self.recorders: list[Recorder] = []
        self.absent: frozenset[str] = frozenset()
        self.inside: frozenset[str] = frozenset()
        self.kept: dict[str, torch.Tensor | None] = {}


_threads = _Threads()


def enter(absent: frozenset[str], inside: frozenset[str]) -> None:
    """Before a layer runs on this thread: its pops of the names `absent` give None, and it stashes
    and pops the names `inside` itself."""
    _threads.absent, _threads.inside = absent, inside
    _threads.kept.clear()


def _recorder() -> Recorder | None:
    return _threads.recorders[-1] if _threads.recorders else None


def names(module: nn.Module) -> tuple[list[str], list[str], frozenset[str]]:
    """The names that a module stashes for later layers, and those that it pops from earlier ones,
    in the order of its submodules; and those that it both stashes and pops."""
    stashed, popped = [], []
    for own in module.modules():
        if hasattr(own, "skip_names"):
            first, second = own.skip_names()
            stashed += first
            popped += second
    inside = frozenset(stashed) & frozenset(popped)
    return ([own for own in stashed if own not in inside],
            [own for own in popped if own not in inside], inside)
