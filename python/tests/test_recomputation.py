"""Re-materialization of modules: where it ends, and what it leaves as it was."""

import collections

import pytest
import torch
from common import batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpipe


# Layers run copies of modules, so what they count is kept here: by the layer's name.
ENDED = collections.Counter()
LAST = {}


class Tail(nn.Module):
    """Ends with work that no backward reads."""

    def __init__(self, name):
        super().__init__()
        self.linear, self.drop, self.name = nn.Linear(6, 6), nn.Dropout(0.3), name

    def forward(self, x):
        y = self.drop(torch.tanh(self.linear(x))) + x
        ENDED[self.name] += 1
        LAST[self.name] = y.detach().mean()
        return -y


class Hides(torch.autograd.Function):
    """Keeps a value for the backward without saving it, as it should not, but as many do."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.cos(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept


class Hidden(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(6, 6), name

    def forward(self, x):
        y = Hides.apply(self.linear(x))
        ENDED[self.name] += 1
        return y


class Hooked(nn.Module):
    """A hook reads what is computed after the last saved tensor."""

    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(6, 6), name

    def forward(self, x):
        y = self.linear(x)
        scale = (y.detach() + 2).clone()
        if y.requires_grad:  # not where shapes are inferred
            y.register_hook(lambda grad: grad * scale)
        ENDED[self.name] += 1
        return y + 1


class Checkpointed(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.inner, self.name = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), name

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=False) + x
        ENDED[self.name] += 1
        return y


class Swallows(nn.Module):
    """Catches every exception, and goes on with something else."""

    def __init__(self, name):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        try:
            return torch.exp(-self.linear(x)) + x
        except RuntimeError:
            return x


def gradients(layer, remat, **settings):
    torch.manual_seed(3)
    own = nn.Sequential(nn.Linear(6, 6), layer("a"), layer("b"), nn.Linear(6, 3))
    x, y = batch()[0], torch.ones(len(batch()[0]), 3)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with gpipe.Pipeline(
        own, x, micro_batches=2, remat=remat, loss=nn.MSELoss(), optimizer=optimizer, **settings
    ) as pipe:
        losses = [pipe.train_step(x, y).loss for _ in range(3)]
    return own, losses


def counted(layer, remat, **settings):
    """What `gradients` returns, and how often each layer's forward ran to its end."""
    ENDED.clear()
    own, losses = gradients(layer, remat, **settings)
    return own, losses, ENDED.copy()


def test_a_recomputation_ends_where_no_backward_reads_further():
    # The first of the stage's last two layers feeds the other, so it is computed again as a whole.
    for balance, again in (([3, 1], [2, 1]), ([2, 1, 1], [1, 1])):
        settings = dict(stages=len(balance), balance=balance)
        kept, losses, once = counted(Tail, "never", **settings)
        last = LAST["b"]
        own, again_losses, ended = counted(Tail, "always", **settings)
        assert again_losses == losses
        for one, other in zip(own.parameters(), kept.parameters()):
            assert torch.equal(one, other)
        more = [ended[name] - once[name] for name in "ab"]
        assert more == [6 * (times - 1) for times in again]  # two micro-batches, three steps
        # What a module tells others is of its whole forward.
        assert torch.equal(LAST["b"], last)


@pytest.mark.parametrize(
    "layer",
    [Hidden, Hooked, Checkpointed, Swallows],
    ids=["hidden", "hooked", "checkpointed", "swallows"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_unusual_modules_have_the_bits_of_a_run_that_keeps(layer, schedule):
    kept, losses = gradients(layer, "never", stages=2, balance=[3, 1], schedule=schedule)
    for remat in ("always", "selective"):
        own, again = gradients(layer, remat, stages=2, balance=[3, 1], schedule=schedule)
        assert again == losses, remat
        for one, other in zip(own.parameters(), kept.parameters()):
            assert torch.equal(one, other), remat


@pytest.mark.parametrize("layer", [Hidden, Hooked, Checkpointed])
def test_a_module_whose_graph_keeps_more_is_computed_again_as_a_whole(layer):
    # Its graph would hold that memory from the forward to the backward.
    settings = dict(stages=2, balance=[3, 1])
    _, _, once = counted(layer, "never", **settings)
    _, _, ended = counted(layer, "always", **settings)
    assert [ended[name] - once[name] for name in "ab"] == [6, 6]


def test_regression_noise_that_is_drawn_after_it_is_saved_is_computed_again():
    """A recomputation ended where RReLU had saved its noise and not drawn it. Gradients were of
    whatever was in that memory."""
    own = nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 3))
    gpipe.verify(own, batch()[0], [1, 2], remats=["never", "always"])


@pytest.mark.parametrize("between", ["predict", "eval"])
def test_regression_a_backward_recomputes_in_the_modes_of_its_forward(between):
    """It took those of the last call: dropout was off, and gradients were wrong in silence."""
    def gradients(remat, between):
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
        x, y = batch()
        with gpipe.Pipeline(own, x, stages=2, micro_batches=2, remat=remat) as pipe:
            out = pipe(x)
            if between == "predict":
                pipe.predict(x)
            elif between == "eval":
                own.eval()
                with torch.no_grad():
                    pipe(x)
            ((out - y) ** 2).sum().backward()
        return [parameter.grad for parameter in own.parameters()]

    wanted = gradients("never", None)
    for remat in ("never", "always"):
        for found, one in zip(gradients(remat, between), wanted):
            assert torch.equal(found, one)


def test_regression_a_buffer_that_changes_before_the_backward_is_an_error():
    """The recomputation took the new value."""
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("t", torch.ones(1))

        def forward(self, x):
            return x * self.t

    own = nn.Sequential(nn.Linear(6, 6), Scale(), nn.Linear(6, 3))
    x, _ = batch()
    with gpipe.Pipeline(own, x, micro_batches=2) as pipe:
        out = pipe(x)
        own[1].t.mul_(0.5)
        with pytest.raises(RuntimeError, match="buffer '1.t' has changed since the forward"):
            out.sum().backward()
        pipe(x).sum().backward()


def test_outputs_may_go_through_the_pipeline_again():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x, _ = batch()
    own(own(x)).sum().backward()
    wanted = [parameter.grad.clone() for parameter in own.parameters()]
    own.zero_grad()
    with gpipe.Pipeline(own, x, stages=2, micro_batches=2, input_gradients=True) as pipe:
        pipe(pipe(x)).sum().backward()
    for parameter, one in zip(own.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, one)  # sums in another order
    with gpipe.Pipeline(own, x, stages=2, micro_batches=2) as pipe:
        out = pipe(x)
        with pytest.raises(gpipe.errors.SettingError, match="input_gradients=True"):
            pipe(out)
