"""Every module of the zoo, bit for bit at every number of stages, and beside plain PyTorch.

`GPIPE_ZOO=full` compares every K from 1 to 4, schedule and re-materialization policy.
"""

import copy
import os

import pytest
import torch
from zoo import SAMPLES, ZOO

import gpipe

FULL = os.environ.get("GPIPE_ZOO") == "full"
SCHEDULES = ["gpipe", "1f1b", "zb-h1"]
REMATS = ["unless-adjacent", "always", "never", "selective", "segments:2"]


def made(name):
    torch.manual_seed(0)
    return ZOO[name].make()


@pytest.mark.parametrize("name", ZOO)
def test_transparency(name):
    model, example = made(name)
    if FULL:
        gpipe.verify(model, example, [1, 2, 3, 4], schedules=SCHEDULES, remats=REMATS)
        if count_layers(model) >= 4:
            gpipe.verify(model, example, [1, 2], schedules=["interleaved:2"], remats=REMATS)
        return
    gpipe.verify(model, example, [1, 3], schedules=["zb-h1"], remats=["never"])
    gpipe.verify(model, example, [2], schedules=["1f1b"], remats=["always"])


@pytest.mark.parametrize("name", [name for name, own in ZOO.items() if own.exact])
def test_gradients_are_pytorchs(name):
    model, example = made(name)
    norms = ZOO[name].norms
    if norms:  # gradients before a batch norm nearly cancel: float64 shows that they are the same
        model.double()
        example = torch.utils._pytree.tree_map(
            lambda own: own.double() if own.is_floating_point() else own, example)
    plain = copy.deepcopy(model)
    chunks = 2 if norms else 1
    expected = gradients(plain, example, chunks)
    trained = [own for own in model.parameters() if own.requires_grad]
    with gpipe.Pipeline(model, example, stages=2, micro_batches=2, keep_gradients=True,
                        loss=gpipe.Loss(square, lambda _: float(SAMPLES)),
                        optimizer=torch.optim.SGD(trained, lr=0.0)) as pipe:
        pipe.train_step(example, torch.zeros(SAMPLES))
        found = pipe.gradients()
    names = {id(own): name for name, own in plain.named_parameters()}
    assert found.keys() == {first_name(model, plain, names[id(own)])
                            for own in plain.parameters() if own.grad is not None}
    norm = torch.sqrt(sum((own ** 2).sum() for own in expected.values()))
    for full, gradient in found.items():
        other = expected[full]
        # The contract against an unpipelined run.
        bound = (1e-10 if norms else 1e-5) * torch.maximum(other.abs(), 1e-3 * norm)
        excess = ((gradient - other).abs() - bound).max().item()
        assert excess <= 0, f"{full} exceeds the contract by {excess:.2e}"


def count_layers(model):
    return len(model.layers) if isinstance(model, gpipe.Sequence) else len(model)


def square(output, _):
    leaves = torch.utils._pytree.tree_leaves(output)
    return sum((own ** 2).sum() for own in leaves
               if isinstance(own, torch.Tensor) and own.is_floating_point())


def gradients(model, example, chunks):
    """Plain PyTorch's, in a loop over micro-batches where batch norms need one."""
    for part in range(chunks):
        size = SAMPLES // chunks
        cut = torch.utils._pytree.tree_map(lambda own: own[part * size:(part + 1) * size], example)
        (square(model(cut), None) / SAMPLES).backward()
    return {first_name(model, model, name): own.grad for name, own in model.named_parameters()
            if own.grad is not None}


def first_name(model, _plain, name):
    """The engine's name: of the layer as the sequence names it."""
    if not isinstance(model, gpipe.Sequence):
        return name
    number, _, rest = name.partition(".")
    return f"{model.layers[int(number)][0]}.{rest}"
