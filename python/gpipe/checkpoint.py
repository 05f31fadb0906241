"""Checkpoints, as the `gpipe` command and `Pipeline.save` write them."""

import io
import os
import pickle
import warnings
from pathlib import Path

import torch
from torch import nn

from . import _gpipe, checks
from .errors import CheckpointError
from .sequence import layers_of


# The file with what only Python knows: the user's buffers, and the rates of the optimizer.
OWN = "python.pt"


def packed(own: dict) -> tuple[str, bytes]:
    """The file of a checkpoint that holds `own`."""
    stream = io.BytesIO()
    torch.save(own, stream)
    return OWN, stream.getvalue()


def unpacked(folder: str | os.PathLike) -> tuple[Path, dict]:
    """The folder of the checkpoint that `folder` is, or of the newest in it, and what `packed` was
    given. The `gpipe` command writes none. Warns of newer checkpoints that are damaged."""
    found, content, skipped = _gpipe.checkpoint_file(os.fspath(folder), OWN)
    for text in skipped:
        warnings.warn(f"skipped a damaged checkpoint: {text}", stacklevel=4)
    if content is None:
        return Path(found), {}
    try:
        return Path(found), torch.load(io.BytesIO(content), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(f"{found}: cannot read {OWN}: {error}") from error


def load(folder: str | os.PathLike, model: nn.Module | None = None, *,
         averages: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of the newest checkpoint in `folder`, or of the checkpoint that it is.

    With `model`, what the pipeline was given (an `nn.Sequential` or a `gpipe.sequence`), they have
    the names of `model.state_dict()`, and `model.load_state_dict` takes them. Buffers that the
    checkpoint does not have are the model's. Without it, they have the names of the layers, and a
    tied parameter has one of its names.

    With `averages`, the moving averages of the weights in the place of the weights.

    Raises CheckpointError if there is none, or if it lacks a parameter of the model.
    """
    values = _read(folder, averages)
    if model is None:
        return values
    checks.is_module(model)
    names: dict[int, list[str]] = {}
    for layer, module in layers_of(model):
        for table in (module.named_parameters, module.named_buffers):
            for name, tensor in table(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(f"{layer}.{name}")
    parameters = {id(own) for own in model.parameters()}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        saved = next((own for own in names.get(id(tensor), []) if own in values), None)
        if saved is not None:
            found[name] = values[saved]
        elif id(tensor) in parameters:
            raise CheckpointError(f"{os.fspath(folder)} has no '{name}': it is of another model")
        else:
            found[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
    return found


def _read(folder: str | os.PathLike, averages: bool) -> dict[str, torch.Tensor]:
    """The parameters by the engine's names."""
    checkpoint, own = unpacked(folder)
    found = dict(_gpipe.checkpoint_parameters(os.fspath(checkpoint), averages))
    for name, value in found.items():
        if name.rpartition(".")[2] == "num_batches_tracked":
            found[name] = value.reshape(()).long()
    return {**own.get("buffers", {}), **found}
