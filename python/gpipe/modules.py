"""The user's modules: those that a pipeline refuses, a copy of their structure, and what a run of
them leaves behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from . import batch_norm
from .errors import ModelError, SettingError


def check(module: nn.Module, name: str) -> None:
    """Refuses modules that a pipeline cannot run exactly, and says why."""
    for path, own in module.named_modules():
        where = f"layer '{name}'" + (f", module '{path}'" if path else "")
        compiled = type(own).__name__ == "OptimizedModule" or own._compiled_call_impl is not None
        if compiled:
            raise SettingError(
                f"{where} is compiled (torch.compile): compiled code draws random numbers where "
                f"gpipe cannot key them, so results would depend on the stages. Give the module as "
                f"it was before torch.compile")
        if isinstance(own, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise SettingError(
                f"{where} is {type(own).__name__}: give the module inside it (.module), and start "
                f"several processes with torchrun")
        if isinstance(own, torch.jit.ScriptModule):
            raise SettingError(f"{where} is a TorchScript module: give the module as it was before "
                               f"torch.jit")
        is_embedding = isinstance(own, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and own.max_norm is not None:
            raise SettingError(f"{where} has max_norm, which changes the weights in the forward: a "
                               f"recomputation would see others. Make it without max_norm")
        if is_embedding and own.sparse:
            raise SettingError(f"{where} has sparse gradients: make it with sparse=False")
        if isinstance(own, nn.modules.lazy.LazyModuleMixin) and own.has_uninitialized_params():
            raise SettingError(f"{where} ({type(own).__name__}) has no parameters yet: call the "
                               f"model once before you make the pipeline")
        batch_norm.check(own, name)
    if _is_time_first(module):
        raise SettingError(
            f"layer '{name}' ({type(module).__name__}) has batch_first=False: the first axis of "
            f"its input is time, which would be cut into micro-batches. Make it with "
            f"batch_first=True")


def _is_time_first(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's that take the time as their first axis."""
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        module = module.layers[0]
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    is_own = isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer))
    return is_own and not module.batch_first


def foreign_leaf(outputs: list[Any], known: Iterable[torch.Tensor]) -> nn.Parameter | None:
    """A parameter that gradients of `outputs` go to, and that is not among `known`. Leaves that a
    forward makes itself, such as `x.detach().requires_grad_()`, are no parameters."""
    known = list(known)
    own = {id(tensor) for tensor in known}
    seen = {tensor.grad_fn for tensor in known}
    nodes = [tensor.grad_fn for tensor in outputs if isinstance(tensor, torch.Tensor)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            return leaf
        nodes += [further for further, _ in node.next_functions]
    return None


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values, NaN included, in whichever dtype."""
    if a.shape != b.shape:
        return False
    b = b.to(a)
    return bool(((a == b) | ((a != a) & (b != b))).all())


@contextlib.contextmanager
def without_fakes(module: nn.Module) -> Iterator[None]:
    """Afterwards the modules keep no tensor without values: neither as attributes or buffers, nor
    in lists and dictionaries, such as caches that a forward fills at its first call."""
    kept = []
    for own in module.modules():
        containers = [own.__dict__, *own.__dict__.values()]
        kept += [(one, copy.copy(one)) for one in containers if isinstance(one, (dict, list))]
    try:
        yield
    finally:
        for container, content in kept:
            if isinstance(container, list):
                if _has_fakes(container):
                    container[:] = content
                continue
            for key in [key for key, value in container.items() if _has_fakes(value)]:
                if key in content:
                    container[key] = content[key]
                else:
                    del container[key]


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards the modules have the buffers that they had, with the same values. For runs that
    are no part of a step."""
    kept = [(own._buffers, key, value, None if value is None else value.clone())
            for own in module.modules() for key, value in own._buffers.items()]
    try:
        yield
    finally:
        for table, key, value, copied in kept:
            table[key] = value
            if value is not None and not are_equal(value, copied):
                value.data.copy_(copied)


def _has_fakes(value: Any) -> bool:
    return any(isinstance(own, FakeTensor) for own in pytree.tree_leaves(value))


def is_made_out_of_place(module: nn.Module) -> bool:
    """Whether it changes its input. What `nn.Dropout` calls leaves a layer's input alone."""
    return getattr(module, "inplace", False) is True and type(module) is not nn.Dropout


def structure_of(module: nn.Module, name: str) -> nn.Module:
    """A copy of a module that has the same parameters and buffers, not copies of them."""
    memo: dict[int, Any] = {}
    for own in module.modules():
        for table in (own._parameters, own._buffers, vars(own)):
            for value in table.values():
                if isinstance(value, torch.Tensor):
                    memo[id(value)] = value
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"layer '{name}' ({type(module).__name__}) cannot be copied ({error}): a pipeline runs "
            f"a copy of each module's structure. Give the module a __deepcopy__, or make what "
            f"cannot be copied in its forward") from error
    for own in made.modules():
        # Layers must not change their input. See `Layer.check_inplace`.
        if is_made_out_of_place(own):
            own.inplace = False
    return made
