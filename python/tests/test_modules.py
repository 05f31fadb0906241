"""Models that a pipeline refuses, and what it says."""

import copy
import threading

import numpy as np
import pytest
import torch
from common import assert_same, batch, model, pipeline, smooth, values
from torch import nn

import gpipe
from gpipe.skip import Pop, Stash

REFUSED = gpipe.errors.SettingError
VerificationError = gpipe.errors.VerificationError


def refused(match, own, example=None, error=REFUSED, **settings):
    with pytest.raises(error, match=match):
        gpipe.Pipeline(own, batch()[0] if example is None else example, **settings)


def test_a_model_that_is_no_sequence_is_refused_with_the_way_to_make_it_one():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(6, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    own = Network()
    refused(r'gpipe.sequence\(model, \["embed", "layers.\*", "norm", "head"\]\)', own)
    x = batch()[0]
    sequence = gpipe.sequence(own, ["embed", "layers.*", "norm", "head"])
    assert torch.equal(sequence(x), own(x))
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    before = values(own)
    with gpipe.Pipeline(sequence, x, stages=3, micro_batches=2, loss=nn.MSELoss(),
                        optimizer=optimizer, keep_gradients=True) as pipe:
        pipe.train_step(x, torch.zeros(8, 2))
        assert pipe.gradients().keys() == dict(own.named_parameters()).keys()
    assert not torch.equal(before["layers.1.weight"], own.state_dict()["layers.1.weight"])
    with pytest.raises(REFUSED, match="in no part of the sequence"):
        gpipe.sequence(own, ["embed", "layers.*", "norm"])
    with pytest.raises(REFUSED, match="no module 'layer'; it has embed, layers, norm, head"):
        gpipe.sequence(own, ["embed", "layer"])

    class Subclass(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    refused("has a forward of its own", Subclass(nn.Linear(6, 2)))


def test_modules_that_cannot_be_exact_are_refused_and_why():
    refused("torch.compile.*cannot key", nn.Sequential(torch.compile(nn.Linear(6, 2))))
    inside = nn.Linear(6, 2)
    inside.compile()
    refused("torch.compile", nn.Sequential(nn.Sequential(inside)))
    refused("SyncBatchNorm", nn.Sequential(nn.Linear(6, 2), nn.SyncBatchNorm(2)))
    refused("DataParallel", nn.Sequential(nn.DataParallel(nn.Linear(6, 2))))
    refused("no parameters yet", nn.Sequential(nn.LazyLinear(2)))
    norm = nn.BatchNorm1d(6)
    refused("use one batch norm", nn.Sequential(norm, nn.ReLU(), norm))
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight.data = a.weight.data
    refused("two parameters in one storage", nn.Sequential(a, b))
    refused("but no earlier layer stashes 'x'", nn.Sequential(nn.Linear(6, 2), Pop("x")))
    refused("stashed twice|not popped|never|nobody|no later", nn.Sequential(
        Stash("x"), nn.Linear(6, 6), nn.Linear(6, 2)), error=gpipe.Error)


class Counts(nn.Module):
    """A forward that changes its own buffer, which is refused."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return x * 2


def test_a_forward_that_changes_state_is_an_error():
    own = nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 3))
    with pipeline(own) as pipe:
        before = values(own)
        with pytest.raises(REFUSED, match="changes its buffer 'count'"):
            pipe.train_step(*batch())
        assert torch.equal(values(own)["0.weight"], before["0.weight"])

    class InPlace(nn.Module):
        def forward(self, x):
            return x.add_(1)

    own = nn.Sequential(nn.Linear(6, 6), InPlace(), nn.Linear(6, 3))
    with pipeline(own) as pipe:
        with pytest.raises(RuntimeError, match="in.place") as caught:
            pipe.train_step(*batch())
        notes = " ".join(caught.value.__notes__)
        assert "use the form that makes a new tensor" in notes and "layer '1'" in notes


@pytest.mark.parametrize("how", ["assigned", "through data"])
def test_regression_a_buffer_that_a_forward_assigns_is_an_error(how):
    """Only a change in place was seen. A moving average that a forward assigned stayed in the
    pipeline's copy of the module, and depended on recomputations and stages."""
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            if how == "assigned":
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            else:
                self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - self.mean

    own = nn.Sequential(nn.Linear(6, 6), Mean(), nn.Linear(6, 3))
    before = values(own)
    with pipeline(own) as pipe:
        for _ in range(2):
            with pytest.raises(REFUSED, match="changes its buffer 'mean'"):
                pipe.train_step(*batch())
    assert_same(values(own), before)


def test_regression_a_parameter_that_changes_through_data_is_an_error():
    """A change through `.data` raises no version, and was trained on in silence."""
    class Shrinks(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            self.scale.data.mul_(0.5)
            return x * self.scale

    own = nn.Sequential(nn.Linear(6, 6), Shrinks(), nn.Linear(6, 3))
    with pipeline(own) as pipe:
        with pytest.raises(gpipe.errors.StepError, match="parameter 'scale' in place"):
            pipe.train_step(*batch())
        # Even if the forward changes it only once: the change cannot be undone.
        with pytest.raises(REFUSED, match="restore a checkpoint, or accept_torn_update"):
            pipe.train_step(*batch())
        assert pipe.accept_torn_update() and not pipe.accept_torn_update()
        pipe.evaluate(*batch())


def test_regression_inputs_in_other_bits_than_float64_have_the_remedy():
    """PyTorch's error of the first product said nothing of the pipeline's dtype."""
    own, (x, y) = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), batch()
    with pipeline(own, dtype=torch.float64) as pipe:
        with pytest.raises(RuntimeError, match="same dtype") as found:
            pipe.train_step(x, y)
    assert any(".double()" in note for note in found.value.__notes__)
    with gpipe.Pipeline(own, x.double(), dtype=torch.float64) as pipe:
        assert pipe(x.double()).dtype == torch.float64


def test_a_buffer_that_a_forward_converts_is_no_change():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, float("nan")], dtype=torch.float64))

        def forward(self, x):
            self.scale = self.scale.to(x)
            return x * self.scale[0]

    own = nn.Sequential(nn.Linear(6, 6), Scales(), nn.Linear(6, 3))
    with pipeline(own, optimizer=None, dtype=torch.float32) as pipe:
        assert torch.equal(pipe(batch()[0]), own(batch()[0]))


def test_verify_finds_python_state():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    own = nn.Sequential(nn.Linear(6, 6), Counter(), nn.Linear(6, 3))


    with pytest.warns(UserWarning, match="layer '1': its forward changes calls from"):
        with pytest.raises(VerificationError, match="differs between"):
            gpipe.verify(own, batch()[0], remats=["never", "always"])
    found = gpipe.verify(model(), batch()[0], [1, 2, 4, 50])
    assert found.runs == ["K=1 1f1b unless-adjacent", "K=2 1f1b unless-adjacent",
                          "K=4 1f1b unless-adjacent"] and found.compared > 20


def test_regression_verify_cuts_for_every_schedule():
    """Those with several stages on a device, except "interleaved", had too few stages."""
    layers = [nn.Linear(6, 6) for _ in range(8)]
    schedules = ["zb-v", "v-half", "v-min", "interleaved:2", "interleaved-zb:2", "breadth-first:2",
                 "breadth-first", "interleaved-zb:4"]
    found = gpipe.verify(nn.Sequential(*layers), batch()[0], [1, 2], schedules=schedules)
    assert len(found.runs) == 2 * len(schedules)


def test_every_policy_and_several_threads():
    layers = [nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 6))
              for _ in range(4)]
    own = nn.Sequential(*layers)
    x, y = torch.randn(32, 6), torch.randn(32, 6)
    remats = ["offload", "keep:1", "segments:2", "selective", "never"]
    found = gpipe.verify(own, x, [1, 2], schedules=["1f1b"], remats=remats)
    assert len(found.runs) == 2 * len(remats)

    def trained(stages):
        copied = copy.deepcopy(own)
        with gpipe.Pipeline(copied, x, stages=stages, threads=2, micro_batches=2,
                            loss=nn.MSELoss(),
                            optimizer=torch.optim.SGD(copied.parameters(), 0.1)) as pipe:
            loss = pipe.train_step(x, y).loss
        return loss, copied.state_dict()

    one, two = trained(1), trained(2)
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_regression_batch_norms_evaluate_in_every_dtype(dtype):
    """The running statistics stay in float32, and PyTorch refused them beside weights of fewer
    bits."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3),
                        nn.BatchNorm1d(3, affine=False))
    x, y = torch.randn(8, 2, 4, 4), torch.randn(8, 3)
    with gpipe.Pipeline(own, x, stages=2, micro_batches=2, loss=nn.MSELoss(), dtype=dtype,
                        optimizer=torch.optim.SGD(own.parameters(), 0.1)) as pipe:
        for _ in range(2):
            predicted, loss = pipe.predict(x), pipe.evaluate(x, y).loss
            own.eval()
            with torch.no_grad():
                called, expected = pipe(x), own(x)
            with_gradients = pipe(x).detach()
            own.train()
            assert torch.equal(called.float(), predicted)
            assert torch.equal(with_gradients.float(), predicted)
            # Outputs are about 1, after five roundings of at most eps / 2 each, of sums of up to 18
            # products.
            bound = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(predicted, expected, rtol=bound, atol=bound)
            assert loss == pytest.approx(nn.functional.mse_loss(expected, y).item(), rel=bound)
            pipe.train_step(x, y)
        own[1].eval()  # frozen statistics
        before = own[1].running_mean.clone()
        pipe.train_step(x, y)
        assert torch.equal(own[1].running_mean, before)


def test_a_generator_of_the_users_own_is_refused():
    class Draws(nn.Module):
        def forward(self, x):
            return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    with pipeline(nn.Sequential(nn.Linear(6, 3), Draws()), balance=[1, 1]) as pipe:
        with pytest.raises(RuntimeError, match="is given a generator"):
            pipe.train_step(*batch())


def test_settings_are_checked_before_anything_runs():
    own = model()
    refused("stages=0: give a whole number", own, stages=0)
    refused("micro_batches=2.5", own, micro_batches=2.5)
    refused("stages=3 and 2 devices", own, stages=3, devices=["cpu", "cpu"])
    refused("8 stages need at least 8 layers", own, stages=8, error=gpipe.Error)
    refused("schedule", own, schedule="1f2b")
    refused("re-materialization", own, remat="some")
    assert issubclass(REFUSED, ValueError)
    refused("torch.int32", own, dtype=torch.int32)
    refused("no device", own, devices=["tpu"])
    refused("holds no tensor", own, example=3)
    refused("memory_cap='2GiB': give bytes", own, memory_cap="2GiB")
    refused("clip_norm='a': give a number", own, clip_norm="a")
    refused("balance='auto': give the number of layers", own, stages=2, balance="auto")
    refused("timeout=-1: give seconds above 0", own, timeout=-1)
    refused("timeout=1e.19: give .* at most 366 days", own, timeout=1e19)
    refused("timeout=inf: give .* at most 366 days", own, timeout=float("inf"))
    refused("seed=-1: give a whole number from 0 to 18446744073709551615", own, seed=-1)
    refused("seed=18446744073709551616: give", own, seed=2 ** 64)
    refused("clip_norm=-1: give a number above 0", own, clip_norm=-1)
    refused("dtype='bfloat16': use torch.float32", own, dtype="bfloat16")
    refused("the model is a list: give an nn.Sequential", [nn.Linear(6, 6)])
    refused("the model is compiled", torch.compile(own))
    with torch.inference_mode():
        inside = nn.Sequential(nn.Linear(6, 6))
    refused("'0.weight' was made in torch.inference_mode", inside)
    refused("MSELoss is a class: give a loss, MSELoss()", own, loss=nn.MSELoss)
    refused("clip_norm= needs optimizer=", own, clip_norm=1.0)
    refused("average= needs optimizer=", own, average=0.9)
    refused("devices='cpu': give a list", own, devices="cpu")
    refused("schedule=None", own, schedule=None)
    refused("PyTorch sees . GPUs", own, devices=["cuda:99"])
    refused("give an optimizer of torch.optim", own, optimizer=torch.optim.SGD)
    refused("is no nn.Sequential", nn.Linear(6, 2))
    for parts, match in [(["0", torch.relu], "a function goes into a module of your own"),
                         (["0", "blocks"], "'blocks.\\*' stands for its children"),
                         (["0"], "in no part of the sequence: 'blocks.0.weight' and 1 more"),
                         (["9"], "has no")]:
        whole = nn.Module()
        whole.add_module("0", nn.Linear(6, 6))
        whole.blocks = nn.ModuleList([nn.Linear(6, 6)])
        with pytest.raises(REFUSED, match=match):
            gpipe.sequence(whole, parts)
    twice = gpipe.sequence(own, ["0", *map(str, range(len(own)))])
    refused("two layers are named '0': in gpipe.sequence", twice)
    refused("has no layers", nn.Sequential())
    mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2).double())
    refused("give dtype=", mixed)
    with pipeline(own) as pipe:
        x, y = batch()
        for call, match in [
            (lambda: pipe.train_step((x, x), y), "the input is"),
            (lambda: pipe.train_step(x[:, :3], y), "shape|size|mat1"),
            (lambda: pipe.train_step(x.numpy(), y), "the input is 'ndarray', the example was"),
            (lambda: pipe.train_step(x, y[:4]), "samples"),
            (lambda: pipe.train_step(x, None), "holds no tensor"),
            (lambda: pipe.load("/nowhere"), "nowhere"),
        ]:
            with pytest.raises((gpipe.Error, RuntimeError), match=match):
                call()
        with pytest.raises(REFUSED, match="give Pipeline\\(keep_gradients=True\\)"):
            pipe.gradients()
        with torch.inference_mode():
            inside = batch()
            evaluated = pipe.evaluate(*inside).loss
            predicted = pipe.predict(inside[0])
        assert evaluated == pipe.evaluate(x, y).loss
        assert torch.equal(predicted, pipe.predict(x))
        with pytest.raises(REFUSED, match="autocast does not reach"):
            with torch.autocast("cpu", torch.bfloat16):
                pipe.train_step(x, y)
        own.eval()
        with pytest.raises(REFUSED, match="evaluation mode"):
            pipe.train_step(x, y)
        own.train()
        own[0].weight = nn.Parameter(own[0].weight.detach().clone())
        with pytest.raises(REFUSED, match="'0.weight' is not the tensor"):
            pipe.train_step(x, y)


def test_modes_of_submodules_are_respected():
    own = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
    own[1].eval()
    with pipeline(own) as pipe:
        pipe.train_step(*batch())
        assert own[0].training and not own[1].training
        assert torch.equal(own[1].running_mean, torch.zeros(12))
        own.train()
        pipe.train_step(*batch())
        pipe.evaluate(*batch())
        assert own[1].training and not torch.equal(own[1].running_mean, torch.zeros(12))
    assert int(own[1].num_batches_tracked) == 1


def test_what_a_forward_keeps_at_its_first_call_has_values():
    """Shapes are inferred by calling it on tensors without values, which it must not keep."""
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.table = None, {}
            self.register_buffer("scale", None)

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.linspace(0, 1, x.size(1))
            if self.scale is None:
                self.scale = torch.full((x.size(1),), 2.0)
            key = x.size(1)
            if key not in self.table:
                self.table[key] = torch.ones(key)
            return x * self.mask * self.scale * self.table[key]

    own = nn.Sequential(nn.Linear(6, 6), Keeps(), nn.Linear(6, 3))
    x, y = batch()
    with pipeline(own, stages=3) as pipe:
        assert torch.allclose(pipe.predict(x), own(x), rtol=1e-6)
        pipe.train_step(x, y)


def test_what_a_pipeline_would_leave_out_is_refused():
    class Activated(nn.BatchNorm1d):
        def forward(self, x):
            return torch.relu(super().forward(x))

    refused("a batch norm with a forward of its own", nn.Sequential(nn.Linear(6, 6), Activated(6)))
    own = model()
    own.register_forward_hook(lambda *_: None)
    refused("the model itself has hooks", own)
    tokens = torch.zeros(4, 3, dtype=torch.long)
    refused("max_norm", nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), tokens)
    refused("sparse", nn.Sequential(nn.Embedding(5, 4, sparse=True)), tokens)
    refused("TorchScript", nn.Sequential(torch.jit.script(nn.Linear(6, 6))))
    refused("meta device", nn.Sequential(nn.Linear(6, 6, device="meta")))
    with pipeline(model()) as pipe:
        x, y = batch()
        with pytest.raises(REFUSED, match=r"output is \[., 3\], the target \[., 1\]"):
            pipe.train_step(x, y[:, :1])
        pipe.model[0].weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(REFUSED, match="'0.weight' has a gradient hook"):
            pipe.train_step(x, y)


def test_parameters_that_no_layer_registers_are_refused():
    class Borrows(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def forward(self, x):
            return x @ self.other[0].weight

    first = nn.Linear(6, 6, bias=False)
    free = nn.Parameter(torch.ones(3))
    x, y = batch()
    with pipeline(nn.Sequential(first, Borrows(first), nn.Linear(6, 3))) as pipe:
        with pytest.raises(REFUSED, match="not registered in it"):
            pipe.train_step(x, y)
    loss = gpipe.Loss(lambda output, target: ((output * free - target) ** 2).sum(), torch.numel)
    with pipeline(model(), loss=loss) as pipe:
        with pytest.raises(REFUSED, match="the loss uses a parameter"):
            pipe.train_step(x, y)


def test_layers_whose_first_axis_is_time_are_refused():
    x = torch.randn(8, 5, 6)
    for layer in (nn.TransformerEncoderLayer(6, 2, 12), nn.LSTM(6, 6)):
        refused("batch_first=True", nn.Sequential(layer, nn.Identity()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_the_user_changes_are_seen_or_refused(dtype):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x):
            return x * self.scale

    own = nn.Sequential(nn.Linear(6, 6), Scales(), nn.Linear(6, 3))
    x = batch()[0]
    with gpipe.Pipeline(own, x, stages=3, dtype=dtype) as pipe:
        first = pipe.predict(x)
        own[1].scale.zero_()
        if dtype == torch.float32:
            assert torch.allclose(pipe.predict(x), own[2].bias.expand(8, 3))
        else:
            with pytest.raises(REFUSED, match="the buffer '1.scale' has changed"):
                pipe.predict(x)
            return
        own[1].scale = torch.ones(6)
        with pytest.raises(REFUSED, match="the buffer '1.scale' has changed"):
            pipe.predict(x)
    assert not torch.equal(first, own[2].bias.expand(8, 3))


def test_an_output_without_samples_is_refused_where_it_would_be_repeated():
    class Means(nn.Module):
        def forward(self, x):
            return x, x.mean(0)

    x = batch()[0]
    for micro_batches in (1, 4):
        own = nn.Sequential(nn.Linear(6, 6), Means())
        with gpipe.Pipeline(own, x, stages=2, micro_batches=micro_batches) as pipe:
            if micro_batches == 1:
                assert pipe.predict(x)[1].shape == (6,)
                continue
            for call in (pipe.predict, pipe):
                with pytest.raises(REFUSED, match=r"output of shape \[6\] has no sample axis"):
                    call(x)


def test_attributes_of_the_users_own_modules_are_not_pytorchs():
    """A block that turns its axes itself, and a module with a `sparse` of its own, are fine."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.sparse = nn.MultiheadAttention(6, 2), True

        def forward(self, x):
            time_first = x.transpose(0, 1)
            return self.self_attn(time_first, time_first, time_first)[0].transpose(0, 1)

    class Detaches(nn.Module):
        """The gradient of an energy, as a layer."""

        def forward(self, x):
            inside = x.detach().requires_grad_()
            with torch.enable_grad():
                force, = torch.autograd.grad((inside ** 3).sum(), inside, create_graph=True)
            return x + force

    own = nn.Sequential(Block(), Detaches(), nn.Linear(6, 3))
    x = torch.randn(8, 5, 6)
    with gpipe.Pipeline(own, x, stages=3, micro_batches=2) as pipe:
        torch.testing.assert_close(pipe(x), own(x))
    refused("batch_first=True", nn.Sequential(nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12), 2), nn.Identity()), x)


def test_verify_compares_with_the_module_itself():
    found = gpipe.verify(smooth(), batch(dtype=torch.float64)[0], [1, 2])
    assert found.plain == ["outputs", "gradients"]
    assert "the module itself gives the same outputs and gradients" in str(found)
    assert gpipe.verify(model(), batch()[0], [1]).plain == ["outputs"], "dropout"

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 6)

        def forward(self, x):
            return self.lstm(x)[0]

    class Centers(nn.Module):
        """Depends on the other samples, in evaluation too."""

        def forward(self, x):
            return x - x.mean(0)

    for layer, x in ((TimeFirst(), torch.randn(8, 4, 6)), (Centers(), batch()[0])):
        with pytest.warns(UserWarning, match="outputs depend on the number of micro-batches"):
            gpipe.verify(nn.Sequential(nn.Linear(6, 6), layer), x, [1, 2])

    class Knows(nn.Module):
        """Computes something else on the stages' threads."""

        def forward(self, x):
            return x if threading.current_thread() is threading.main_thread() else 2 * x

    with pytest.raises(VerificationError, match="outputs of a pipeline of one micro-batch differ"):
        gpipe.verify(nn.Sequential(nn.Linear(6, 6), Knows()), batch()[0], [1, 2])


def test_a_layer_may_stash_and_pop_by_itself():
    inside = nn.Sequential(Stash("a"), nn.Linear(6, 6), Pop("a"))
    own = nn.Sequential(nn.Linear(6, 6), inside, nn.Linear(6, 3)).double()
    x = batch(dtype=torch.float64)[0]
    with gpipe.Pipeline(own, x, stages=3, micro_batches=2, remat="always") as pipe:
        torch.testing.assert_close(pipe(x), own(x), rtol=1e-12, atol=1e-12)
        pipe(x).sum().backward()
        gradient, inside[1].weight.grad = inside[1].weight.grad, None
        own(x).sum().backward()
        torch.testing.assert_close(gradient, inside[1].weight.grad, rtol=1e-10, atol=1e-12)


def test_constants_between_layers_may_be_arrays_and_nan():
    class Gives(nn.Module):
        def forward(self, x):
            return x, np.arange(3.0), float("nan")

    class Takes(nn.Module):
        def forward(self, given):
            return given[0] * given[1].sum()

    own = nn.Sequential(nn.Linear(6, 6), Gives(), Takes())
    x = batch()[0]
    with gpipe.Pipeline(own, x, stages=3, micro_batches=2) as pipe:
        torch.testing.assert_close(pipe(x), own(x))


def test_regression_a_module_that_is_used_twice_is_two_parts():
    """`layers.*` left out its further uses, so that another network was trained."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6)] * 3)

        def forward(self, x):
            for own in self.layers:
                x = own(x)
            return x

    net = Net()
    parts = gpipe.sequence(net, ["layers.*"])
    x, _ = batch()
    assert len(parts.layers) == 3
    with gpipe.Pipeline(parts, x, stages=2) as pipe:
        assert torch.equal(pipe.predict(x), net(x))


class Returns(nn.Module):
    """Uses what an in-place activation returns."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.linear(x)) + x


class Changes(Returns):
    """Goes on with what the activation has changed."""

    def forward(self, x):
        hidden = self.linear(x)
        self.relu(hidden)
        return hidden


class Dropped(Returns):
    def forward(self, x):
        hidden = self.linear(x)
        nn.functional.dropout(hidden, 0.5, self.training, inplace=True)
        return hidden


def test_regression_a_layer_that_depends_on_a_change_in_place_is_refused():
    """Activations run out of place, so that the ReLU was lost in silence."""
    x, _ = batch()
    own = nn.Sequential(Returns(), nn.Linear(6, 3))
    with gpipe.Pipeline(own, x, stages=2) as pipe:
        assert torch.equal(pipe.predict(x), own(x))
    with gpipe.Pipeline(nn.Sequential(Changes(), nn.Linear(6, 3)), x, stages=2) as pipe:
        with pytest.raises(gpipe.errors.SettingError, match="depends on what ReLU"):
            pipe.predict(x)


class DroppedByModule(Returns):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        hidden = self.linear(x)
        self.drop(hidden)
        return hidden


@pytest.mark.parametrize("drops", [Dropped, DroppedByModule])
def test_regression_dropout_in_place_drops(drops):
    x, _ = batch()
    own = nn.Sequential(drops())
    with gpipe.Pipeline(own, x, micro_batches=2) as pipe:
        dropped = pipe(x)
        zeros = (dropped == 0).float().mean()
        assert 0.2 < zeros < 0.8
        dropped.sum().backward()
    assert own[0].linear.weight.grad.isfinite().all()


def test_dropout_in_place_may_come_first():
    x, _ = batch()
    layers = [nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 6)) for _ in range(3)]
    with gpipe.Pipeline(nn.Sequential(*layers), x, stages=2, micro_batches=2) as pipe:
        before = x.clone()
        pipe(x).sum().backward()
        assert torch.equal(x, before)


def test_regression_a_profile_has_the_modules_values():
    """It trained with zeros, of which a norm's quotient is no number."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3))
    with pipeline(own, micro_batches=2) as pipe:
        before = values(own)
        assert pipe.profile(*batch(), micro_batches=[2], schedules=["1f1b"], steps=2) is not None
        assert_same(values(own), before)


def test_regression_a_sequence_has_the_mode_of_its_model():
    """A model in evaluation mode was trained, and the remedy for it did not help."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    net = Net()
    parts = gpipe.sequence(net, ["first", "last"])
    with pipeline(parts) as pipe:
        net.eval()
        assert not parts.training
        with pytest.raises(REFUSED, match="evaluation mode"):
            pipe.train_step(*batch())
        parts.train()
        assert net.training and pipe.train_step(*batch()).step == 1


def test_regression_dropout_in_place_drops_where_nothing_is_trained():
    """What the layer itself had made counted as its input, and the mask went into a tensor that
    nobody used."""
    x, _ = batch()
    before = x.clone()
    for drops in (Dropped, DroppedByModule):
        own = nn.Sequential(drops()).requires_grad_(False)
        with gpipe.Pipeline(own, x, micro_batches=2) as pipe:
            zeros = (pipe(x) == 0).float().mean()
            assert 0.2 < zeros < 0.8, drops
    # A layer's input stays as it was.
    with gpipe.Pipeline(nn.Sequential(nn.Dropout(0.5, inplace=True)), x) as pipe:
        assert 0.2 < (pipe(x) == 0).float().mean() < 0.8
    assert torch.equal(x, before)


def test_regression_a_buffer_that_a_refused_forward_has_changed_is_restored():
    """The module kept the change of a step that had failed."""
    own = nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 3))
    before = values(own)
    with pipeline(own) as pipe:
        for _ in range(2):
            with pytest.raises(REFUSED, match="changes its buffer 'count'"):
                pipe.train_step(*batch())
    assert_same(values(own), before)


def test_regression_an_output_without_samples_is_refused_for_every_number_of_samples():
    """Only mini-batches of the example's size were looked at. For others, the outputs of the
    micro-batches were put together in silence."""
    class Means(nn.Module):
        def forward(self, x):
            return x, x.mean(0)

    own = nn.Sequential(nn.Linear(6, 6), Means())
    with gpipe.Pipeline(own, batch(8)[0], stages=2, micro_batches=2) as pipe:
        for samples in (6, 16):
            for call in (pipe.predict, pipe):
                with pytest.raises(REFUSED, match=r"output of shape \[6\] has no sample axis"):
                    call(batch(samples)[0])
        assert pipe.predict(batch(1)[0])[1].shape == (6,)  # one micro-batch


def test_regression_samples_are_those_of_an_input_that_has_some():
    """A first input without samples was taken for the samples, so outputs were refused."""
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, inputs):
            mask, x = inputs
            return self.relu(x @ mask)

    torch.manual_seed(0)
    mask, x = torch.randn(5, 5), torch.randn(8, 5)
    own = nn.Sequential(Masked(), nn.Linear(5, 3))
    with gpipe.Pipeline(own, (mask, x), stages=2, micro_batches=2, shared_inputs=[0]) as pipe:
        for samples in (8, 6, 3):
            inputs = (mask, x[:samples])
            assert torch.allclose(pipe.predict(inputs), own[1]((x[:samples] @ mask).relu()))


def test_an_output_may_have_several_rows_for_each_sample():
    """Their number may depend on the other axes of the inputs."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 6), nn.Flatten(0, 1))
    with gpipe.Pipeline(own, torch.randn(8, 5, 6), stages=2, micro_batches=2) as pipe:
        for shape in [(8, 5, 6), (6, 5, 6), (8, 7, 6), (6, 7, 6)]:
            x = torch.randn(shape)
            torch.testing.assert_close(pipe.predict(x), own(x))


def test_regression_a_tie_that_ends_at_its_second_use_is_noticed():
    """Only the first use was looked at. The stages went on with the tie, and the new parameter
    never changed."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    own = nn.Sequential(first, nn.Tanh(), last)
    x = batch()[0]
    with gpipe.Pipeline(own, x, stages=2) as pipe:
        pipe.predict(x)
        last.weight = nn.Parameter(last.weight.detach().clone())
        with pytest.raises(REFUSED, match="'2.weight' is not the tensor"):
            pipe.predict(x)
