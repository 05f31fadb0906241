//! What a step returns: the loss, and how time and memory were spent.

use gpipe_core::{
    Bytes, Nanos,
    lower::Program,
    report::{DeviceTimes, breakdown, overlap},
    simulate::{TimedAction, Timeline},
};
use gpipe_runtime::{Ran, Verdict};

use crate::{
    loss::{LossTerm, total},
    metric::Measured,
    stage::Stage,
};

/// The report of a training step.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// The number of this update, from 1. If this step was skipped, the number of the last update.
    pub step: u64,
    /// Whether the update was skipped because float16 gradients overflowed. The next step uses a
    /// smaller loss scale.
    pub skipped: bool,
    /// The total loss of the mini-batch: for each loss the sum over samples (or tokens) divided by
    /// its count, times its weight, added up.
    pub loss: f64,
    /// Number of samples, or tokens, counted by the (first) loss.
    pub count: f64,
    /// Each loss apart, in the order in which the builder was given them.
    pub losses: Vec<LossTerm>,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The clipping factor of the gradients: below 1 if the norm was clipped.
    pub clip_scale: f64,
    /// The learning rate before any group's factor.
    pub lr: f64,
    /// The factor of the loss in the backwards: 1 except in float16.
    pub loss_scale: f64,
    /// The metrics, if they are computed in training.
    pub metrics: Vec<Measured>,
    /// From the start of the step until the last stage ends.
    pub time: Nanos,
    /// The share of device time (the number of devices times `time`) in which devices communicated
    /// or waited.
    pub bubble: f64,
    /// The time in which at least two devices computed at once.
    pub overlap: Nanos,
    /// The report of each device; of each stage, unless the schedule puts several on a device.
    pub devices: Vec<DeviceReport>,
    /// Memory of each device over the step: the bytes held from the start of each action until the
    /// next one. Within an action a device may hold more for a while ([`DeviceReport::peak`]).
    pub bytes: Vec<Vec<(Nanos, Bytes)>>,
    /// Every action with its times, per device.
    pub timeline: Timeline,
}

/// Time and memory of one device in a step. The eight times from `forward` to `stalls` sum to the
/// step, to the nanosecond. [`gpipe_core::report`] defines each of them.
#[derive(Debug, Clone, Copy)]
pub struct DeviceReport {
    /// Time in forwards.
    pub forward: Nanos,
    /// Time in re-materialization. With segments, only the first recomputed segment counts here;
    /// the others count as backward.
    pub recompute: Nanos,
    /// Time in backwards, or in both halves of split backwards.
    pub backward: Nanos,
    /// Time in tied weights, norms and the update.
    pub optimizer: Nanos,
    /// Time of transfers, without the part in which a device waits for another one.
    pub communication: Nanos,
    /// Waiting that the schedule causes even if all stages are equally fast.
    pub fill_drain: Nanos,
    /// Additional waiting because stages differ in speed or work.
    pub imbalance: Nanos,
    /// The rest of the waiting: variation of times, and the machine.
    pub stalls: Nanos,
    /// All waiting: `fill_drain`, `imbalance` and `stalls`.
    pub wait: Nanos,
    /// The most bytes of tensors that the device's stages had allocated at once, including
    /// parameters and optimizer state.
    pub peak: Bytes,
    /// Bytes of tensors that the stages hold after the step.
    pub live: Bytes,
    /// Bytes of activations and gradients that the stages sent to other stages.
    pub sent: Bytes,
    /// Bytes of saved activations that were offloaded from the device's memory and read back
    /// ([`Remat::Offload`](gpipe_core::remat::Remat::Offload)).
    pub offloaded: Bytes,
    /// Time that actions waited for activations to be written or read. It is a part of the actions'
    /// times.
    pub offload_wait: Nanos,
}

impl DeviceReport {
    /// Time in forwards, re-materialization and backwards. Unlike [`StepReport::bubble`], it does
    /// not count the optimizer's part as busy.
    pub fn busy(&self) -> Nanos {
        self.forward + self.recompute + self.backward
    }
}

impl DeviceReport {
    /// The reports of all devices in a run of `program`.
    pub(super) fn of(program: &Program, link_capacity: usize, ran: &Ran<Stage>) -> Vec<Self> {
        let times = breakdown(program, &ran.timeline, link_capacity);
        let placement = program.placement();
        let own = |device: usize| {
            let stages = ran.outcomes.iter().zip(placement);
            let own = stages.filter(move |(_, own)| own.is_some_and(|own| own.index() == device));
            own.map(|(outcome, _)| outcome)
        };
        let memory = |device: usize| own(device).map(|outcome| outcome.memory);
        let devices = times.iter().zip(&ran.sent).enumerate();
        let report = |(device, (times, &sent)): (usize, (&DeviceTimes, &Bytes))| Self {
            forward: times.forward,
            recompute: times.recompute,
            backward: times.backward,
            optimizer: times.optimizer,
            communication: times.communication,
            fill_drain: times.fill_drain,
            imbalance: times.imbalance,
            stalls: times.stalls,
            wait: times.wait(),
            // The stages of a device share its memory. Each stage measured it when it finished.
            peak: Bytes(memory(device).map(|memory| memory.peak).max().unwrap_or(0)),
            live: Bytes(memory(device).map(|memory| memory.live).next_back().unwrap_or(0)),
            sent,
            offloaded: own(device).map(|outcome| outcome.moved.bytes).sum(),
            offload_wait: own(device).map(|outcome| outcome.moved.waited).sum(),
        };
        devices.map(report).collect()
    }
}

/// The report of an update that ran in parts.
#[derive(Debug, Clone)]
pub struct UpdateReport {
    /// The number of this update, from 1. If it was skipped, the number of the last update.
    pub step: u64,
    /// Whether the update was skipped because float16 gradients overflowed.
    pub skipped: bool,
    /// The mean loss over the mini-batches of [`Pipeline::accumulate`](crate::Pipeline::accumulate)
    /// in this update. `None` if there were none. With several losses, the total as in
    /// [`StepReport::loss`].
    pub loss: Option<f64>,
    /// Number of samples, or tokens, counted by the (first) loss.
    pub count: f64,
    /// Each loss apart, over these mini-batches.
    pub losses: Vec<LossTerm>,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The clipping factor of the gradients: below 1 if the norm was clipped.
    pub clip_scale: f64,
    /// The learning rate before any group's factor.
    pub lr: f64,
    /// The factor of the loss in the backwards: 1 except in float16.
    pub loss_scale: f64,
    /// The report of each device, for the update alone.
    pub devices: Vec<DeviceReport>,
    /// The actions of the update, with their times.
    pub timeline: Timeline,
}

/// The part of a report that only the driver knows.
pub(super) struct Numbers {
    pub step: u64,
    pub skipped: bool,
    pub lr: f64,
    pub loss_scale: f64,
    pub losses: Vec<LossTerm>,
    pub metrics: Vec<Measured>,
}

impl StepReport {
    pub(super) fn new(
        numbers: Numbers,
        program: &Program,
        link_capacity: usize,
        ran: Ran<Stage>,
        verdict: Option<Verdict>,
    ) -> Self {
        let Numbers { step, skipped, lr, loss_scale, losses, metrics } = numbers;
        let devices = DeviceReport::of(program, link_capacity, &ran);
        Self {
            step,
            skipped,
            lr,
            loss_scale,
            metrics,
            loss: total(&losses),
            count: count(&losses),
            losses,
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

/// The bytes that each device held at the start of each of its actions and at the end of the step.
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

/// The count of the first loss; 0 without a loss.
pub(super) fn count(losses: &[LossTerm]) -> f64 {
    losses.first().map_or(0.0, |term| term.count)
}

/// The evaluation of one mini-batch. To combine several, add up `sum` and `count` and divide once;
/// with several losses, those of each of `losses`.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The total loss: for each loss its sum divided by its count, times its weight, added up. With
    /// [`PipelineBuilder::loss`](crate::PipelineBuilder::loss) alone it is `sum` / `count`.
    pub loss: f64,
    /// The sum of the (first) loss.
    pub sum: f64,
    /// Number of samples, or tokens, counted by the (first) loss.
    pub count: f64,
    /// Each loss apart, in the order in which the builder was given them.
    pub losses: Vec<LossTerm>,
    /// The metrics, in the order in which the builder was given them.
    pub metrics: Vec<Measured>,
}

impl Evaluation {
    pub(super) fn new(losses: Vec<LossTerm>, metrics: Vec<Measured>) -> Self {
        let sum = losses.first().map_or(0.0, |term| term.sum);
        Self { loss: total(&losses), sum, count: count(&losses), losses, metrics }
    }
}
