"""What the calls of a pipeline return."""

from __future__ import annotations

from dataclasses import dataclass

from ._gpipe import Timeline


@dataclass(frozen=True)
class DeviceReport:
    """Time and memory of one device in a step. The eight times from `forward` to `stalls` (in
    seconds) sum to the step."""

    forward: float
    recompute: float
    """Re-materialization."""
    backward: float
    optimizer: float
    """Tied weights, norms and the update."""
    communication: float
    fill_drain: float
    """Waiting that the schedule causes, even if all stages are equally fast."""
    imbalance: float
    """Additional waiting because stages differ."""
    stalls: float
    """The rest of the waiting."""
    peak: int
    """The most bytes of tensors held at once. The module's own parameters are not counted."""
    live: int
    """Bytes held after the step."""
    sent: int
    """Bytes of activations and gradients sent to other stages."""

    @property
    def busy(self) -> float:
        """Seconds in forwards, re-materialization and backwards."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class StepReport:
    """A training step."""

    step: int
    """The number of this update, from 1."""
    skipped: bool
    """Whether float16 gradients overflowed, so that nothing was updated."""
    loss: float
    """The mean loss of the mini-batch, in training mode, before the update."""
    count: float
    """What the sum of the loss was divided by."""
    grad_norm: float
    """The global norm of the gradients, before clipping."""
    clip_scale: float
    """The factor of clipping: below 1 if the norm was too large."""
    lr: float
    """The learning rate: the largest of all groups."""
    loss_scale: float
    """The factor of the loss in the backwards: 1 except in float16."""
    time: float
    """Seconds."""
    bubble: float
    """The share of all device time in which devices waited or communicated."""
    overlap: float
    """Seconds in which at least two devices computed at once."""
    devices: list[DeviceReport]
    _timeline: Timeline

    def timeline(self) -> Timeline:
        """Every action with its times. A notebook shows it as a picture; `.svg()` and `.html()`
        return it."""
        return self._timeline

    @classmethod
    def of(cls, fields: dict) -> StepReport:
        devices = [DeviceReport(**own) for own in fields.pop("devices")]
        return cls(devices=devices, _timeline=fields.pop("timeline"), **fields)


@dataclass(frozen=True)
class Evaluation:
    """The loss of a mini-batch. To combine several, add up `sum` and `count` and divide once."""

    loss: float
    sum: float
    count: float
