"""Random numbers inside layers: keyed by seed, layer, step and micro-batch, so that neither the
number of stages nor a recomputation changes them.

Operators of PyTorch that draw (`torch.rand`, `bernoulli_`, ...) are keyed by the engine itself. The
dropout between the layers of an `nn.LSTM` is, too, on CPUs. On GPUs cuDNN draws it, and it is
refused. What is here replaces functions of PyTorch by ones that do the same outside of layers.
Inside of layers:

- `F.dropout` and the dropout of `F.scaled_dot_product_attention` are keyed by sample, so that the
  number of micro-batches does not change a mask either;
- a part under `torch.utils.checkpoint` draws the same numbers when it is computed again.
"""

import functools
import math
import sys
import threading

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from . import _gpipe
from .errors import SettingError
from .layer import Layer

# Code of the user's own that torch.compile traces, outside of pipelines, stays as it is.
_compiling = torch.compiler.is_compiling
_dropout = F.dropout
_attention = F.scaled_dot_product_attention
_checkpoint = torch.utils.checkpoint.checkpoint
_recomputing = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_Reentrant = torch.utils.checkpoint.CheckpointFunction
_threads = threading.local()


def _is_given(x: torch.Tensor) -> bool:
    """Whether it is what the layer was given, or a view of that, which a layer must not change."""
    base = x._base if x._is_view() else x
    if not base.is_leaf or base.requires_grad:
        return base.is_leaf
    # Where nothing is trained, what the layer itself has made is a leaf, too.
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Layer.__call__.__code__:
        frame = frame.f_back
    if frame is None or frame.f_locals["self"].has_skips:
        return True  # it may be a skip, or what a part that is computed again was given
    memory = x.untyped_storage()._cdata
    return any(own is not None and own.untyped_storage()._cdata == memory
               for own in frame.f_locals["inputs"])


@functools.wraps(_dropout)
def _keyed_dropout(input, p=0.5, training=True, inplace=False):
    if _compiling() or not (training and p > 0.0 and _gpipe.in_layer()):
        return _dropout(input, p, training, inplace)
    if p >= 1.0 or input.dim() == 0 or not _gpipe.keeps_samples(input.size(0)):
        # Its first axis is not the samples': keyed by micro-batch.
        return _dropout(input, p, training, inplace and not _is_given(input))
    dropped = _gpipe.dropout(input, p)
    return input.copy_(dropped) if inplace and not _is_given(input) else dropped


@functools.wraps(_attention)
def _keyed_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                     enable_gqa=False):
    if _compiling() or dropout_p == 0.0 or not _gpipe.in_layer():
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                          enable_gqa=enable_gqa)
    # The formula in PyTorch's documentation of the function.
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        size = query.size(-2), key.size(-2)
        hidden = torch.ones(size, dtype=torch.bool, device=query.device).tril().logical_not()
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1)  # 0 where a row is masked whole, as PyTorch's
    return _keyed_dropout(weights, dropout_p, True) @ value


@functools.wraps(_checkpoint)
def _keyed_checkpoint(function, *args, **settings):
    if _compiling() or not _gpipe.in_layer():
        return _checkpoint(function, *args, **settings)
    key = _gpipe.random_key()

    def keyed(*inner, **named):
        return key.call(lambda: function(*inner, **named))

    settings.setdefault("use_reentrant", False)
    settings["preserve_rng_state"] = False
    _threads.is_keyed = True
    return _checkpoint(keyed, *args, **settings)


def _check_keyed() -> None:
    """Refuses a checkpoint that does not come from `_keyed_checkpoint`: its recomputation would
    draw other numbers."""
    is_keyed, _threads.is_keyed = getattr(_threads, "is_keyed", False), False
    if not is_keyed and not _compiling() and _gpipe.in_layer():
        raise SettingError("torch.utils.checkpoint.checkpoint was imported by name before gpipe, "
                           "so that its recomputation would draw other random numbers: import "
                           "gpipe first (before transformers, too)")


@functools.wraps(_recomputing)
def _checked_recomputing(*args, **settings):
    _check_keyed()
    return _recomputing(*args, **settings)


class _CheckedReentrant(_Reentrant):
    @staticmethod
    def apply(*args):
        _check_keyed()
        return _Reentrant.apply(*args)


F.dropout = _keyed_dropout
F.scaled_dot_product_attention = _keyed_attention
torch.utils.checkpoint.checkpoint = _keyed_checkpoint
torch.utils.checkpoint._checkpoint_without_reentrant_generator = _checked_recomputing
torch.utils.checkpoint.CheckpointFunction = _CheckedReentrant
