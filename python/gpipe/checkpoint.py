"""Checkpoints, as the `gpipe` command and `Pipeline.save` write them."""

import os

import torch

from . import _gpipe


def load(folder: str | os.PathLike, *, averages: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of the newest checkpoint in `folder`, or of the checkpoint that it is, by
    name: of a pipeline in Python, those are the names of `model.state_dict()`.

    With `averages`, the moving averages of the weights in the place of the weights.
    """
    values, _ = _gpipe.checkpoint_parameters(os.fspath(folder), averages)
    found = dict(values)
    for name, value in found.items():
        if name.rpartition(".")[2] == "num_batches_tracked":
            found[name] = value.reshape(()).long()
    return found
