"""AmoebaNet-D (Real et al. 2019, at the sizes of Huang et al. 2019) and U-Net (Ronneberger et al.
2015, as Kim et al. 2020 simplify it) in plain PyTorch.

The code is written for speed on a CPU. What several operations of a cell take is rectified once,
and in place where nothing else needs it. Running statistics are updated with each micro-batch, as
PyTorch does it (gpipe: once with each mini-batch), and twice where a layer is recomputed. Training
does not read them.
"""

import torch
import torch.nn.functional as F
from torch import nn

MOMENTUM = 0.1
EPSILON = 1e-5


def pointwise(x, weight):
    """A 1x1 convolution. With fewer than 16 samples, on one thread, ATen gives it a slow kernel of
    its own, not oneDNN's. Then it is a matrix product where the layout allows it. Elsewhere it is
    dilated, which changes nothing but the kernel."""
    few = x.shape[0] < 16 and x.device.type == "cpu"
    if few and x.is_contiguous(memory_format=torch.channels_last):
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1)).permute(0, 3, 1, 2)
    return F.conv2d(x, weight, dilation=2 if few else 1)


class Norm(nn.Module):
    """Batch norm with gpipe's names."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels)))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_variance", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_variance, self.weight, self.bias,
                            self.training, MOMENTUM, EPSILON)


class Convolution(nn.Module):
    """Without bias, the size kept but for the stride; then batch norm."""

    def __init__(self, inputs, outputs, kernel=(1, 1), stride=(1, 1), norm=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *kernel))
        self.stride, self.padding = stride, tuple(size // 2 for size in kernel)
        self.pointwise = kernel == (1, 1) and stride == (1, 1)
        self.norm = Norm(outputs) if norm else None

    def forward(self, x):
        y = (pointwise(x, self.weight) if self.pointwise
             else F.conv2d(x, self.weight, None, self.stride, self.padding))
        return self.norm(y) if self.norm else y


class Convolutions(nn.Module):
    """Convolutions by name, one after the other. Each takes rectified values; those of the first
    are given rectified."""

    rectified = True

    def __init__(self, **convolutions):
        super().__init__()
        self.order = list(convolutions)
        for name, convolution in convolutions.items():
            self.add_module(name, convolution)

    def forward(self, x):
        for number, name in enumerate(self.order):
            x = getattr(self, name)(F.relu_(x) if number else x)
        return x


class FactorizedReduce(nn.Module):
    """Half of the channels come from every second pixel, half from the pixels between them. Zeros
    lie beyond the border."""

    rectified = True

    def __init__(self, inputs, outputs):
        super().__init__()
        self.even, self.odd = nn.Module(), nn.Module()
        self.even.weight = nn.Parameter(torch.empty(outputs // 2, inputs, 1, 1))
        self.odd.weight = nn.Parameter(torch.empty(outputs - outputs // 2, inputs, 1, 1))
        self.norm = Norm(outputs)

    def forward(self, x):
        x = (F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
             if x.shape[2] % 2 or x.shape[3] % 2 else x)
        layout = (torch.channels_last if x.is_contiguous(memory_format=torch.channels_last)
                  else torch.contiguous_format)
        even, odd = (x[:, :, at::2, at::2].contiguous(memory_format=layout) for at in (0, 1))
        halves = pointwise(even, self.even.weight), pointwise(odd, self.odd.weight)
        return self.norm(torch.cat(halves, 1))


class MaxPool(nn.Module):
    rectified = False

    def __init__(self, size, stride):
        super().__init__()
        self.size, self.stride = size, stride

    def forward(self, x):
        return F.max_pool2d(x, self.size, self.stride, (self.size - 1) // 2,
                            ceil_mode=self.size % 2 == 0)


class AveragePool(nn.Module):
    rectified = False

    def __init__(self, stride):
        super().__init__()
        self.stride = stride

    def forward(self, x):
        return F.avg_pool2d(x, 3, self.stride, 1, count_include_pad=False)


class Identity(nn.Module):
    rectified = False

    def forward(self, x):
        return x


def conv1x1(channels, stride):
    return Convolutions(conv=Convolution(channels, channels, (1, 1), (stride, stride)))


def conv3x3(channels, stride):
    few = max(channels // 4, 1)
    return Convolutions(**{"in": Convolution(channels, few),
                           "conv": Convolution(few, few, (3, 3), (stride, stride)),
                           "out": Convolution(few, channels)})


def conv1x7_7x1(channels, stride):
    few = max(channels // 4, 1)
    return Convolutions(**{"in": Convolution(channels, few),
                           "wide": Convolution(few, few, (1, 7), (1, stride)),
                           "high": Convolution(few, few, (7, 1), (stride, 1)),
                           "out": Convolution(few, channels)})


def identity(_, stride):
    return Identity()


def average3(_, stride):
    return AveragePool(stride)


def max2(_, stride):
    return MaxPool(2, stride)


def max3(_, stride):
    return MaxPool(3, stride)


# Five sums of two operations, each of (value, operation): values 0 and 1 are made of the outputs of
# the cell before and of the one before that, 2 to 6 are the sums. Then the values that are joined.
NORMAL = ([((1, conv1x1), (1, max3)), ((1, identity), (0, conv1x7_7x1)),
           ((0, conv1x1), (0, conv1x7_7x1)), ((2, max3), (2, identity)),
           ((1, average3), (5, conv1x1))], (0, 3, 4, 6))
REDUCTION = ([((0, max2), (0, max3)), ((2, identity), (1, conv3x3)), ((2, conv1x7_7x1), (2, max3)),
              ((3, identity), (1, max2)), ((2, average3), (3, conv1x1))], (4, 5, 6))


class Stem(nn.Module):
    """Rectified images -> values."""

    def __init__(self, channels, outputs):
        super().__init__()
        self.conv = Convolution(channels, outputs, (3, 3), (2, 2))

    def forward(self, x):
        return self.conv(F.relu(x))


class Cell(nn.Module):
    """(output of the cell before, of the one before that) -> (its own, that of the cell before).
    The first cell gets one only."""

    def __init__(self, previous, earlier, filters, reduction, after_reduction):
        super().__init__()
        pairs, self.joined = REDUCTION if reduction else NORMAL
        self.previous = Convolutions(conv=Convolution(previous, filters))
        if after_reduction:
            self.earlier = FactorizedReduce(earlier, filters)
        elif earlier != filters:
            self.earlier = Convolutions(conv=Convolution(earlier, filters))
        else:
            self.earlier = Identity()
        self.sources = []
        for number, pair in enumerate(pairs):
            both = nn.Module()
            for side, (value, operation) in zip(("left", "right"), pair):
                # Only what comes from outside of the cell is reduced.
                both.add_module(side, operation(filters, 2 if reduction and value < 2 else 1))
            self.add_module(str(number), both)
            self.sources.append(tuple(value for value, _ in pair))

    def forward(self, previous, earlier=None):
        earlier = previous if earlier is None else earlier
        values, rectified = [self.previous(F.relu(previous))], {}
        values.append(self.earlier(F.relu(earlier) if self.earlier.rectified else earlier))

        def take(operation, source):
            if not operation.rectified:
                return operation(values[source])
            if source not in rectified:
                rectified[source] = F.relu(values[source])
            return operation(rectified[source])

        for number, (left, right) in enumerate(self.sources):
            both = getattr(self, str(number))
            values.append(take(both.left, left) + take(both.right, right))
        return torch.cat([values[number] for number in self.joined], 1), previous


class Classifier(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(classes, channels)), nn.Parameter(torch.empty(classes)))

    def forward(self, x, *_):
        return F.linear(x.mean((2, 3)), self.weight, self.bias)


def amoebanet(cells, filters, channels, classes):
    """AmoebaNet-D(cells, filters): (name, layer) in order: `stem`, `stem.0`, `stem.1`, `0`, ..,
    `classifier`."""
    stem = filters // 4
    named, previous, earlier, reduced = [("stem", Stem(channels, stem))], stem, stem, False
    third = cells // 3
    plan = [("stem.0", filters // 2, True), ("stem.1", filters, True)]
    for number in range(cells + 2):
        passed = (number >= third) + (number >= 2 * third + 1)
        plan.append((str(number), filters << passed, number in (third, 2 * third + 1)))
    for name, width, reduction in plan:
        named.append((name, Cell(previous, earlier, width, reduction, reduced)))
        joined = len((REDUCTION if reduction else NORMAL)[1])
        previous, earlier, reduced = width * joined, previous, reduction
    return [*named, ("classifier", Classifier(previous, classes))]


def amoebanet_of(tensors):
    """The layers whose parameters these are."""
    stem, classes = tensors["stem.conv.weight"].shape, tensors["classifier.weight"].shape[0]
    numbers = {name.split(".")[0] for name in tensors}
    return amoebanet(sum(number.isdigit() for number in numbers) - 2, 4 * stem[0], stem[1], classes)


class Dropped(nn.Module):
    """Convolution, dropout of whole channels, instance norm, leaky ReLU. Values behind the first
    one pass through."""

    def __init__(self, inputs, outputs, dropout):
        super().__init__()
        self.conv, self.dropout = Convolution(inputs, outputs, (3, 3), norm=False), dropout

    def forward(self, x, *skipped):
        y = F.dropout2d(self.conv(x), self.dropout, self.training)
        return F.leaky_relu_(F.instance_norm(y, eps=EPSILON)), *skipped


class Stash(nn.Module):
    """Its input for later, behind the others."""

    def forward(self, x, *skipped):
        return x, *skipped, x


class Halve(nn.Module):
    def forward(self, x, *skipped):
        return F.max_pool2d(x, 2), *skipped


class Join(nn.Module):
    """Twice the height and width, and what was stashed last behind it."""

    def forward(self, x, *skipped):
        return torch.cat((F.interpolate(x, scale_factor=2), skipped[-1]), 1), *skipped[:-1]


class Segment(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = Convolution(inputs, outputs, norm=False)

    def forward(self, x):
        return self.conv(x)


def unet(depth, convolutions, base, channels=3, outputs=1, dropout=0.1):
    """U-Net(convolutions, base): (name, layer) in order: `down.0.0`, .., `down.0.stash`,
    `down.0.pool`, .., `bottom.0`, .., `up.4.join`, `up.4.0`, .., `segment`."""
    named = []

    def stack(name, inputs, middle, last):
        widths = [inputs, *[middle] * (convolutions - 1), last]
        for number, (a, b) in enumerate(zip(widths, widths[1:])):
            named.append((f"{name}.{number}", Dropped(a, b, dropout)))

    for level in range(depth):
        width = base << level
        stack(f"down.{level}", width // 2 if level else channels, width, width)
        named.extend([(f"down.{level}.stash", Stash()), (f"down.{level}.pool", Halve())])
    stack("bottom", base << (depth - 1), base << depth, base << (depth - 1))
    for level in reversed(range(depth)):
        named.append((f"up.{level}.join", Join()))
        stack(f"up.{level}", base << (level + 1), (base << level) // 2, (base << level) // 2)
    return [*named, ("segment", Segment(base // 2, outputs))]
