"""Profiles and plans."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import _gpipe
from .errors import SettingError

_BYTES_MAX = 64 << 20  # the most of a profile's file, as the command's


@dataclass
class Profile:
    """Measured time and memory of each layer. `Pipeline.profile` makes it."""

    fields: dict
    samples: int
    """Samples of the mini-batch that was measured."""

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(json.dumps({"samples": self.samples, "profile": self.fields}))

    @classmethod
    def read(cls, path: str | os.PathLike) -> Profile:
        """Reads what `save` wrote."""
        with open(path, "rb") as file:
            text = file.read(_BYTES_MAX + 1)
        if len(text) > _BYTES_MAX:
            raise SettingError(f"{os.fspath(path)} has more than 64 MiB: it is no profile")
        try:
            found = json.loads(text)
            return cls(found["profile"], found["samples"])
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"{os.fspath(path)} is no profile ({error!r}): write one with "
                               f"Profile.save") from error


@dataclass(frozen=True)
class Plan:
    """How to run a model: `Pipeline(model, example, plan=plan, ...)`."""

    balance: list[int]
    """Layers of each stage."""
    micro_batches: int
    schedule: str
    remat: str
    step: float = field(compare=False)
    """Predicted seconds of a step."""
    bubble: float = field(compare=False)
    """Predicted share of device time spent waiting."""
    peaks: list[int] = field(compare=False)
    """Predicted bytes of each device."""
    explanation: str = field(compare=False, repr=False)
    """Why this plan, and what else was tried."""

    @property
    def stages(self) -> int:
        """Number of stages. With "interleaved:V" there are V for each device."""
        return len(self.balance)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.peaks)

    def __str__(self) -> str:
        return self.explanation


def plan(profile: Profile, *, stages: Sequence[int] | int, micro_batches: Sequence[int] = (4, 8),
         schedules: Sequence[str] = ("1f1b", "gpipe", "zb-h1"),
         memory: int | None = None) -> Plan:
    """The fastest plan among these choices, predicted from a profile of this machine.

    Args:
        profile: of `Pipeline.profile`, measured with the same choices of `micro_batches`.
        stages: each number of stages to try.
        schedules: names of schedules to try. "auto" makes an order for the measured costs, too; the
            plan's `schedule` then holds it, for `Pipeline(schedule=...)`.
        memory: bytes that each device may hold.

    Raises:
        SettingError: nothing fits; the message says by how much.
    """
    numbers = [stages] if isinstance(stages, int) else list(stages)
    found = _gpipe.plan(json.dumps(profile.fields), numbers, list(micro_batches), list(schedules),
                        profile.samples, memory)
    return Plan(**found)
