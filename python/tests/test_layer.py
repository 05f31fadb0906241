"""A pipeline as a part of the user's own computation."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from common import assert_same, batch, model, smooth, values
from torch import nn

import gpipe
from gpipe.compat import GPipe


def made(own, **settings):
    x, _ = batch(dtype=next(own.parameters()).dtype)
    return gpipe.Pipeline(own, x, **{"stages": 2, "micro_batches": 1, **settings})


def test_gradients_of_inputs_and_parameters_are_pytorchs():
    own = smooth()
    plain = copy.deepcopy(own)
    x = batch(dtype=torch.float64)[0].requires_grad_()
    other = x.detach().clone().requires_grad_()
    with made(own, stages=3, micro_batches=4) as pipe:
        for _ in range(2):  # gradients add up
            ((pipe(x * 2) ** 2).sum() + x.sum()).backward()
            ((plain(other * 2) ** 2).sum() + other.sum()).backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-12)
    for a, b in zip(own.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_one_micro_batch_has_pytorchs_bits():
    own = smooth(torch.float32)
    plain = copy.deepcopy(own)
    x, y = batch()
    with made(own) as pipe:
        nn.functional.mse_loss(pipe(x), y).backward()
        nn.functional.mse_loss(plain(x), y).backward()
        for a, b in zip(own.parameters(), plain.parameters()):
            assert torch.equal(a.grad, b.grad)


def test_batch_norms_are_pytorchs():
    own = model()
    own[5].p = 0.0
    plain = copy.deepcopy(own)
    x, y = batch()
    with made(own) as pipe:
        nn.functional.mse_loss(pipe(x), y).backward()
        nn.functional.mse_loss(plain(x), y).backward()
        for a, b in zip(own.parameters(), plain.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
        own.eval()
        plain.eval()
        assert torch.allclose(pipe(x), plain(x), rtol=1e-6)
    assert int(own[3].num_batches_tracked) == 1
    torch.testing.assert_close(own[3].running_var, plain[3].running_var)


def test_the_users_optimizer_trains_the_modules_parameters():
    def trained(stages):
        own = model()
        optimizer = torch.optim.RAdam(own.parameters(), 0.01)
        with made(own, stages=stages, micro_batches=4) as pipe:
            for step in range(3):
                x, y = batch(seed=step)
                optimizer.zero_grad()
                nn.functional.mse_loss(pipe(x), y).backward()
                optimizer.step()
        return values(own)

    assert_same(trained(1), trained(3))


def test_a_gan_step_goes_through_two_open_forwards():
    own = smooth()
    plain = copy.deepcopy(own)
    (a, _), (b, _) = batch(dtype=torch.float64), batch(seed=2, dtype=torch.float64)
    with made(own, micro_batches=2) as pipe:
        (pipe(a).sum() - pipe(b).pow(2).sum()).backward()
        (plain(a).sum() - plain(b).pow(2).sum()).backward()
        for x, y in zip(own.parameters(), plain.parameters()):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)


def test_without_gradients_nothing_is_kept():
    with made(smooth(), open_forwards=1) as pipe:
        x = batch(dtype=torch.float64)[0]
        for _ in range(4):
            with torch.no_grad():
                assert not pipe(x).requires_grad
        for _ in range(4):
            assert pipe(x).requires_grad  # dropped at once


def test_a_backward_runs_once():
    with made(smooth()) as pipe:
        y = pipe(batch(dtype=torch.float64)[0]).sum()
        y.backward(retain_graph=True)
        with pytest.raises(gpipe.errors.SettingError, match="retain_graph"):
            y.backward()
        pipe(batch(dtype=torch.float64)[0]).sum().backward()


@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_regression_a_gradient_of_a_gradient_is_an_error(of):
    """A gradient penalty had no effect: the gradient of the inputs was a constant."""
    own = smooth()
    x, _ = batch(dtype=torch.float64)
    x.requires_grad_()
    with gpipe.Pipeline(own, x.detach(), stages=2, micro_batches=2) as pipe:
        output = pipe(x)
        gradient, = torch.autograd.grad(output.sum(), x, create_graph=True)
        expected, = torch.autograd.grad(own(x).sum(), x)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        penalty = (gradient ** 2).sum()
        wanted = x if of == "inputs" else list(own.parameters())
        with pytest.raises(RuntimeError, match="no gradient of a gradient"):
            torch.autograd.grad(penalty, wanted, retain_graph=True)
        with pytest.raises(RuntimeError, match="no gradient of a gradient"):
            (pipe(x).sum() + penalty).backward()
        # Without one, create_graph does no harm.
        torch.autograd.grad(pipe(x).sum(), list(own.parameters()), create_graph=True)


def test_frozen_parameters_get_no_gradient():
    own = smooth()
    own[0].requires_grad_(False)
    with made(own) as pipe:
        pipe(batch(dtype=torch.float64)[0]).sum().backward()
    assert own[0].weight.grad is None and own[2].weight.grad is not None


def test_parameters_that_are_frozen_later_get_no_gradient():
    own = nn.Sequential(nn.Dropout(0.0), *smooth())
    x = batch(dtype=torch.float64)[0]
    with made(own) as pipe:
        for frozen in (False, True, False, True):
            own.zero_grad()
            own.requires_grad_(not frozen)
            inputs = x.clone().requires_grad_()
            pipe(inputs).sum().backward()
            assert (own[1].weight.grad is None) == frozen and inputs.grad is not None
        own[1].requires_grad_(True)
        kept = pipe(x.clone().requires_grad_())
        own[1].requires_grad_(False)
        with pytest.raises(gpipe.errors.SettingError, match="backward: 1; .* drop their outputs"):
            pipe(x)
        own[1].requires_grad_(True)
        kept.sum().backward()
        own[1].requires_grad_(False)
        assert own[1].weight.grad is not None and own[3].weight.grad is None
        assert not pipe(x).requires_grad


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_backward_after_an_update_is_refused(dtype):
    own = smooth(torch.float32)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    x = batch()[0]
    with made(own, dtype=dtype) as pipe:
        first, second = pipe(x).sum(), pipe(x).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="'0.weight' has changed since the forward"):
            second.backward()
        pipe(x).sum().backward()


def test_a_step_waits_for_no_open_forward():
    own = smooth()
    x, y = batch(dtype=torch.float64)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    with made(own, loss=nn.MSELoss(), optimizer=optimizer) as pipe:
        kept = pipe(x)
        with pytest.raises(gpipe.errors.SettingError, match="backward: 1; .* before you train"):
            pipe.train_step(x, y)
        del kept
        assert pipe.train_step(x, y).step == 1


def test_dropout_that_stays_on_in_evaluation_draws():
    """As people estimate uncertainty."""
    own = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity())
    x = torch.ones(8, 6)
    with gpipe.Pipeline(own, x, stages=2) as pipe, torch.no_grad():
        own.eval()
        assert torch.equal(pipe(x), x)
        own[1].train()
        first, second = pipe(x), pipe(x)
        assert set(first.unique().tolist()) == {0.0, 2.0} and not torch.equal(first, second)
        assert torch.equal(pipe.predict(x), x)


def test_tied_weights_follow_the_users_updates():
    def trained(stages):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        head.weight = embedding.weight
        own = nn.Sequential(embedding, nn.Tanh(), nn.Linear(8, 8), head).double()
        head.weight = embedding.weight
        optimizer = torch.optim.NAdam(own.parameters(), 0.05)
        tokens = torch.randint(9, (4, 5))
        losses = []
        with gpipe.Pipeline(own, tokens, stages=stages, micro_batches=2) as pipe:
            for _ in range(3):
                optimizer.zero_grad()
                loss = pipe(tokens).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, values(own)

    one, two = trained(1), trained(2)
    assert one[0] == two[0]
    assert_same(one[1], two[1])


def test_compat_has_torchgpipes_names():
    own = model()
    pipe = GPipe(own, [3, 4], devices=["cpu", "cpu"], chunks=4)
    assert pipe.balance == [3, 4] and pipe.chunks == 4 and pipe.checkpoint == "except_last"
    assert list(pipe) == list(own) and pipe[-1] is own[-1] and len(pipe) == 7
    assert "partitions.1.4.weight" not in pipe.state_dict()
    assert "partitions.1.6.weight" in pipe.state_dict()
    assert pipe.module.state_dict().keys() == own.state_dict().keys()
    other = GPipe(model(seed=3), [3, 4], devices=["cpu", "cpu"])
    other.load_state_dict(pipe.state_dict())
    assert_same(values(other.module), values(own))
    other = GPipe(model(seed=3), [3, 4], devices=["cpu", "cpu"])
    other.load_state_dict(own.state_dict())
    assert_same(values(other.module), values(own))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("deferred", [False, True])
def test_compat_trains_as_a_loop_over_chunks(checkpoint, deferred):
    own = model()
    own[5].p = 0.0
    plain = copy.deepcopy(own)
    pipe = GPipe(own, [2, 2, 3], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint,
                 deferred_batch_norm=deferred)
    ours = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    seen = []
    plain[3].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    mean, variance = torch.zeros(12), torch.ones(12)
    for step in range(2):
        x, y = batch(seed=step)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        nn.functional.mse_loss(pipe(x), y).backward()
        for a, b in zip(x.chunk(4), y.chunk(4)):
            (nn.functional.mse_loss(plain(a), b) / 4).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
        whole = torch.cat(seen)
        seen.clear()
        mean = 0.9 * mean + 0.1 * whole.mean(0)
        variance = 0.9 * variance + 0.1 * whole.var(0)
    # Once for each mini-batch, from all of it.
    of_mini_batches = {"3.running_mean": mean, "3.running_var": variance,
                       "3.num_batches_tracked": torch.tensor(2)}
    for name, value in plain.state_dict().items():
        if deferred:
            value = of_mini_batches.get(name, value)
        torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    pipe.eval()
    plain.load_state_dict(own.state_dict())
    plain.eval()
    torch.testing.assert_close(pipe(x), plain(x), rtol=1e-5, atol=1e-6)
    assert not own.training


def test_compat_is_built_again_for_another_dtype():
    own = model()
    pipe = GPipe(own, [3, 4], devices=["cpu", "cpu"], chunks=2)
    assert pipe(batch()[0]).dtype == torch.float32
    pipe.double()
    assert pipe(batch(dtype=torch.float64)[0]).dtype == torch.float64
    with pytest.raises(TypeError, match="denied to move"):
        pipe.cuda()


def test_compat_refuses_what_cannot_be_had():
    from gpipe import compat

    with pytest.raises(gpipe.errors.SettingError, match="is_checkpointing"):
        compat.is_checkpointing()
    with pytest.raises(TypeError, match="nn.Sequential"):
        GPipe(nn.Linear(2, 2), [1])
    assert sum(compat.balance.balance_by_time(2, model(), batch()[0])) == 7
    # Sizes of parameters decide: the last layer is the largest.
    large = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4000))
    assert compat.balance.balance_by_size(2, large, torch.zeros(2, 4)) == [3, 1]


def test_hooks_of_parameters_run_once():
    own = smooth()
    plain = copy.deepcopy(own)
    for layers in (own, plain):
        layers[0].weight.register_hook(lambda gradient: gradient * 5)
    x, y = batch(dtype=torch.float64)
    with made(own, micro_batches=2) as pipe:
        nn.functional.mse_loss(pipe(x), y).backward()
        nn.functional.mse_loss(plain(x), y).backward()
    torch.testing.assert_close(own[0].weight.grad, plain[0].weight.grad, rtol=1e-10, atol=1e-12)


def test_regression_rows_that_are_masked_whole_are_pytorchs():
    """With dropout in attention they were NaN."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)

        def forward(self, state):
            x, mask = state
            return self.block(x, src_key_padding_mask=mask), mask

    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[3] = True
    x = torch.randn(8, 5, 6)
    with gpipe.Pipeline(nn.Sequential(Block(), Block()), (x, mask), stages=2,
                        micro_batches=2) as pipe:
        assert pipe((x, mask))[0].isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_regression_a_checkpoint_that_was_imported_by_name_is_refused(reentrant):
    """Its recomputation drew another dropout, where it was imported before gpipe."""
    imported = torch.utils.checkpoint.checkpoint.__wrapped__

    class Recomputed(nn.Module):
        def __init__(self, checkpoint):
            super().__init__()
            self.linear, self.checkpoint = nn.Linear(6, 6), checkpoint

        def inside(self, x):
            return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5, True)

        def forward(self, x):
            return self.checkpoint(self.inside, x, use_reentrant=reentrant)

    x = batch(dtype=torch.float64)[0]
    with made(nn.Sequential(nn.Linear(6, 6), Recomputed(imported)).double()) as pipe:
        with pytest.raises(gpipe.errors.SettingError, match="import gpipe first"):
            pipe(x)
    if not reentrant:
        own = nn.Sequential(nn.Linear(6, 6), Recomputed(torch.utils.checkpoint.checkpoint)).double()
        with made(own) as pipe:
            y = pipe(x)
            y.sum().backward()
        hidden = torch.tanh(own[1].linear(own[0](x)))
        expected = ((y != 0) * 2 * (1 - hidden ** 2)).sum(0)
        torch.testing.assert_close(own[1].linear.bias.grad, expected)


def test_inputs_of_inference_mode_work():
    own = smooth()
    x, y = batch(dtype=torch.float64)
    with made(own, loss=nn.MSELoss()) as pipe:
        expected, loss = pipe.predict(x), pipe.evaluate(x, y).loss
        with torch.inference_mode():
            a, b = x.clone(), y.clone()
            assert torch.equal(pipe.predict(a), expected) and pipe.evaluate(a, b).loss == loss
            with pytest.raises(gpipe.errors.SettingError, match="train outside of it"):
                pipe.accumulate(a, b)
        assert torch.equal(pipe.predict(a), expected)


def test_copies_of_compats_pipelines_build_their_own_stages():
    pipe = GPipe(model(), [3, 4], devices=["cpu", "cpu"], chunks=2)
    x = batch()[0]
    pipe.eval()
    expected = pipe(x)
    copied = copy.deepcopy(pipe)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert torch.equal(pipe(x), expected) and not torch.equal(copied(x), expected)
