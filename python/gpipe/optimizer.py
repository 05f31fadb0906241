"""Optimizers of `torch.optim` as the engine's: rule, settings, and groups of parameters.

The engine keeps the state and makes the updates. The user's optimizer keeps the learning rates, so
that a scheduler of PyTorch drives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, optim

from .errors import CheckpointError, SettingError


def _sgd(group):
    _refuse(group, "SGD", dampening=0, maximize=False, differentiable=False)
    return "sgd", [group["momentum"], float(group["nesterov"])]


def _adam(group, name="Adam", decoupled=False):
    _refuse(group, name, amsgrad=False, maximize=False, differentiable=False)
    decoupled = decoupled or group.get("decoupled_weight_decay", False)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return "adam", [beta1, beta2, group["eps"], float(decoupled)]


def _adamw(group):
    return _adam(group, "AdamW", True)


def _rmsprop(group):
    _refuse(group, "RMSprop", centered=False, maximize=False, differentiable=False)
    return "rmsprop", [group["alpha"], group["momentum"], group["eps"]]


def _adafactor(group):
    _refuse(group, "Adafactor", maximize=False)
    first, second = group["eps"]
    if first is not None:
        raise SettingError(f"Adafactor(eps=({first}, ...)): gpipe uses the dtype's epsilon there: "
                           f"give eps=(None, {second}), or run the optimizer yourself: see "
                           f"Pipeline.accumulate")
    return "adafactor", [group["beta2_decay"], second, group["d"]]


RULES = {optim.SGD: _sgd, optim.Adam: _adam, optim.AdamW: _adamw, optim.RMSprop: _rmsprop,
         optim.Adafactor: _adafactor}

# What a group has of its rate. A scheduler adds the second.
RATES = "lr", "initial_lr"


def _refuse(group, name, **wanted):
    for setting, value in wanted.items():
        if group.get(setting, value) != value:
            raise SettingError(
                f"{name}({setting}={group[setting]}) has no counterpart in gpipe: leave it out, or "
                f"run the optimizer yourself: optimizer=None, and Pipeline.accumulate in the place "
                f"of train_step")


@dataclass
class Rates:
    """What may change from step to step: each group's learning rate and weight decay."""

    lr: float
    """The largest rate of a group; the others are shares of it."""
    groups: list[tuple[float, float]]
    """Share of `lr`, and weight decay, by group."""


class Mapped:
    """An optimizer of PyTorch's, as the engine runs it."""

    def __init__(self, optimizer: optim.Optimizer, names: dict[int, str], trained: set[str]):
        if not isinstance(optimizer, optim.Optimizer):
            raise SettingError(f"optimizer {optimizer!r}: give an optimizer of torch.optim, such "
                               f"as torch.optim.AdamW(model.parameters())")
        if type(optimizer) not in RULES:
            known = ", ".join(sorted(own.__name__ for own in RULES))
            raise SettingError(
                f"optimizer {type(optimizer).__name__}: gpipe runs {known}. Run another one "
                f"yourself: optimizer=None, Pipeline.accumulate in the place of train_step, and "
                f"then its step()")
        self.optimizer = optimizer
        self.names_by_id = names
        self._read_groups()
        self.check_trained(trained)
        self.sent = self.names
        self.rule = self._rule()
        self.rates = self.current()

    def _read_groups(self) -> None:
        """Names the parameters of each group. Refuses what the engine would not know of."""
        optimizer, names = self.optimizer, self.names_by_id
        if any(optimizer.state.values()):
            raise SettingError(
                "the optimizer has state (it has made steps already, or load_state_dict), and "
                "gpipe keeps optimizer state itself: give a new one; Pipeline.load restores the "
                "state of a checkpoint")
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise SettingError(
                "the optimizer has a step hook, which the stages do not call: remove it, or run "
                "the optimizer yourself: see Pipeline.accumulate")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # PyTorch's optimizers leave frozen ones alone, such as those of parts of the model
                # that are in no sequence.
                if id(parameter) not in names and parameter.requires_grad:
                    raise SettingError(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that is "
                        f"not the model's, or in no part of its gpipe.sequence: make it from the "
                        f"parameters of the model or of the sequence, after the model has its "
                        f"final form, or freeze the parameter with requires_grad_(False)")
        self.names = [[names[id(own)] for own in group["params"] if id(own) in names]
                      for group in optimizer.param_groups]

    def check_trained(self, trained: set[str]) -> None:
        """Refuses parameters that would be trained and are in no group."""
        self._read_groups()
        missing = sorted(trained - {name for group in self.names for name in group})
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise SettingError(
                f"parameter '{missing[0]}'{more} would be trained and is in no group of the "
                f"optimizer: add it, or freeze it with requires_grad_(False)")

    def _rule(self) -> tuple[str, list[float]]:
        rules = [RULES[type(self.optimizer)](group) for group in self.optimizer.param_groups]
        for group, rule in zip(self.optimizer.param_groups, rules):
            if rule != rules[0]:
                raise SettingError(
                    f"groups of the optimizer differ in more than lr and weight_decay: {rules[0]} "
                    f"and {rule}. Give them the same settings, or run the optimizer yourself: see "
                    f"Pipeline.accumulate")
        return rules[0]

    def current(self) -> Rates:
        """The rates that the optimizer has now."""
        groups = self.optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]
        decays = [float(group["weight_decay"]) for group in groups]
        for rate in rates:
            if not 0 <= rate < math.inf:
                raise SettingError(f"the optimizer has lr={rate}: give a number of at least 0")
        largest = max(rates)
        before = getattr(self, "rates", None)
        shares = [rate / largest if largest else 1.0 for rate in rates]
        if not largest and before:
            shares = [share for share, _ in before.groups]
        return Rates(largest, list(zip(shares, decays)))

    def described(self) -> dict:
        name, numbers = self.rule
        return {"name": name, "lr": self.rates.lr, "weight_decay": self.rates.groups[0][1],
                "numbers": [float(number) for number in numbers]}

    def groups(self) -> list[tuple[list[str], float, float]]:
        """The engine's groups: names, share of the rate, weight decay."""
        return self._groups(self.rates)

    def _groups(self, rates: Rates) -> list[tuple[list[str], float, float]]:
        pairs = zip(self.names, rates.groups)
        return [(names, share, decay) for names, (share, decay) in pairs if names]

    def changed(self) -> tuple[Rates, list | None]:
        """The rates of the next step, and the groups if the engine has others."""
        self._read_groups()
        rule, now = self._rule(), self.current()
        if rule != self.rule:
            raise SettingError(
                f"the optimizer's numbers changed from {self.rule[1]} to {rule[1]} "
                f"({self.rule[0]}): only lr and weight_decay may change between steps. OneCycleLR "
                f"and CyclicLR need cycle_momentum=False")
        close = len(now.groups) == len(self.rates.groups) and all(
            abs(a[0] - b[0]) <= 1e-12 * abs(b[0]) and a[1] == b[1]
            for a, b in zip(now.groups, self.rates.groups))
        if close and self.names == self.sent:
            return Rates(now.lr, self.rates.groups), None
        return now, self._groups(now)

    def has_sent(self, rates: Rates) -> None:
        """Notes that the engine has the groups with these rates. Groups that it refuses are sent
        again."""
        self.rates, self.sent = rates, self.names

    def saved(self) -> list[dict[str, float]]:
        """Each group's rate, and the one that a scheduler began with."""
        return [{key: float(group[key]) for key in RATES if key in group}
                for group in self.optimizer.param_groups]

    def check_saved(self, saved: list[dict[str, float]]) -> None:
        """Refuses rates that are of other groups."""
        if len(saved) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"it was saved with {len(saved)} groups of parameters, the optimizer has "
                f"{len(self.optimizer.param_groups)}: make the optimizer with the same groups")

    def restore(self, saved: list[dict[str, float]]) -> None:
        """Gives the groups the rates that they had."""
        for group, rates in zip(self.optimizer.param_groups, saved):
            for key, rate in rates.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(rate)
                else:
                    group[key] = rate

    def stepped(self) -> None:
        """Tells a scheduler that the optimizer has made its step."""
        self.optimizer._opt_called = True
