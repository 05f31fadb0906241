//! Running a program on a virtual clock: a timeline and the bubble.
//!
//! A device runs its list in order. A message takes its link for some time, after the messages
//! before it, and is there a latency later; a send waits while its link already holds `capacity`
//! messages. Such a network of ordered lists and bounded queues has one outcome, whatever order the
//! devices are advanced in (Kahn 1974), so advancing them greedily finds every deadlock and the
//! only possible timeline. `gpipe-runtime` with its mock stage on a virtual clock reproduces it to
//! the nanosecond; its tests say so. What is held in memory is [`crate::memory`]'s to say.

use crate::{
    action::{Action, Direction, Op},
    ids::{DeviceId, EdgeId, MicroBatch},
    lower::{Program, RematSet},
    units::Nanos,
};

/// What one stage's actions take, per micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// One forward that keeps nothing but its inputs.
    pub forward: Nanos,
    /// One forward that keeps its activations, or is followed by no backward.
    pub forward_kept: Nanos,
    /// One re-materialization.
    pub rematerialize: Nanos,
    /// One backward after a re-materialization.
    pub backward: Nanos,
    /// One backward whose forward kept its activations.
    pub backward_kept: Nanos,
    /// The first half of a split backward after a re-materialization: gradients of the inputs.
    pub backward_input: Nanos,
    /// The same, where the forward kept its activations.
    pub backward_input_kept: Nanos,
    /// The second half: gradients of the weights.
    pub backward_weight: Nanos,
    /// The norm of its gradients, once per step. Reducing and deciding take nothing here.
    pub norm: Nanos,
    /// The update, once per step.
    pub update: Nanos,
}

/// What an edge's messages take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCost {
    /// From the moment a message has left its link to the moment it can be received.
    pub latency: Nanos,
    /// How long one message takes the link, in which no other can: along the edge.
    pub forward: Nanos,
    /// And back.
    pub backward: Nanos,
}

impl LinkCost {
    /// How long a message of `half` takes the link.
    pub fn occupied(&self, direction: Direction) -> Nanos {
        match direction {
            Direction::Forward => self.forward,
            Direction::Backward => self.backward,
        }
    }
}

/// Costs of a whole pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Costs {
    /// By stage; a missing stage costs nothing.
    pub stages: Vec<StageCost>,
    /// As `stages`, for the smaller of two sizes of micro-batches.
    pub smaller: Vec<StageCost>,
    /// The first micro-batch of the smaller size; `None`: all are of one size.
    pub smaller_from: Option<MicroBatch>,
    /// By edge; a missing edge takes no time.
    pub links: Vec<LinkCost>,
}

impl Costs {
    /// All micro-batches alike, and links that take no time.
    pub fn of_stages(stages: Vec<StageCost>) -> Self {
        Self { stages, ..Self::default() }
    }

    /// One nanosecond for everything but the norm, the update and the links: the unit costs in
    /// which the literature states bubbles.
    pub fn unit(stages: usize) -> Self {
        let one = StageCost {
            forward: Nanos(1),
            forward_kept: Nanos(1),
            rematerialize: Nanos(1),
            backward: Nanos(1),
            backward_kept: Nanos(1),
            backward_input: Nanos(1),
            backward_input_kept: Nanos(1),
            backward_weight: Nanos(1),
            norm: Nanos(0),
            update: Nanos(0),
        };
        Self::of_stages(vec![one; stages])
    }

    /// As [`Costs::unit`], but a whole backward takes two nanoseconds, one for each of its halves:
    /// the costs in which the bubble of schedules that split it is stated (Qi et al. 2023, arXiv
    /// 2401.10241, section 2).
    pub fn unit_halves(stages: usize) -> Self {
        let mut costs = Self::unit(stages);
        for stage in &mut costs.stages {
            (stage.backward, stage.backward_kept) = (Nanos(2), Nanos(2));
        }
        costs
    }

    /// The `typical` time of each kind of action on each stage of `timelines` of the same program,
    /// such as [`median`]; messages take no time. What was not done costs nothing.
    pub fn measured(timelines: &[&Timeline], typical: fn(&mut [u64]) -> Nanos) -> Self {
        type Times = [Vec<u64>; 10];
        let mut times: Vec<Times> = Vec::new();
        for timeline in timelines {
            let recomputed = RematSet::from_actions(timeline.actions());
            for timed in timeline.devices.iter().flatten() {
                let stage = timed.action.stage;
                let again = |m| recomputed.contains(stage, m);
                let kind = match timed.action.op {
                    Op::Forward(m) if again(m) => 0,
                    Op::Forward(_) => 1,
                    Op::Rematerialize(_) => 2,
                    Op::Backward(m) if again(m) => 3,
                    Op::Backward(_) => 4,
                    Op::BackwardInput(m) if again(m) => 5,
                    Op::BackwardInput(_) => 6,
                    Op::BackwardWeight(_) => 7,
                    Op::Norm => 8,
                    Op::Update => 9,
                    _ => continue,
                };
                if times.len() <= stage.index() {
                    times.resize_with(stage.index() + 1, Times::default);
                }
                times[stage.index()][kind].push((timed.end - timed.start).0);
            }
        }
        let stages = times.into_iter().map(|kinds| {
            let times = kinds.map(|mut times| typical(&mut times));
            let [forward, forward_kept, rematerialize, backward, backward_kept, ..] = times;
            let [.., backward_input, backward_input_kept, backward_weight, norm, update] = times;
            StageCost {
                forward,
                forward_kept,
                rematerialize,
                backward,
                backward_kept,
                backward_input,
                backward_input_kept,
                backward_weight,
                norm,
                update,
            }
        });
        Self::of_stages(stages.collect())
    }

    /// That of a stage for a micro-batch.
    pub fn stage(&self, stage: crate::ids::StageId, micro_batch: MicroBatch) -> StageCost {
        let smaller = self.smaller_from.is_some_and(|first| micro_batch >= first);
        let stages = if smaller { &self.smaller } else { &self.stages };
        stages.get(stage.index()).copied().unwrap_or_default()
    }

    /// How long `action` keeps its device busy; `recomputed` if its forward discards what its
    /// backward needs.
    pub fn duration(&self, action: Action, recomputed: bool) -> Nanos {
        let cost = self.stage(action.stage, action.op.computes().unwrap_or_default());
        match action.op {
            Op::Forward(_) if recomputed => cost.forward,
            Op::Forward(_) => cost.forward_kept,
            Op::Rematerialize(_) => cost.rematerialize,
            Op::Backward(_) if recomputed => cost.backward,
            Op::Backward(_) => cost.backward_kept,
            Op::BackwardInput(_) if recomputed => cost.backward_input,
            Op::BackwardInput(_) => cost.backward_input_kept,
            Op::BackwardWeight(_) => cost.backward_weight,
            Op::Norm => cost.norm,
            Op::Update => cost.update,
            Op::Send(_) | Op::Receive(_) | Op::Reduce | Op::Decide => Nanos(0),
        }
    }

    /// What an edge's messages take.
    pub fn link(&self, edge: EdgeId) -> LinkCost {
        self.links.get(edge.index()).copied().unwrap_or_default()
    }
}

/// The median, halfway between the two in the middle of an even number; 0 of nothing.
pub fn median(times: &mut [u64]) -> Nanos {
    times.sort_unstable();
    let at = |index: usize| times.get(index).copied().unwrap_or(0);
    let (low, high) = (at(times.len().saturating_sub(1) / 2), at(times.len() / 2));
    Nanos(low + (high - low) / 2)
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
}

impl Timeline {
    /// All actions, device by device.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        self.devices.iter().flatten().map(|timed| &timed.action)
    }

    /// The share of devices x makespan in which a device was not busy, but communicated or waited:
    /// 0 is perfect.
    pub fn bubble(&self) -> f64 {
        let area = self.makespan.0 as f64 * self.devices.len() as f64;
        if area == 0.0 {
            return 0.0;
        }
        let is_busy =
            |timed: &&TimedAction| !matches!(timed.action.op, Op::Send(_) | Op::Receive(_));
        let spent = |timed: &TimedAction| timed.end - timed.start;
        let busy: Nanos = self.devices.iter().flatten().filter(is_busy).map(spent).sum();
        (1.0 - busy.0 as f64 / area).max(0.0)
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

/// Messages that a link holds; more where a schedule would deadlock with that few.
pub const LINK_CAPACITY: usize = 2;

/// Times `program` with links that hold as few messages as it needs, and at least
/// [`LINK_CAPACITY`]; says how many.
///
/// # Errors
/// [`Deadlock`]: no number is enough.
pub fn simulate_with_room(program: &Program, costs: &Costs) -> Result<(usize, Timeline), Deadlock> {
    if let Ok(timeline) = simulate(program, costs, LINK_CAPACITY) {
        return Ok((LINK_CAPACITY, timeline));
    }
    // What a link with room for all messages does not help is a deadlock; and where it helps, more
    // room never harms.
    let (mut too_few, mut enough) = (LINK_CAPACITY, program.micro_batches.max(LINK_CAPACITY) + 1);
    let mut timeline = simulate(program, costs, enough)?;
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match simulate(program, costs, middle) {
            Ok(found) => (enough, timeline) = (middle, found),
            Err(_) => too_few = middle,
        }
    }
    Ok((enough, timeline))
}

/// The messages that ever passed one half of one edge, by their times.
#[derive(Default)]
struct Link {
    /// When each can be received.
    arrivals: Vec<Nanos>,
    received: Vec<Nanos>,
    /// When the last one had left it.
    free: Nanos,
}

struct Machine<'a> {
    program: &'a Program,
    recomputed: RematSet,
    costs: &'a Costs,
    capacity: usize,
    /// Both halves of each edge.
    links: Vec<[Link; 2]>,
    devices: Vec<Vec<TimedAction>>,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, costs: &'a Costs, capacity: usize) -> Self {
        let devices = program.devices.iter().map(|list| Vec::with_capacity(list.len())).collect();
        let links = program.topology.edges.iter().map(|_| Default::default()).collect();
        Self { program, recomputed: program.rematerialized(), costs, capacity, links, devices }
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
                let cost = self.costs.link(transfer.edge);
                let link = self.links.get_mut(transfer.edge.index())?;
                let link = &mut link[transfer.direction as usize];
                let free = match link.arrivals.len().checked_sub(self.capacity) {
                    None => Nanos(0),
                    Some(before) => *link.received.get(before)?,
                };
                let end = start.max(free);
                link.free = end.max(link.free) + cost.occupied(transfer.direction);
                link.arrivals.push(link.free + cost.latency);
                Some(end)
            }
            Op::Receive(transfer) => {
                let link = self.links.get_mut(transfer.edge.index())?;
                let link = &mut link[transfer.direction as usize];
                let there = *link.arrivals.get(link.received.len())?;
                let end = start.max(there);
                link.received.push(end);
                Some(end)
            }
            op => {
                let again = |m| self.recomputed.contains(action.stage, m);
                let recomputed = op.computes().is_some_and(again);
                Some(start + self.costs.duration(action, recomputed))
            }
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
        Ok(Timeline { devices: self.devices, makespan })
    }
}
