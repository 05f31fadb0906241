//! Where a step's time went, device by device, and the bubble.
//!
//! A device's step is forward + recompute + backward + optimizer + communication + waiting, and
//! waiting is fill and drain + imbalance + stalls. These eight parts sum to the step, to the
//! nanosecond.
//!
//! Communication is the time of a transfer in which nobody is waited for. For a receive, it starts
//! when the matching send has ended; for a send, when its link has room. All other time in which a
//! device does not compute is waiting: for a message or for room, between two actions, before the
//! first and after the last.
//!
//! The causes of waiting are found by simulating the same program twice, without transport or
//! jitter. `own` is what a device waits if each kind of action takes its stage's median time.
//! `balanced` is what it waits if every device has the same work. (A median, not a mean: one slow
//! action is a stall of this step, not a property of its stage.) The measured waiting is split as
//! follows:
//!
//! ```text
//! explained  = min(measured, own)         what the program and the stages' costs cause
//! fill_drain = min(explained, balanced)   what the schedule causes even on equally fast devices
//! imbalance  = explained - fill_drain     what unequal devices add to that
//! stalls     = measured - explained       the rest: varying times, the machine, waiting behind
//!                                         another device's transport
//! ```
//!
//! No part can be negative. A device that is slower than the others waits less than a balanced one
//! and has no imbalance: the lost time is counted on the devices that wait for it.

use crate::{
    action::{Action, Direction, Op, Transfer},
    lower::Program,
    simulate::{Costs, StageCost, TimedAction, Timeline, median, simulate},
    units::Nanos,
};

/// One device's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceTimes {
    /// Time in forwards.
    pub forward: Nanos,
    /// Time in re-materialization.
    pub recompute: Nanos,
    /// Time in backwards.
    pub backward: Nanos,
    /// Time for reducing tied weights, norms, and the update itself.
    pub optimizer: Nanos,
    /// Time in transfers that waited for nobody.
    pub communication: Nanos,
    /// Waiting that the schedule causes even if all devices are equally fast.
    pub fill_drain: Nanos,
    /// Waiting that devices of unequal speed or work add to that.
    pub imbalance: Nanos,
    /// All other waiting.
    pub stalls: Nanos,
}

impl DeviceTimes {
    /// Everything except communication and waiting.
    pub fn busy(&self) -> Nanos {
        self.forward + self.recompute + self.backward + self.optimizer
    }

    /// All waiting.
    pub fn wait(&self) -> Nanos {
        self.fill_drain + self.imbalance + self.stalls
    }

    /// The sum of all parts, which is the step.
    pub fn total(&self) -> Nanos {
        self.busy() + self.communication + self.wait()
    }

    /// Adds the time of an action; transfers are ignored.
    fn add(&mut self, timed: &TimedAction) {
        let spent = timed.end - timed.start;
        match timed.action.op {
            Op::Forward(_) => self.forward += spent,
            Op::Rematerialize(_) => self.recompute += spent,
            Op::Backward(_) | Op::BackwardInput(_) | Op::BackwardWeight(_) => {
                self.backward += spent;
            }
            Op::Reduce | Op::Norm | Op::Decide | Op::Update => self.optimizer += spent,
            Op::Send(_) | Op::Receive(_) => {}
        }
    }
}

/// Splits each device's time in `timeline`. The parts of each device sum to the makespan.
/// `timeline` is a run of `program` with links that hold `capacity` messages each way.
///
/// If the program deadlocks with that capacity, nothing can be explained and all waiting counts as
/// stalls.
pub fn breakdown(program: &Program, timeline: &Timeline, capacity: usize) -> Vec<DeviceTimes> {
    let own = own_costs(timeline);
    let balanced = simulated_waits(program, &balanced_costs(program, &own), capacity);
    let own = simulated_waits(program, &own, capacity);
    let communication = communication(program, timeline, capacity);
    let of = |waits: &[Nanos], device: usize| waits.get(device).copied().unwrap_or_default();
    let times = timeline.devices.iter().enumerate().map(|(device, actions)| {
        let mut times = busy(actions);
        times.communication = of(&communication, device);
        let measured = timeline.makespan - times.busy() - times.communication;
        let explained = measured.min(of(&own, device));
        times.fill_drain = explained.min(of(&balanced, device));
        times.imbalance = explained - times.fill_drain;
        times.stalls = measured - explained;
        times
    });
    times.collect()
}

/// What each device did, without communication and waiting.
pub fn device_times(timeline: &Timeline) -> Vec<DeviceTimes> {
    timeline.devices.iter().map(|actions| busy(actions)).collect()
}

/// What each stage did, without communication and waiting. This splits the times of devices with
/// several stages.
pub fn stage_times(timeline: &Timeline) -> Vec<DeviceTimes> {
    let mut times: Vec<DeviceTimes> = Vec::new();
    for timed in timeline.devices.iter().flatten() {
        let stage = timed.action.stage.index();
        if times.len() <= stage {
            times.resize(stage + 1, DeviceTimes::default());
        }
        times[stage].add(timed);
    }
    times
}

/// What a device did, without communication and waiting.
fn busy(actions: &[TimedAction]) -> DeviceTimes {
    let mut times = DeviceTimes::default();
    actions.iter().for_each(|timed| times.add(timed));
    times
}

/// How long each device waits under `costs`; empty if the program deadlocks.
fn simulated_waits(program: &Program, costs: &Costs, capacity: usize) -> Vec<Nanos> {
    let timeline = simulate(program, costs, capacity).unwrap_or_default();
    timeline.devices.iter().map(|actions| timeline.makespan - busy(actions).busy()).collect()
}

/// The time of each device's transfers, minus what they waited.
fn communication(program: &Program, timeline: &Timeline, capacity: usize) -> Vec<Nanos> {
    // Links keep the order of messages, so the position of a message identifies its other end.
    let links = program.topology.edges.len() * 2;
    let (mut sent, mut received) = (vec![Vec::new(); links], vec![Vec::new(); links]);
    for timed in timeline.devices.iter().flatten() {
        match timed.action.op {
            Op::Send(transfer) => push(&mut sent, transfer, timed.end),
            Op::Receive(transfer) => push(&mut received, transfer, timed.end),
            _ => {}
        }
    }
    let devices = timeline.devices.iter().map(|actions| {
        let (mut sends, mut receives) = (vec![0_usize; links], vec![0_usize; links]);
        let spent = actions.iter().map(|timed| {
            let ready = match timed.action.op {
                Op::Send(transfer) => {
                    let place = next(&mut sends, transfer);
                    match place.checked_sub(capacity) {
                        Some(before) => end(&received, transfer, before),
                        None => Some(Nanos(0)),
                    }
                }
                Op::Receive(transfer) => end(&sent, transfer, next(&mut receives, transfer)),
                _ => return Nanos(0),
            };
            // If the other end is not in the timeline, nothing is known: the transfer counts as
            // waiting.
            ready.map_or(Nanos(0), |ready| timed.end - timed.start.max(ready))
        });
        spent.sum()
    });
    devices.collect()
}

/// The index of a transfer's link. Each direction of each edge is a link.
fn link(transfer: Transfer) -> usize {
    transfer.edge.index() * 2 + usize::from(transfer.direction == Direction::Backward)
}

fn push(ends: &mut [Vec<Nanos>], transfer: Transfer, end: Nanos) {
    if let Some(ends) = ends.get_mut(link(transfer)) {
        ends.push(end);
    }
}

/// Counts a message on its link and returns how many passed before it.
fn next(counts: &mut [usize], transfer: Transfer) -> usize {
    let Some(count) = counts.get_mut(link(transfer)) else { return 0 };
    *count += 1;
    *count - 1
}

/// When the message at position `place` on its link was handed over.
fn end(ends: &[Vec<Nanos>], transfer: Transfer, place: usize) -> Option<Nanos> {
    ends.get(link(transfer))?.get(place).copied()
}

/// Each stage's typical times in this step.
fn own_costs(timeline: &Timeline) -> Costs {
    let mut costs = Costs::measured(&[timeline], median);
    for timed in timeline.devices.iter().flatten() {
        let (Op::Reduce | Op::Decide) = timed.action.op else { continue };
        // The simulator has no cost for these, so they are added to the norm, which is next to
        // them.
        if let Some(cost) = costs.stages.get_mut(timed.action.stage.index()) {
            cost.norm += timed.end - timed.start;
        }
    }
    costs
}

/// The time of each kind of work in a step and how often it ran, for one stage or for all.
#[derive(Clone, Copy, Default)]
struct Work {
    forward: (Nanos, u64),
    recompute: (Nanos, u64),
    /// Whole backwards, and the first halves of split ones.
    backward: (Nanos, u64),
    weight: (Nanos, u64),
    norm: (Nanos, u64),
    update: (Nanos, u64),
}

impl Work {
    fn add(&mut self, action: Action, time: Nanos) {
        let part = match action.op {
            Op::Forward(_) => &mut self.forward,
            Op::Rematerialize(_) => &mut self.recompute,
            Op::Backward(_) | Op::BackwardInput(_) => &mut self.backward,
            Op::BackwardWeight(_) => &mut self.weight,
            Op::Norm => &mut self.norm,
            Op::Update => &mut self.update,
            Op::Send(_) | Op::Receive(_) | Op::Reduce | Op::Decide => return,
        };
        *part = (part.0 + time, part.1 + 1);
    }
}

/// Costs that give every device the same share of the work in `own`, split evenly among its stages.
/// Recomputation counts as work like any other: a stage that recomputes less gets longer backwards
/// here.
fn balanced_costs(program: &Program, own: &Costs) -> Costs {
    let (placement, recomputed) = (program.placement(), program.rematerialized());
    let mut all = Work::default();
    let mut stages = vec![Work::default(); program.topology.stages];
    for &action in program.devices.iter().flatten() {
        let again = action.op.computes().is_some_and(|m| recomputed.contains(action.stage, m));
        let time = own.duration(action, again);
        all.add(action, time);
        if let Some(stage) = stages.get_mut(action.stage.index()) {
            stage.add(action, time);
        }
    }
    let mut stages_on = vec![0_u64; program.devices.len()];
    for device in placement.iter().flatten() {
        stages_on[device.index()] += 1;
    }
    let devices = stages_on.iter().filter(|&&stages| stages > 0).count() as u64;
    let again = Nanos(all.recompute.0.0 / all.recompute.1.max(1));
    let stages = stages.iter().zip(placement).map(|(stage, device)| {
        let shares = devices * device.map_or(1, |device| stages_on[device.index()]);
        let each = |work: Nanos, times: u64| Nanos(work.0 / (shares * times).max(1));
        let forward = each(all.forward.0, stage.forward.1);
        let backward = each(all.recompute.0 + all.backward.0, stage.backward.1);
        let rematerialize = again.min(backward);
        StageCost {
            forward,
            forward_kept: forward,
            rematerialize,
            backward: backward - rematerialize,
            backward_kept: backward,
            backward_input: backward - rematerialize,
            backward_input_kept: backward,
            backward_weight: each(all.weight.0, stage.weight.1),
            norm: each(all.norm.0, stage.norm.1),
            update: each(all.update.0, stage.update.1),
        }
    });
    Costs::of_stages(stages.collect())
}

/// The time in which at least two devices compute at once. It shows whether stages overlap.
pub fn overlap(timeline: &Timeline) -> Nanos {
    let mut changes: Vec<(u64, i32)> = Vec::new();
    for timed in timeline.devices.iter().flatten() {
        if !timed.action.op.communicates() && timed.end > timed.start {
            changes.push((timed.start.0, 1));
            changes.push((timed.end.0, -1));
        }
    }
    changes.sort_unstable();
    let (mut active, mut since, mut total) = (0, 0, 0);
    for (time, change) in changes {
        if active >= 2 {
            total += time - since;
        }
        active += change;
        since = time;
    }
    Nanos(total)
}
