//! Running a program on a virtual clock: a timeline, the bubble, and the bytes held at peak.
//!
//! A device runs its list in order. A message is there `latency` after it was sent; a send waits while
//! its link already holds `capacity` messages. Such a network of ordered lists and bounded queues has one
//! outcome, whatever order the devices are advanced in (Kahn 1974), so advancing them greedily finds
//! every deadlock and the only possible timeline. `gpipe-runtime` with its mock stage on a virtual clock
//! reproduces it to the nanosecond; its tests say so.

use std::collections::HashMap;

use crate::{
    action::{Action, Half, Op},
    ids::{DeviceId, EdgeId},
    lower::Program,
    report,
    units::{Bytes, Nanos},
};

/// What one stage's actions take, per micro-batch, and what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// One forward.
    pub forward: Nanos,
    /// One re-materialization.
    pub rematerialize: Nanos,
    /// One backward.
    pub backward: Nanos,
    /// The norm of its gradients, once per step. Reducing and deciding take nothing here.
    pub norm: Nanos,
    /// The update, once per step.
    pub update: Nanos,
    /// The inputs of one micro-batch: held from its forward to its backward.
    pub inputs: Bytes,
    /// The activations of one micro-batch: held from its forward (or its re-materialization) to its backward.
    pub activations: Bytes,
}

/// Costs of a whole pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// By stage; a missing stage costs nothing.
    pub stages: Vec<StageCost>,
    /// From the end of a send to the moment the message can be received.
    pub latency: Nanos,
}

impl Costs {
    /// One nanosecond and one byte for everything but re-materialization's time, the update and the
    /// links: the unit costs in which the literature states bubbles.
    pub fn unit(stages: usize) -> Self {
        let one = StageCost {
            forward: Nanos(1),
            rematerialize: Nanos(1),
            backward: Nanos(1),
            norm: Nanos(0),
            update: Nanos(0),
            inputs: Bytes(1),
            activations: Bytes(1),
        };
        Self { stages: vec![one; stages], latency: Nanos(0) }
    }

    /// The median time of each kind of action on each stage of `timelines` of the same program; nothing is
    /// known of bytes, and messages take no time. An action that took part in no timeline costs nothing.
    pub fn measured(timelines: &[&Timeline]) -> Self {
        type Times = [Vec<u64>; 5];
        let mut times: Vec<Times> = Vec::new();
        for timed in timelines.iter().flat_map(|timeline| timeline.devices.iter().flatten()) {
            let kind = match timed.action.op {
                Op::Forward(_) => 0,
                Op::Rematerialize(_) => 1,
                Op::Backward(_) => 2,
                Op::Norm => 3,
                Op::Update => 4,
                _ => continue,
            };
            let stage = timed.action.stage.index();
            if times.len() <= stage {
                times.resize_with(stage + 1, Times::default);
            }
            times[stage][kind].push((timed.end - timed.start).0);
        }
        let stages = times.into_iter().map(|kinds| {
            let [forward, rematerialize, backward, norm, update] = kinds.map(median);
            StageCost { forward, rematerialize, backward, norm, update, ..StageCost::default() }
        });
        Self { stages: stages.collect(), latency: Nanos(0) }
    }

    /// How long `action` keeps its device busy.
    pub fn duration(&self, action: Action) -> Nanos {
        let cost = self.stages.get(action.stage.index()).copied().unwrap_or_default();
        match action.op {
            Op::Forward(_) => cost.forward,
            Op::Rematerialize(_) => cost.rematerialize,
            Op::Backward(_) => cost.backward,
            Op::Norm => cost.norm,
            Op::Update => cost.update,
            Op::Send(_) | Op::Receive(_) | Op::Reduce | Op::Decide => Nanos(0),
        }
    }
}

/// The upper median; 0 of nothing.
fn median(mut times: Vec<u64>) -> Nanos {
    times.sort_unstable();
    Nanos(times.get(times.len() / 2).copied().unwrap_or(0))
}

/// An action with its time on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// What was done.
    pub action: Action,
    /// When the device came to it.
    pub start: Nanos,
    /// When it was done; for transfers this includes waiting.
    pub end: Nanos,
}

/// Actions with times, measured or simulated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Timeline {
    /// Per device, in order.
    pub devices: Vec<Vec<TimedAction>>,
    /// From the start of the step to the last end.
    pub makespan: Nanos,
    /// Most bytes of inputs and activations that each stage held at once.
    pub peak_held: Vec<Bytes>,
}

impl Timeline {
    /// The share of devices x makespan in which a device was not busy.
    pub fn bubble(&self) -> f64 {
        report::bubble(self)
    }
}

/// Nobody can go on: each device with work left, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("deadlock: {}", waiting.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Deadlock {
    /// Who waits.
    pub waiting: Vec<Waiting>,
}

/// One device that waits for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The device.
    pub device: DeviceId,
    /// The position in its list.
    pub position: usize,
    /// The send (its link is full) or receive (nothing comes) that it cannot do.
    pub action: Action,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let why = match self.action.op {
            Op::Send(_) => "whose link is full",
            _ => "which nobody sends before",
        };
        write!(
            f,
            "device {} waits at action {} ({}), {why}",
            self.device, self.position, self.action
        )
    }
}

/// Times `program` under `costs`, with links that hold at most `capacity` messages each way.
///
/// # Errors
/// [`Deadlock`], naming every device that waits.
pub fn simulate(program: &Program, costs: &Costs, capacity: usize) -> Result<Timeline, Deadlock> {
    let mut machine = Machine::new(program, costs, capacity);
    while machine.advance_all() {}
    machine.finish()
}

/// The messages that ever passed one half of one edge, by their times.
#[derive(Default)]
struct Link {
    sent: Vec<Nanos>,
    received: Vec<Nanos>,
}

struct Machine<'a> {
    program: &'a Program,
    costs: &'a Costs,
    capacity: usize,
    links: HashMap<(EdgeId, Half), Link>,
    devices: Vec<Vec<TimedAction>>,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, costs: &'a Costs, capacity: usize) -> Self {
        let devices = program.devices.iter().map(|list| Vec::with_capacity(list.len())).collect();
        Self { program, costs, capacity, links: HashMap::new(), devices }
    }

    /// Lets every device go as far as it can; whether any did anything.
    fn advance_all(&mut self) -> bool {
        let program = self.program;
        let mut moved = false;
        for (device, list) in program.devices.iter().enumerate() {
            while let Some(&action) = list.get(self.devices[device].len()) {
                let start = self.devices[device].last().map_or(Nanos(0), |timed| timed.end);
                let Some(end) = self.end_of(action, start) else {
                    break;
                };
                self.devices[device].push(TimedAction { action, start, end });
                moved = true;
            }
        }
        moved
    }

    /// When `action` ends if it starts at `start`; `None` while it has to wait for another device.
    fn end_of(&mut self, action: Action, start: Nanos) -> Option<Nanos> {
        match action.op {
            Op::Send(transfer) => {
                let link = self.links.entry((transfer.edge, transfer.half)).or_default();
                let free = match link.sent.len().checked_sub(self.capacity) {
                    None => Nanos(0),
                    Some(before) => *link.received.get(before)?,
                };
                let end = start.max(free);
                link.sent.push(end + self.costs.latency);
                Some(end)
            }
            Op::Receive(transfer) => {
                let link = self.links.entry((transfer.edge, transfer.half)).or_default();
                let there = *link.sent.get(link.received.len())?;
                let end = start.max(there);
                link.received.push(end);
                Some(end)
            }
            _ => Some(start + self.costs.duration(action)),
        }
    }

    fn finish(self) -> Result<Timeline, Deadlock> {
        let mut waiting = Vec::new();
        for (device, (list, done)) in self.program.devices.iter().zip(&self.devices).enumerate() {
            if let Some(&action) = list.get(done.len()) {
                let device = DeviceId::from_index(device);
                waiting.push(Waiting { device, position: done.len(), action });
            }
        }
        if !waiting.is_empty() {
            return Err(Deadlock { waiting });
        }
        let last = self.devices.iter().filter_map(|list| list.last());
        let makespan = last.map(|timed| timed.end).max().unwrap_or_default();
        let peak_held = peak_held(self.program, self.costs);
        Ok(Timeline { devices: self.devices, makespan, peak_held })
    }
}

/// Most bytes of inputs and activations per stage. It depends on the order alone, not on times.
fn peak_held(program: &Program, costs: &Costs) -> Vec<Bytes> {
    let recomputed = program.rematerialized();
    let trains = program.trains();
    let mut held = vec![(Bytes(0), Bytes(0)); program.topology.stages];
    for action in program.devices.iter().flatten() {
        let cost = costs.stages.get(action.stage.index()).copied().unwrap_or_default();
        let Some((now, peak)) = held.get_mut(action.stage.index()) else {
            continue;
        };
        match action.op {
            Op::Forward(_) if !trains => *peak = (*peak).max(cost.inputs),
            Op::Forward(m) if recomputed.contains(&(action.stage, m)) => *now += cost.inputs,
            Op::Forward(_) => *now += cost.inputs + cost.activations,
            Op::Rematerialize(_) => *now += cost.activations,
            Op::Backward(_) => *now = *now - cost.inputs - cost.activations,
            _ => {}
        }
        *peak = (*peak).max(*now);
    }
    held.into_iter().map(|(_, peak)| peak).collect()
}
