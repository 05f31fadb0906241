"""Optimizers, schedulers and losses beside PyTorch's own."""

import pytest
import torch
from common import batch, model, pipeline, smooth, values
from torch import nn, optim

import gpipe

RULES = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam decoupled": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1,
                                           decoupled_weight_decay=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-6),
    "rmsprop with momentum": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.02, weight_decay=0.1),
}


def groups(own, rule):
    """Three groups, with rates and decays of their own."""
    biases = [value for name, value in own.named_parameters() if name.endswith("bias")]
    first = [own[0].weight]
    rest = [own[2].weight, own[4].weight]
    made = rule([{"params": rest}, {"params": biases, "weight_decay": 0.0},
                 {"params": first, "weight_decay": 0.3}])
    made.param_groups[2]["lr"] *= 0.25
    return made


def plain_step(own, optimizer, x, y, loss=None, clip=None):
    optimizer.zero_grad()
    value = (loss or nn.MSELoss())(own(x), y)
    value.backward()
    norm = nn.utils.clip_grad_norm_(own.parameters(), clip) if clip else None
    optimizer.step()
    return value, norm


def assert_close(a, b, relative=1e-10):
    """The contract in float64, against an unpipelined run."""
    norm = torch.sqrt(sum((own ** 2).sum() for own in b.values()))
    for name in a:
        bound = relative * torch.maximum(b[name].abs(), 1e-3 * norm)
        excess = ((a[name] - b[name]).abs() - bound).max().item()
        assert excess <= 0, f"{name} by {excess:.2e}"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_pytorchs(rule, grouped):
    def make(own):
        return groups(own, RULES[rule]) if grouped else RULES[rule](own.parameters())

    plain, own = smooth(), smooth()
    theirs = make(plain)
    with pipeline(own, optimizer=make(own), micro_batches=4, clip_norm=0.3) as pipe:
        for step in range(5):
            x, y = batch(7, seed=step, dtype=torch.float64)
            loss, norm = plain_step(plain, theirs, x, y, clip=0.3)
            report = pipe.train_step(x, y)
            assert report.loss == pytest.approx(loss.item(), rel=1e-10)
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-10)
    # Adafactor's epsilon for the norm of a gradient is the only constant that differs from step to
    # step; the contract's rounding holds for all.
    assert_close(values(own), values(plain))


SCHEDULERS = {
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "warm-up from 0": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2, 0.05],
                                                         total_steps=8, cycle_momentum=False),
    "different shares": lambda o: optim.lr_scheduler.LambdaLR(
        o, [lambda step: 1.0, lambda step: 0.5 ** step, lambda step: 1 + step]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_rates(name, recwarn):
    plain, own = smooth(), smooth()
    rule = RULES["sgd with momentum"]
    theirs, ours = groups(plain, rule), groups(own, rule)
    their_scheduler, our_scheduler = SCHEDULERS[name](theirs), SCHEDULERS[name](ours)
    with pipeline(own, optimizer=ours) as pipe:
        for step in range(5):
            x, y = batch(seed=step, dtype=torch.float64)
            plain_step(plain, theirs, x, y)
            report = pipe.train_step(x, y)
            assert report.lr == max(group["lr"] for group in ours.param_groups)
            their_scheduler.step()
            our_scheduler.step()
    assert_close(values(own), values(plain))
    assert not [own for own in recwarn if "lr_scheduler" in str(own.message)]


def refused(match, make):
    own = smooth()
    with pytest.raises(gpipe.errors.SettingError, match=match):
        pipeline(own, optimizer=make(own))


def test_what_has_no_counterpart_is_refused():
    refused("amsgrad=True", lambda m: optim.Adam(m.parameters(), amsgrad=True))
    refused("dampening=0.1", lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.1))
    refused("maximize=True", lambda m: optim.AdamW(m.parameters(), maximize=True))
    refused("centered=True", lambda m: optim.RMSprop(m.parameters(), centered=True))
    refused("eps=", lambda m: optim.Adafactor(m.parameters(), eps=(1e-8, 1e-3)))
    refused("NAdam.*accumulate", lambda m: optim.NAdam(m.parameters()))
    refused("in no group", lambda m: optim.SGD(m[0].parameters(), 0.1))
    refused("not the model's", lambda m: optim.SGD(smooth().parameters(), 0.1))
    refused("differ in more", lambda m: optim.Adam(
        [{"params": m[0].parameters()}, {"params": [*m[2].parameters(), *m[4].parameters()],
                                         "betas": (0.5, 0.9)}]))

    def stepped(m):
        made = optim.Adam(m.parameters())
        m(torch.zeros(1, 6, dtype=torch.float64)).sum().backward()
        made.step()
        return made

    refused("has made steps already", stepped)


def test_settings_that_change_between_steps_are_refused():
    own = smooth()
    optimizer = optim.AdamW(own.parameters())
    with pipeline(own, optimizer=optimizer) as pipe:
        x, y = batch(dtype=torch.float64)
        pipe.train_step(x, y)
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        before = values(own)
        with pytest.raises(gpipe.errors.SettingError, match="only lr and weight_decay"):
            pipe.train_step(x, y)
        optimizer.param_groups[0].update(betas=(0.9, 0.999), lr=float("nan"))
        with pytest.raises(gpipe.errors.SettingError, match="has lr=nan: give a number"):
            pipe.train_step(x, y)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), values(own).values()))


def test_regression_hooks_that_no_stage_calls_are_refused():
    """`accumulate` left out hooks of parameters, and nothing looked for other kinds."""
    own = smooth()
    x, y = batch(dtype=torch.float64)
    optimizer = optim.SGD(own.parameters(), 0.1)
    weight = own[2].weight
    with pipeline(own, optimizer=optimizer) as pipe:
        for hook in (lambda: weight.register_hook(lambda gradient: 0 * gradient),
                     lambda: weight.register_post_accumulate_grad_hook(lambda _: None)):
            handle = hook()
            for call in (pipe.train_step, pipe.accumulate):
                with pytest.raises(gpipe.errors.SettingError, match="'2.weight' has a gradient"):
                    call(x, y)
            handle.remove()
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            handle = register(lambda *_: None)
            with pytest.raises(gpipe.errors.SettingError, match="the optimizer has a step hook"):
                pipe.train_step(x, y)
            with pytest.raises(gpipe.errors.SettingError, match="the optimizer has a step hook"):
                pipeline(own, optimizer=optimizer)
            handle.remove()
        assert pipe.train_step(x, y).step == 1


def test_any_other_optimizer_works_through_accumulate():
    plain, own = smooth(), smooth()
    theirs, ours = optim.NAdam(plain.parameters(), 0.01), optim.NAdam(own.parameters(), 0.01)
    with pipeline(own, optimizer=None) as pipe:
        for step in range(4):
            x, y = batch(7, seed=step, dtype=torch.float64)
            plain_step(plain, theirs, x, y)
            ours.zero_grad()
            total = y.numel()
            pipe.accumulate(x[:4], y[:4], count=total)
            pipe.accumulate(x[4:], y[4:], count=total)
            ours.step()
        with pytest.raises(gpipe.errors.SettingError, match="no optimizer"):
            pipe.train_step(x, y)
    assert_close(values(own), values(plain))


def classes(shape, count, ignore=None):
    found = torch.randint(count, shape, generator=torch.Generator().manual_seed(3))
    if ignore is not None:
        found[0] = ignore
    return found


def outputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), (7, 3), classes((7,), 3)),
    "weights, smoothing, ignored": (
        nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1, ignore_index=-1), (7, 3),
        classes((7,), 3, -1)),
    "second axis": (nn.CrossEntropyLoss(ignore_index=0), (7, 3, 5), classes((7, 5), 3)),
    "probabilities": (nn.CrossEntropyLoss(), (7, 3), outputs(7, 3).softmax(-1)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), (7, 3), classes((7,), 3)),
    "nll": (nn.NLLLoss(WEIGHTS), (7, 3), classes((7,), 3)),
    "squared": (nn.MSELoss(), (7, 3), outputs(7, 3)),
    "absolute": (nn.L1Loss(), (7, 3), outputs(7, 3)),
    "smooth": (nn.SmoothL1Loss(beta=0.5), (7, 3), outputs(7, 3)),
    "huber": (nn.HuberLoss(delta=0.3), (7, 3), outputs(7, 3)),
    "logits": (nn.BCEWithLogitsLoss(), (7, 3), outputs(7, 3).sigmoid()),
    "poisson": (nn.PoissonNLLLoss(), (7, 3), outputs(7, 3).exp()),
    "soft margin": (nn.SoftMarginLoss(), (7, 3), outputs(7, 3).sign()),
    "hinge": (nn.HingeEmbeddingLoss(), (7, 3), outputs(7, 3).sign()),
    "margin": (nn.MultiMarginLoss(), (7, 3), classes((7,), 3)),
    # The classes of a sample, up to the first -1.
    "margin of several": (nn.MultiLabelMarginLoss(), (7, 3),
                          torch.tensor([[0, 2, -1]] * 4 + [[1, -1, -1]] * 3)),
    "probability": (nn.BCELoss(), (7, 3), outputs(7, 3).sigmoid()),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), (7, 3), outputs(7, 3).softmax(-1)),
    "mean divergence": (nn.KLDivLoss(), (7, 3), outputs(7, 3).softmax(-1)),
    "own": (lambda a, b: (((a - b) ** 4).sum(), b.numel()), (7, 3), outputs(7, 3)),
}


def test_every_loss_is_compared():
    assert {type(loss) for loss, *_ in LOSSES.values()} >= gpipe.loss.COUNTS.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_pytorchs(name):
    loss, shape, target = LOSSES[name]
    torch.manual_seed(0)
    last = nn.Unflatten(1, shape[1:])
    own = nn.Sequential(nn.Linear(6, 15 if len(shape) == 3 else 3), last).double()
    if name == "probability":
        own.append(nn.Sigmoid())
    x = batch(7, dtype=torch.float64)[0]
    if name == "own":
        expected = ((own(x) - target) ** 4).mean()
    else:
        expected = loss(own(x), target)
    expected.backward()
    gradients = {key: value.grad.clone() for key, value in own.named_parameters()}
    with pipeline(own, loss=loss, micro_batches=3, keep_gradients=True) as pipe:
        assert pipe.evaluate(x, target).loss == pytest.approx(expected.item(), rel=1e-12)
        report = pipe.train_step(x, target)
        assert report.loss == pytest.approx(expected.item(), rel=1e-12)
        assert_close(pipe.gradients(), gradients)


def test_classes_on_the_last_axis():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double()
    tokens, target = torch.randint(9, (4, 5)), torch.randint(9, (4, 5))
    expected = nn.CrossEntropyLoss()(own(tokens).flatten(0, 1), target.flatten()).item()
    optimizer = optim.SGD(own.parameters(), 0.0)
    with gpipe.Pipeline(own, tokens, stages=2, loss=nn.CrossEntropyLoss(), micro_batches=2,
                        optimizer=optimizer) as pipe:
        assert pipe.train_step(tokens, target).loss == pytest.approx(expected, rel=1e-12)
    # [4, 9, 9] and [4, 9] may mean both.
    tokens, target = torch.randint(9, (4, 9)), torch.randint(9, (4, 9))
    with gpipe.Pipeline(own, tokens, stages=2, loss=nn.CrossEntropyLoss()) as pipe:
        with pytest.raises(gpipe.errors.SettingError, match="LastAxis"):
            pipe.evaluate(tokens, target)
    with gpipe.Pipeline(own, tokens, stages=2, loss=gpipe.LastAxis()) as pipe:
        expected = nn.CrossEntropyLoss()(own(tokens).flatten(0, 1), target.flatten()).item()
        assert pipe.evaluate(tokens, target).loss == pytest.approx(expected, rel=1e-12)


def test_losses_that_cannot_be_divided_are_refused():
    class Own(nn.Module):
        reduction = "mean"

        def forward(self, a, b):
            return (a - b).mean()

    for loss, match in [(Own(), "does not know what it divides by"),
                        (nn.MSELoss(reduction="none"), "gives no number"), (3, "give a loss")]:
        with pytest.raises(gpipe.errors.SettingError, match=match):
            pipeline(smooth(), loss=loss)
    x, y = batch(dtype=torch.float64)
    with pipeline(smooth(), loss=nn.MSELoss()) as pipe:
        with pytest.raises(gpipe.errors.SettingError, match="give target.float"):
            pipe.train_step(x, y.long())
        with pytest.raises(gpipe.errors.SettingError, match="the target is a dict"):
            pipe.train_step(x, {"y": y})
    with pipeline(smooth(), loss=lambda a, b: (a - b).sum()) as pipe:
        with pytest.raises(gpipe.errors.SettingError, match="return \\(sum, count\\)"):
            pipe.train_step(*batch(dtype=torch.float64))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("rule", ["sgd with momentum", "adamw"])
def test_parameters_are_frozen_and_trained_between_steps(rule, stages):
    """As people do who train a head first. Frozen from the start, later, and again."""
    plain, own = smooth(), smooth()
    plain[0].requires_grad_(False)
    own[0].requires_grad_(False)
    theirs, ours = RULES[rule](plain.parameters()), RULES[rule](own.parameters())
    toggles = {1: [(0, True)], 2: [(0, False), (4, False)], 4: [(0, True), (4, True)]}
    with pipeline(own, optimizer=ours, stages=stages) as pipe:
        for step in range(6):
            for at, trained in toggles.get(step, []):
                plain[at].requires_grad_(trained)
                own[at].requires_grad_(trained)
            x, y = batch(seed=step, dtype=torch.float64)
            theirs.zero_grad()
            nn.functional.mse_loss(plain(x), y).backward()
            theirs.step()
            pipe.train_step(x, y)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_a_parameter_that_no_group_has_cannot_be_trained_later():
    own = smooth()
    own[0].requires_grad_(False)
    optimizer = optim.SGD([*own[2].parameters(), *own[4].parameters()], 0.1)
    x, y = batch(dtype=torch.float64)
    with pipeline(own, optimizer=optimizer) as pipe:
        pipe.train_step(x, y)
        before = own[2].weight.clone()
        own[0].requires_grad_(True)
        with pytest.raises(gpipe.errors.SettingError, match="'0.bias' and 1 more would be trained"):
            pipe.train_step(x, y)
        assert torch.equal(own[2].weight, before)
        own[0].requires_grad_(False)
        pipe.train_step(x, y)


def test_targets_of_a_function_may_be_a_dictionary():
    own = smooth(torch.float32)
    x, y = batch()

    def loss(output, target):
        return ((output - target["y"]) ** 2 * target["mask"]).sum(), target["mask"].sum()

    mask = (torch.arange(8) % 3 != 0).float().unsqueeze(1)
    with pipeline(own, loss=loss, micro_batches=3) as pipe:
        found = pipe.evaluate(x, {"y": y, "mask": mask}).loss
    expected = ((own(x) - y) ** 2 * mask).sum() / mask.sum()
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_a_group_is_added_later():
    plain, own = smooth(), smooth()
    theirs, ours = optim.SGD(plain[4].parameters(), 0.1), optim.SGD(own[4].parameters(), 0.1)
    for layer in (plain[0], plain[2], own[0], own[2]):
        layer.requires_grad_(False)
    with pipeline(own, optimizer=ours) as pipe:
        for step in range(3):
            if step == 1:
                for layers, optimizer in ((plain, theirs), (own, ours)):
                    layers[2].requires_grad_(True)
                    optimizer.add_param_group({"params": list(layers[2].parameters()), "lr": 0.01})
            x, y = batch(seed=step, dtype=torch.float64)
            plain_step(plain, theirs, x, y)
            pipe.train_step(x, y)
            assert_close(values(own), values(plain))
        state = optim.SGD(smooth().parameters(), 0.1, momentum=0.9)
        plain_step(smooth(), state, x, y)
        ours.state[own[4].weight] = {"momentum_buffer": torch.zeros_like(own[4].weight)}
        with pytest.raises(gpipe.errors.SettingError, match="has made steps already"):
            pipe.train_step(x, y)


def test_regression_a_member_that_is_unfrozen_has_its_groups_rate():
    """The engine was not told of new members of a group that were unfrozen for the same step."""
    def trained(own, step):
        own[0].requires_grad_(False)
        groups = [{"params": list(own[1].parameters()), "lr": 1e-4},
                  {"params": list(own[2].parameters()), "lr": 1e-1}]
        optimizer = torch.optim.SGD(groups)
        step = step(own, optimizer)
        step()
        own[0].requires_grad_(True)
        optimizer.param_groups[0]["params"] += list(own[0].parameters())
        step()
        return values(own)

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()

    x, y = batch(dtype=torch.float64)

    def plain(own, optimizer):
        def step():
            optimizer.zero_grad()
            nn.functional.mse_loss(own(x), y).backward()
            optimizer.step()
        return step

    def piped(own, optimizer):
        pipe = gpipe.Pipeline(own, x, stages=2, loss=nn.MSELoss(), optimizer=optimizer)
        return lambda: pipe.train_step(x, y)

    wanted, found = trained(net(), plain), trained(net(), piped)
    for name in wanted:
        # float64, and sums in another order.
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-12)


def test_regression_accumulate_adds_into_the_gradients_memory():
    """It put other tensors there, so that a flat buffer of all gradients stayed as it was."""
    own = smooth(torch.float32)
    flat = torch.zeros(sum(parameter.numel() for parameter in own.parameters()))
    at = 0
    for parameter in own.parameters():
        parameter.grad = flat[at:at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    with pipeline(own, optimizer=None) as pipe:
        pipe.accumulate(*batch())
        assert flat.abs().sum() > 0
        once = flat.clone()
        pipe.accumulate(*batch())
        assert torch.equal(flat, 2 * once)


@pytest.mark.parametrize("call", ["load", "sync"])
def test_regression_what_is_frozen_before_a_load_or_sync_stays_so(call, tmp_path):
    """Both took the parameters as frozen or trained by the stages already, and never told them: a
    frozen parameter was trained in silence, and one that was unfrozen was not."""
    own = smooth(torch.bfloat16)  # of which the stages have copies, for `sync` to write
    own[4].requires_grad_(False)
    x, y = batch(dtype=torch.bfloat16)
    with pipeline(own, optimizer=optim.SGD(own.parameters(), 1.0)) as pipe:
        pipe.save(tmp_path)
        own[0].requires_grad_(False)
        own[4].requires_grad_(True)
        if call == "load":
            pipe.load(tmp_path)
        else:
            pipe.sync()
        before = values(own)
        pipe.train_step(x, y)
        for name, value in values(own).items():
            assert torch.equal(value, before[name]) == name.startswith("0."), name


@pytest.mark.parametrize("call", ["train_step", "accumulate"])
def test_regression_inputs_that_require_gradients_are_refused(call):
    """Their gradients were dropped in silence, so that an encoder before the pipeline never
    learnt."""
    own = smooth()
    x, y = batch(dtype=torch.float64)
    with pipeline(own) as pipe:
        step = getattr(pipe, call)
        for given in ((x.clone().requires_grad_(), y), (x, y.clone().requires_grad_())):
            with pytest.raises(gpipe.errors.SettingError, match=r"from pipe\(x\)"):
                step(*given)
        assert all(parameter.grad is None for parameter in own.parameters())
        with torch.no_grad():
            step(x.clone().requires_grad_(), y)
        step(x.clone().requires_grad_().detach(), y)


def test_regression_float16_accumulates_gradients_that_fit():
    """The scaled gradient of the sum, not of the mean, was cast to float16, and nearly always
    overflowed: `parameter.grad` was infinite or NaN."""
    plain, own = smooth(torch.float32), smooth(torch.float32)
    x, y = batch()
    nn.functional.mse_loss(plain(x), y).backward()
    with pipeline(own, optimizer=None, dtype=torch.float16) as pipe:
        pipe.accumulate(x[:4], y[:4], count=y.numel())
        pipe.accumulate(x[4:], y[4:], count=y.numel())
    for a, b in zip(own.parameters(), plain.parameters()):
        # float16 has 11 bits.
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02 * b.grad.abs().max().item())


@pytest.mark.parametrize("how", ["accumulate", "call"])
def test_regression_gradients_that_overflow_in_float16_are_an_error(how):
    """They were added to `parameter.grad` as infinity or NaN, and the loss scale stayed as it was.
    """
    plain, own = smooth(torch.float32), smooth(torch.float32)
    x, y = batch()
    y = 1000 * y
    nn.functional.mse_loss(plain(x), y).backward()
    overflows = 0
    with pipeline(own, optimizer=None, dtype=torch.float16) as pipe:
        while own[0].weight.grad is None:
            try:
                if how == "accumulate":
                    pipe.accumulate(x, y)
                else:
                    nn.functional.mse_loss(pipe(x).float(), y).backward()
            except gpipe.errors.NotFiniteError as error:
                overflows += 1
                assert overflows < 16
                assert f"the loss scale is now {65536 >> overflows}:" in str(error)
                assert all(parameter.grad is None for parameter in own.parameters())
    assert overflows > 0
    for a, b in zip(own.parameters(), plain.parameters()):
        # float16 has 11 bits.
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02 * b.grad.abs().max().item())


def test_regression_rates_that_were_refused_are_sent_again():
    """The first refusal made them count as sent: the next step trained a group with its old rate,
    and took a decay that is out of range."""
    plain, own = smooth(), smooth()
    theirs, ours = (optim.SGD([{"params": net[0].parameters()},
                               {"params": [*net[2].parameters(), *net[4].parameters()]}], 0.1)
                    for net in (plain, own))
    x, y = batch(dtype=torch.float64)
    with pipeline(own, optimizer=ours) as pipe:
        kept = pipe(x)
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(gpipe.errors.SettingError, match="backward: 1; .* before you train"):
            pipe.train_step(x, y)
        del kept
        plain_step(plain, theirs, x, y)
        pipe.train_step(x, y)
        assert_close(values(own), values(plain))
        ours.param_groups[0]["weight_decay"] = -1.0
        for _ in range(2):
            with pytest.raises(gpipe.errors.SettingError, match="use a number of at least 0"):
                pipe.train_step(x, y)
        assert_close(values(own), values(plain))


def test_regression_the_optimizer_may_have_frozen_parameters_of_no_part():
    """Frozen parts of a model that are in no sequence were refused, with the remedy to make the
    optimizer as it was made: from model.parameters()."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pooler, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    torch.manual_seed(0)
    net = Net()
    net.pooler.requires_grad_(False)
    parts = gpipe.sequence(net, ["first", "last"])
    with pipeline(parts, optimizer=optim.AdamW(net.parameters())) as pipe:
        assert pipe.train_step(*batch()).step == 1
        net.pooler.requires_grad_(True)
        with pytest.raises(gpipe.errors.SettingError, match="in no part of its gpipe.sequence"):
            pipe.train_step(*batch())
