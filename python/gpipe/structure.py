"""How tensors are nested in what layers hand on, and their shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

Spec = tuple[list[int], str]


def spec_of(tensor: torch.Tensor) -> Spec:
    """Shape and dtype of a tensor, as the engine takes them."""
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class Structure:
    """How tensors are nested in what one layer hands to the next: tuples, lists, dictionaries, and
    values that are no tensors, which must be the same in every call."""

    def __init__(self, tree: pytree.TreeSpec, constants: list[tuple[int, Any]]):
        self.tree = tree
        self.constants = constants
        self.is_tensor = tree.is_leaf() and not constants

    @classmethod
    def of(cls, value: Any) -> tuple[Structure, list[torch.Tensor]]:
        """The structure of a value, and its tensors."""
        leaves, tree = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [(at, leaf) for at, leaf in enumerate(leaves)
                     if not isinstance(leaf, torch.Tensor)]
        return cls(tree, constants), tensors

    def fill(self, tensors) -> Any:
        """The value with these tensors."""
        if self.is_tensor:
            return tensors[0]
        leaves = list(tensors)
        for at, constant in self.constants:
            leaves.insert(at, constant)
        return pytree.tree_unflatten(leaves, self.tree)

    def is_same(self, other: Structure) -> bool:
        if self.tree != other.tree or len(self.constants) != len(other.constants):
            return False
        pairs = zip(self.constants, other.constants)
        return all(a[0] == b[0] and _is_equal(a[1], b[1]) for a, b in pairs)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are the same, NaN and arrays of NumPy included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return a is b or bool(a == b) or (a != a and b != b)


def usable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, without those of `torch.inference_mode`, which other threads cannot use."""
    if not any(own.is_inference() for own in tensors):
        return tensors
    with torch.inference_mode(False):
        return [own.clone() if own.is_inference() else own for own in tensors]


def describe(structure: Structure) -> str:
    """A structure in Python's notation, with `Tensor` for each tensor."""
    leaves: list[Any] = ["Tensor"] * (structure.tree.num_leaves - len(structure.constants))
    for at, constant in structure.constants:
        shown = repr(constant)
        # A NumPy array, say, is not shown whole.
        leaves.insert(at, constant if len(shown) < 40 else type(constant).__name__)
    return repr(pytree.tree_unflatten(leaves, structure.tree)).replace("'Tensor'", "Tensor")
