//! What a step returns: the loss, and where time and memory went.

use gpipe_core::{
    Bytes, Nanos,
    lower::Program,
    report::{breakdown, overlap},
    simulate::{TimedAction, Timeline},
};
use gpipe_runtime::{Ran, Verdict};

use crate::{
    metric::Measured,
    stage::{Stage, feed::Outcome},
};

/// A training step.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// The number of this update, from 1; of the last one if this step was skipped.
    pub step: u64,
    /// Whether the update was left out because float16 gradients overflowed; the next step has a
    /// smaller loss scale.
    pub skipped: bool,
    /// The mini-batch loss: the sum over samples (or tokens) divided by `count`.
    pub loss: f64,
    /// Samples, or tokens, that the loss counted.
    pub count: f64,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// What the gradients were multiplied by: less than 1 where the norm was clipped.
    pub clip_scale: f64,
    /// The learning rate before any group's factor.
    pub lr: f64,
    /// What the loss was multiplied by for the backwards: 1 but in float16.
    pub loss_scale: f64,
    /// The metrics, if they are taken in training.
    pub metrics: Vec<Measured>,
    /// From the start of the step to the last stage's end.
    pub time: Nanos,
    /// The share of devices x `time` in which a device was not busy, but communicated or waited.
    pub bubble: f64,
    /// The time in which at least two devices computed at once.
    pub overlap: Nanos,
    /// By device: by stage, unless the schedule puts several on one.
    pub devices: Vec<DeviceReport>,
    /// What each device held over the time of the step: from each time, the start of an action,
    /// until the next one. Within an action it may hold more for a while ([`DeviceReport::peak`]).
    pub bytes: Vec<Vec<(Nanos, Bytes)>>,
    /// Every action with its times, per device.
    pub timeline: Timeline,
}

/// One device's share of a step. The eight parts from `forward` to `stalls` sum to the step, to the
/// nanosecond; [`gpipe_core::report`] says what each of them is.
#[derive(Debug, Clone, Copy)]
pub struct DeviceReport {
    /// In forwards.
    pub forward: Nanos,
    /// In re-materialization; with segments, all but the first recomputed one count as backward.
    pub recompute: Nanos,
    /// In backwards, or both halves of them.
    pub backward: Nanos,
    /// In tied weights, norms and the update.
    pub optimizer: Nanos,
    /// In transfers that waited for nobody.
    pub communication: Nanos,
    /// Waiting that the schedule makes even if all stages were equally fast.
    pub fill_drain: Nanos,
    /// Waiting that stages of unequal speed or work add to it.
    pub imbalance: Nanos,
    /// The rest of the waiting: times that vary, and the machine.
    pub stalls: Nanos,
    /// All waiting: `fill_drain`, `imbalance` and `stalls`.
    pub wait: Nanos,
    /// Most bytes of tensors that its stages had allocated at once, their parameters and state
    /// included.
    pub peak: Bytes,
    /// Bytes of tensors that they hold after the step.
    pub live: Bytes,
    /// Bytes of activations and gradients that they sent to other stages.
    pub sent: Bytes,
}

impl DeviceReport {
    /// Forward, re-materialization and backward. The bubble counts the optimizer's part as busy,
    /// too.
    pub fn busy(&self) -> Nanos {
        self.forward + self.recompute + self.backward
    }
}

/// The sum of losses, in micro-batch order.
pub(super) fn loss_sum(outcomes: &[Outcome]) -> f64 {
    outcomes.last().map_or(0.0, |outcome| outcome.loss_sums.iter().sum())
}

/// What only the driver knows of a step.
pub(super) struct Numbers {
    pub step: u64,
    pub skipped: bool,
    pub lr: f64,
    pub loss_scale: f64,
    pub metrics: Vec<Measured>,
}

impl StepReport {
    pub(super) fn new(
        numbers: Numbers,
        program: &Program,
        link_capacity: usize,
        ran: Ran<Stage>,
        count: f64,
        verdict: Option<Verdict>,
    ) -> Self {
        let Numbers { step, skipped, lr, loss_scale, metrics } = numbers;
        let times = breakdown(program, &ran.timeline, link_capacity);
        let placement = program.placement();
        let own = |device: usize| {
            let stages = ran.outcomes.iter().zip(&placement);
            let own = stages.filter(move |(_, own)| own.is_some_and(|own| own.index() == device));
            own.map(|(outcome, _)| outcome.memory)
        };
        let devices = times.iter().zip(&ran.sent).enumerate().map(|(device, (times, &sent))| {
            DeviceReport {
                forward: times.forward,
                recompute: times.recompute,
                backward: times.backward,
                optimizer: times.optimizer,
                communication: times.communication,
                fill_drain: times.fill_drain,
                imbalance: times.imbalance,
                stalls: times.stalls,
                wait: times.wait(),
                // A device's stages share its memory; each saw it when it was done.
                peak: Bytes(own(device).map(|memory| memory.peak).max().unwrap_or(0)),
                live: Bytes(own(device).map(|memory| memory.live).next_back().unwrap_or(0)),
                sent,
            }
        });
        let devices: Vec<DeviceReport> = devices.collect();
        Self {
            step,
            skipped,
            lr,
            loss_scale,
            metrics,
            loss: loss_sum(&ran.outcomes) / count,
            count,
            grad_norm: verdict.map_or(0.0, |verdict| verdict.norm),
            clip_scale: verdict.map_or(1.0, |verdict| verdict.scale * loss_scale),
            time: ran.timeline.makespan,
            bubble: ran.timeline.bubble(),
            bytes: bytes(&ran, &devices),
            overlap: overlap(&ran.timeline),
            devices,
            timeline: ran.timeline,
        }
    }
}

/// What each device held from the start of each of its actions on, and at the end of the step.
fn bytes(ran: &Ran<Stage>, devices: &[DeviceReport]) -> Vec<Vec<(Nanos, Bytes)>> {
    let mut levels: Vec<_> = ran.outcomes.iter().map(|own| own.levels.iter()).collect();
    let series = ran.timeline.devices.iter().zip(devices).map(|(list, device)| {
        let point = |timed: &TimedAction| {
            let level = levels.get_mut(timed.action.stage.index())?.next()?;
            Some((timed.start, Bytes(*level)))
        };
        let points = list.iter().filter_map(point);
        points.chain([(ran.timeline.makespan, device.live)]).collect()
    });
    series.collect()
}

/// An evaluation of one mini-batch. Over several, sum `sum` and `count` and divide once.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// `sum` / `count`.
    pub loss: f64,
    /// The sum of losses.
    pub sum: f64,
    /// Samples, or tokens, that the loss counted.
    pub count: f64,
    /// The metrics, in the order in which the builder was given them.
    pub metrics: Vec<Measured>,
}

impl Evaluation {
    pub(super) fn new(sum: f64, count: f64, metrics: Vec<Measured>) -> Self {
        Self { loss: sum / count, sum, count, metrics }
    }
}
