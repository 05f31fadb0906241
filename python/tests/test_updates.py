"""Updates of the weights that others make: optimizers of the user's, and other pipelines."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe


class Head(nn.Module):
    """Has the weights of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied():
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding))


def in_bfloat16():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))
    return own.bfloat16()


def channels_last():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2),
                         nn.Flatten(), nn.Linear(4, 20)).to(memory_format=torch.channels_last)


COPIED = {"tied": tied, "bfloat16": in_bfloat16, "channels last": channels_last}


def tokens():
    return torch.arange(16) % 20, (torch.arange(16) * 7) % 20


def made(own, **settings):
    return gpipe.Pipeline(own, tokens()[0], stages=2, micro_batches=4, loss=nn.CrossEntropyLoss(),
                          **settings)


@pytest.mark.parametrize("how", ["accumulate", "call"])
@pytest.mark.parametrize("kind", COPIED)
def test_regression_a_fused_update_reaches_the_stages_copies(kind, how):
    """Fused kernels do not raise the versions of the tensors that they change. Where stages keep
    copies, they went on with the old weights."""
    own = COPIED[kind]()
    x, y = tokens()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1, fused=True)
    with made(own) as pipe:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            if how == "accumulate":
                pipe.accumulate(x, y)
            else:
                F.cross_entropy(pipe(x).float(), y).backward()
            optimizer.step()
            losses.append(pipe.evaluate(x, y).loss)
            with made(own) as new:
                assert losses[-1] == new.evaluate(x, y).loss
    assert losses[2] < losses[1] < losses[0]


def test_a_backward_after_a_fused_update_is_refused():
    own = tied()
    x, y = tokens()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, fused=True)
    with made(own) as pipe:
        pipe.accumulate(x, y)
        output = pipe(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match="has changed since the forward"):
            output.sum().backward()


def test_an_update_through_data_reaches_the_stages_copies():
    """As optimizers of other libraries write it."""
    class Own(torch.optim.Optimizer):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    own = tied()
    x, y = tokens()
    optimizer = Own(own.parameters(), {})
    with made(own) as pipe, made(own) as other:
        before = other.evaluate(x, y).loss
        pipe.accumulate(x, y)
        optimizer.step()
        with made(own) as new:
            assert other.evaluate(x, y).loss == new.evaluate(x, y).loss != before


class Counting:
    """An engine that counts how often values are copied to the stages."""

    def __init__(self, engine):
        self.engine, self.copies = engine, 0

    def __getattr__(self, name):
        if name in ("set_parameters", "refresh"):
            self.copies += 1
        return getattr(self.engine, name)


@pytest.mark.parametrize("kind", COPIED)
def test_regression_a_second_pipeline_sees_the_updates_of_the_first(kind):
    """Stages write updates into the module's tensors, which raised no version. A second pipeline
    went on with the old values of tied weights."""
    own = COPIED[kind]()
    x, y = tokens()
    with made(own, optimizer=torch.optim.SGD(own.parameters(), lr=1.0)) as pipe, made(own) as other:
        pipe._engine = Counting(pipe._engine)
        losses = []
        for _ in range(3):
            pipe.train_step(x, y)
            with made(own) as new:
                losses.append(new.evaluate(x, y).loss)
            assert other.evaluate(x, y).loss == losses[-1]
        assert pipe._engine.copies == 0, "its own updates are no changes of the user's"
    assert losses[2] < losses[1] < losses[0]


def test_a_second_pipeline_sees_what_the_first_loads(tmp_path):
    own = tied()
    x, y = tokens()
    with made(own, optimizer=torch.optim.SGD(own.parameters(), lr=1.0)) as pipe, made(own) as other:
        first = other.evaluate(x, y).loss
        pipe.save(tmp_path)
        pipe.train_step(x, y)
        assert other.evaluate(x, y).loss != first
        pipe.load(tmp_path)
        assert other.evaluate(x, y).loss == first


def test_a_backward_of_another_pipeline_after_a_step_is_refused():
    own = tied()
    x, y = tokens()
    with made(own, optimizer=torch.optim.SGD(own.parameters(), lr=1.0)) as pipe, made(own) as other:
        output = other(x)
        pipe.train_step(x, y)
        with pytest.raises(RuntimeError, match="has changed since the forward"):
            output.sum().backward()
