"""A pipeline inside the user's own computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .pipeline import Pipeline


class _Run(torch.autograd.Function):
    """Forward and backward of the whole pipeline, as one operation of autograd."""

    @staticmethod
    def forward(ctx, pipe: Pipeline, names: list[str], count: int, *tensors: torch.Tensor):
        inputs, _ = tensors[:count], tensors[count:]
        outputs, ctx.open = pipe._engine.forward([own.detach() for own in inputs])
        ctx.pipe, ctx.names, ctx.inputs = pipe, names, inputs
        ctx.mark_non_differentiable(*[own for own in outputs if not own.is_floating_point()])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        of_inputs, of_parameters = ctx.pipe._engine.backward(ctx.open, list(gradients))
        given = dict(of_parameters)
        wanted = ctx.needs_input_grad[3:]
        first = [own if needed else None for own, needed in zip(of_inputs, wanted)]
        first = [own if own is None else own.to(like.device, like.dtype)
                 for own, like in zip(first, ctx.inputs)]
        return (None, None, None, *first, *[given.get(name) for name in ctx.names])


def run(pipe: Pipeline, tensors: list[torch.Tensor]):
    """Runs the pipeline in the modes of its model."""
    pipe._mode(True)
    pipe._refresh()
    if not torch.is_grad_enabled() and not pipe.model.training:
        return pipe._nested(pipe._engine.predict([own.detach() for own in tensors]))
    parameters = {own.name: own.tensor for own in pipe._tensors if own.tensor.requires_grad}
    if not torch.is_grad_enabled():
        outputs, _ = pipe._engine.forward([own.detach() for own in tensors])
        outputs = tuple(own.detach() for own in outputs)
    else:
        if any(own.requires_grad for own in tensors) and not pipe._gives_input_gradients:
            pipe._engine.set_input_gradients(True)
            pipe._gives_input_gradients = True
        outputs = _Run.apply(pipe, list(parameters), len(tensors), *tensors, *parameters.values())
    if pipe.model.training:
        pipe._pending_batches += 1
    return pipe._nested(outputs)
