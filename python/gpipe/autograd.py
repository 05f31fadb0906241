"""A pipeline as one operation of the user's own computation."""

from __future__ import annotations

from threading import RLock
from typing import Any, NoReturn

import torch

from . import _gpipe
from .network import ModuleTensor, Network


def run(engine: _gpipe.Engine, network: Network, lock: RLock, parameters: list[ModuleTensor],
        inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of a forward. Their backward goes through the stages, to the gradients of
    `inputs` and `parameters`. `lock` is of the pipeline's calls."""
    return _Run.apply(engine, network, lock, parameters, len(inputs), *inputs,
                      *[own.tensor for own in parameters])


class _Run(torch.autograd.Function):
    """Forward and backward of the whole pipeline."""

    @staticmethod
    def forward(ctx: Any, engine: _gpipe.Engine, network: Network, lock: RLock,
                parameters: list[ModuleTensor], count: int,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tensors[:count]
        outputs, ctx.open = engine.forward([own.detach() for own in inputs])
        ctx.engine, ctx.network, ctx.lock, ctx.parameters = engine, network, lock, parameters
        ctx.modes = network.modes()
        ctx.buffers = [(own, own.value._version) for own in network.tensors.others if own.is_shared]
        ctx.versions = [own.tensor._version for own in parameters]
        ctx.inputs = [(own.device, own.dtype) for own in inputs]
        ctx.mark_non_differentiable(*[own for own in outputs if not own.is_floating_point()])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        for own, version in zip(ctx.parameters, ctx.versions):
            if own.tensor._version != version:
                raise RuntimeError(
                    f"'{own.name}' has changed since the forward, so a recomputation would use "
                    f"other weights: run the backward before the update, or call the pipeline "
                    f"again")
        for own, version in ctx.buffers:
            if own.value._version != version:
                raise RuntimeError(
                    f"the buffer '{own.name}' has changed since the forward, so a recomputation "
                    f"would use another value: run the backward before you change it")
        given_gradients = [own if own is None else own.detach() for own in gradients]
        ctx.engine.check_caller()
        with ctx.lock:
            # A recomputation runs as the forward did, whatever has been called since.
            ctx.network.set_modes(ctx.modes)
            of_inputs, of_parameters = ctx.engine.backward(ctx.open, given_gradients)
        given = dict(of_parameters)
        wanted = ctx.needs_input_grad[5:]
        first = [own.to(*like) if needed and own is not None else None
                 for own, needed, like in zip(of_inputs, wanted, ctx.inputs)]
        found = [*first, *[_like(given.get(own.name), own.tensor) for own in ctx.parameters]]
        if torch.is_grad_enabled():  # create_graph=True
            found = _Once.apply(len(found), *found, *ctx.saved_tensors,
                                *[own for own in gradients if own is not None])
        return (None, None, None, None, None, *found)


def _like(gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient where autograd wants it: the engine gives it on the CPU."""
    return gradient if gradient is None else gradient.to(tensor.device, tensor.dtype)


class _Once(torch.autograd.Function):
    """Gradients of which there are no gradients. They depend on all that the pipeline took, so that
    whoever asks for such a gradient comes here."""

    @staticmethod
    def forward(ctx: Any, count: int,
                *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if own is None else own.detach() for own in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> NoReturn:
        raise RuntimeError("a pipeline has no gradient of a gradient, such as a gradient penalty "
                           "needs: compute that part of the loss with the module itself")
