"""What is asked of step times, and what was found."""

import dataclasses
from typing import Optional

from figures import interval, median


def paired(a, b, step_ms):
    """a's time over b's, by round."""
    return [step_ms(x) / step_ms(y) for x, y in zip(a, b)]


@dataclasses.dataclass(frozen=True)
class Found:
    asked: str
    figures: str
    # None: nothing was asked, or it was not measured.
    kept: Optional[bool]

    def row(self):
        return [self.asked, self.figures, {True: "yes", False: "**no**", None: ""}[self.kept]]


def activations(found):
    """Bytes of tensors at the peak without parameters, gradients and optimizer state, of all stages."""
    return sum(found["peak_bytes"]) - sum(found["live_bytes"]) - found["gradient_bytes"]


def share_of_activations(results, name, of):
    if not results.get(of) or "gradient_bytes" not in results[of][0]:
        return f"activations of {of}: not in this run"
    return f"**{100 * activations(results[name][0]) / activations(results[of][0]):.0f}%** of the activations of {of}"


@dataclasses.dataclass(frozen=True)
class Ratio:
    """So many times as fast as each of some others, by the median of the rounds."""
    asked: str
    ours: str
    others: list
    at_least: Optional[float]
    # A configuration over whose activations its own are to be shown, too.
    activations_of: Optional[str] = None

    def look(self, results, step_ms):
        others = [name for name in self.others if results.get(name)]
        if not results.get(self.ours) or not others:
            return Found(self.asked, "not in this run", None)
        all_there = len(others) == len(self.others)
        speeds = {name: paired(results[name], results[self.ours], step_ms) for name in others}
        nearest = min(speeds, key=lambda name: median(speeds[name]))
        speed = median(speeds[nearest])
        figures = f"**{speed:.2f}x** {interval(speeds[nearest], 2).split(' ', 1)[1]}, {self.ours} against {nearest}"
        if len(self.others) > 1:
            figures += f", the fastest of {len(others)}" + ("" if all_there else f" ({len(self.others)} in a full run)")
        if self.activations_of:
            figures += f"; {share_of_activations(results, self.ours, self.activations_of)}"
        # Who fails against some fails against all.
        judged = self.at_least is not None and (all_there or speed < self.at_least)
        return Found(self.asked, figures, speed >= self.at_least if judged else None)


# Steps that touch memory for the first time: of `gpt` with everything kept the second one takes a third more than the third.
WARM_UP = 2


def simulated(found):
    """The efficiency of a step over the simulated one: what the costs of the step before predict over what it took."""
    return found["simulated_last_ms"] / found["step_ms"][-1]


def is_simulated(rounds):
    # The costs are those of the step before the last, which must not be one that warms up.
    return bool(rounds) and rounds[0].get("simulated_last_ms") is not None and len(rounds[0]["step_ms"]) >= WARM_UP + 2


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The simulated step over the measured one, of all configurations that begin so; and the one that is furthest from it."""
    asked: str
    prefix: str
    at_least: float

    def look(self, results, step_ms):
        of = {name: [simulated(found) for found in rounds] for name, rounds in results.items()
              if name.startswith(self.prefix) and is_simulated(rounds)}
        if not of:
            return Found(self.asked, "not in this run", None)
        least = min(of, key=lambda name: median(of[name]))
        figures = f"**{median(of[least]):.3f}** {interval(of[least]).split(' ', 1)[1]}, {least}, the least of {len(of)}"
        return Found(self.asked, figures, median(of[least]) >= self.at_least)


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What a measure for speed brings: a step without it over one with it."""
    measure: str
    on: str
    off: str

    def look(self, results, step_ms):
        if not results.get(self.on) or not results.get(self.off):
            return None
        return paired(results[self.off], results[self.on], step_ms)
