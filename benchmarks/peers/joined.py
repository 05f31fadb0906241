"""Layers as an `nn.Sequential` calls them."""

from torch import nn

from common import Part, one_or_all


class Joined(nn.Module):
    """A layer of which what goes in and out is one tensor or one tuple."""

    def __init__(self, layer):
        super().__init__()
        self.part = Part([layer])

    def forward(self, values):
        return one_or_all(self.part(*values) if isinstance(values, tuple) else self.part(values))
