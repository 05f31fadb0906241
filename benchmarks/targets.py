"""Targets of step times, and what a run found: comparisons, efficiency, ablations.

`results` is name -> what each round of that configuration found.
"""

import dataclasses
from typing import Optional

from figures import between, bounds, median

MET, AHEAD, EVEN = "target met", "ahead", "even"
BELOW, BEHIND = "**below target**", "**behind**"
# Steps that touch memory for the first time, and so are slower than those after them.
WARM_UP = 2


def paired(a, b, step_ms):
    """The step times of `a` over those of `b`, round by round. A job of one round has one pair."""
    return [step_ms(x) / step_ms(y) for x, y in zip(a, b)]


def side(speeds):
    """Ahead or behind where all of the interval is; even where it contains 1."""
    low, high = bounds(speeds)
    return BEHIND if high < 1 else AHEAD if low > 1 else EVEN


def activations(found):
    """Bytes of tensors at the peak, without parameters, gradients and optimizer state."""
    return sum(found["peak_bytes"]) - sum(found["live_bytes"]) - found["gradient_bytes"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run says of a comparison."""

    ours: str
    ours_ms: float
    against: str
    # The fastest of the others.
    other: str
    other_ms: float
    # The other's step over ours, by round: above 1, ours is faster.
    speeds: list
    # Bytes of activations over those of `Comparison.activations_of`.
    kept: Optional[float]
    target: Optional[float]
    # Whether every one of the others was in the run.
    whole: bool

    @property
    def speed(self):
        return median(self.speeds)

    def verdict(self):
        """Which side of 1 the interval is on, and whether the median reaches the target.

        It is not compared with the target where one of the others was not in the run.
        """
        found = side(self.speeds)
        if self.target is None or found == BEHIND or not self.whole:
            return found
        return f"{found}, {MET if self.speed >= self.target else BELOW}"

    def cells(self, digits=2):
        """Speed, interval, target, verdict."""
        target = "" if self.target is None else self.target
        interval = between(*bounds(self.speeds), digits)
        return [f"{self.speed:.{digits}f}", interval, target, self.verdict()]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many times as fast as the fastest of some others a configuration is."""

    ours: str
    # What the others are, in words, and their names.
    against: str
    others: list
    at_least: Optional[float] = None
    # A configuration over whose activations those of `ours` are shown, too.
    activations_of: Optional[str] = None
    # Whether RESULTS.md has it, too. The report has every comparison.
    is_brief: bool = True

    def look(self, results, step_ms):
        """Found, or None where the run has not both sides."""
        others = [name for name in self.others if results.get(name)]
        if not results.get(self.ours) or not others:
            return None
        speeds = {name: paired(results[name], results[self.ours], step_ms) for name in others}
        fastest = min(speeds, key=lambda name: median(speeds[name]))
        time = lambda name: median([step_ms(found) for found in results[name]])
        return Found(
            ours=self.ours,
            ours_ms=time(self.ours),
            against=self.against,
            other=fastest,
            other_ms=time(fastest),
            speeds=speeds[fastest],
            kept=self.share_of_activations(results),
            target=self.at_least,
            whole=len(others) == len(self.others),
        )

    def share_of_activations(self, results):
        base = results.get(self.activations_of)
        if not base or "gradient_bytes" not in base[0]:
            return None
        return activations(results[self.ours][0]) / activations(base[0])


def simulated(found):
    """The simulated step over the measured one. The simulator has the costs of the step before."""
    return found["simulated_last_ms"] / found["step_ms"][-1]


def is_simulated(rounds):
    """Whether the step before the last is past the warm-up, so that its costs count."""
    return (
        bool(rounds)
        and rounds[0].get("simulated_last_ms") is not None
        and len(rounds[0]["step_ms"]) >= WARM_UP + 2
    )


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The simulated step over the measured one, of configurations that begin alike."""

    prefix: str
    at_least: float

    def look(self, results):
        """(name, ratios by round) of the lowest, and of how many; None if none was simulated."""
        of = {
            name: [simulated(found) for found in rounds]
            for name, rounds in results.items()
            if name.startswith(self.prefix) and is_simulated(rounds)
        }
        if not of:
            return None
        lowest = min(of, key=lambda name: median(of[name]))
        return lowest, of[lowest], len(of)


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What a measure for speed brings: a step without it over one with it."""

    measure: str
    on: str
    off: str

    def look(self, results, step_ms):
        """The ratios by round, or None where the run has not both."""
        if not results.get(self.on) or not results.get(self.off):
            return None
        return paired(results[self.off], results[self.on], step_ms)
