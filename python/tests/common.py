"""Models and mini-batches of the tests."""

import torch
from torch import nn

import gpipe


def model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12),
                         nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3)).to(dtype)


def smooth(dtype=torch.float64, seed=0):
    """Without anything random, or that looks at a whole micro-batch."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(),
                         nn.Linear(12, 3)).to(dtype)


def batch(samples=8, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(samples, 3, generator=generator, dtype=torch.float64).to(dtype)


def pipeline(own, **settings):
    """A pipeline with a squared error and SGD, unless told otherwise."""
    x, _ = batch(dtype=next(own.parameters()).dtype)
    settings = {"stages": 2, "micro_batches": 2, "loss": nn.MSELoss(), **settings}
    if "optimizer" not in settings:
        settings["optimizer"] = torch.optim.SGD(own.parameters(), lr=0.1)
    return gpipe.Pipeline(own, x, **settings)


def values(own):
    return {name: value.clone() for name, value in own.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
