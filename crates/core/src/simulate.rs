//! Runs a program on a virtual clock: the result is a timeline, and the bubble.
//!
//! A device runs its list in order. A message occupies its link for some time, after the messages
//! before it, and arrives one latency later. A send waits while its link already holds `capacity`
//! messages. A network of ordered lists and bounded queues has only one outcome, in whatever order
//! the devices are advanced (Kahn 1974). Advancing them greedily therefore finds every deadlock and
//! the only possible timeline.
//!
//! `gpipe-runtime` with its mock stage on a virtual clock reproduces the timeline to the
//! nanosecond, and its tests check this. Memory is computed in [`crate::memory`].

use crate::{
    action::{Action, Direction, Op},
    ids::{DeviceId, EdgeId, MicroBatch},
    lower::{Program, RematSet},
    units::Nanos,
};

/// The times of one stage's actions, per micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCost {
    /// One forward that keeps nothing but its inputs.
    pub forward: Nanos,
    /// One forward that keeps its activations, or that no backward follows.
    pub forward_kept: Nanos,
    /// One re-materialization.
    pub rematerialize: Nanos,
    /// One backward after a re-materialization.
    pub backward: Nanos,
    /// One backward whose forward kept its activations.
    pub backward_kept: Nanos,
    /// The first half of a split backward after a re-materialization: gradients of the inputs.
    pub backward_input: Nanos,
    /// The first half of a split backward whose forward kept its activations.
    pub backward_input_kept: Nanos,
    /// The second half of a split backward: gradients of the weights.
    pub backward_weight: Nanos,
    /// The norm of the stage's gradients, once per step. Reducing and deciding take no time here.
    pub norm: Nanos,
    /// The update, once per step.
    pub update: Nanos,
}

/// The times of an edge's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCost {
    /// The time from when a message has left its link to when it can be received.
    pub latency: Nanos,
    /// How long one message occupies the link, along the edge. The link carries one message at a
    /// time.
    pub forward: Nanos,
    /// How long one message occupies the link, against the edge.
    pub backward: Nanos,
}

impl LinkCost {
    /// How long a message in `direction` occupies the link.
    pub fn occupied(&self, direction: Direction) -> Nanos {
        match direction {
            Direction::Forward => self.forward,
            Direction::Backward => self.backward,
        }
    }
}

/// The costs of a whole pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Costs {
    /// By stage; a missing stage costs nothing.
    pub stages: Vec<StageCost>,
    /// Like `stages`, for the smaller of two micro-batch sizes.
    pub smaller: Vec<StageCost>,
    /// The first micro-batch of the smaller size; `None` if all have the same size.
    pub smaller_from: Option<MicroBatch>,
    /// By edge; a missing edge takes no time.
    pub links: Vec<LinkCost>,
}

impl Costs {
    /// Costs where all micro-batches have one size and links take no time.
    pub fn of_stages(stages: Vec<StageCost>) -> Self {
        Self { stages, ..Self::default() }
    }

    /// Unit costs, in which the literature states bubbles: one nanosecond for everything except the
    /// norm, the update and the links.
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

    /// Like [`Costs::unit`], but a whole backward takes two nanoseconds, one for each half. The
    /// bubble of schedules that split the backward is stated in these costs (Qi et al. 2023, arXiv
    /// 2401.10241, section 2).
    pub fn unit_halves(stages: usize) -> Self {
        let mut costs = Self::unit(stages);
        for stage in &mut costs.stages {
            (stage.backward, stage.backward_kept) = (Nanos(2), Nanos(2));
        }
        costs
    }

    /// Costs from measured `timelines` of one program: the `typical` time, such as the [`median`],
    /// of each kind of action on each stage. Messages take no time. Actions that did not run cost
    /// nothing.
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

    /// The cost of a stage for a micro-batch.
    pub fn stage(&self, stage: crate::ids::StageId, micro_batch: MicroBatch) -> StageCost {
        let smaller = self.smaller_from.is_some_and(|first| micro_batch >= first);
        let stages = if smaller { &self.smaller } else { &self.stages };
        stages.get(stage.index()).copied().unwrap_or_default()
    }

    /// How long `action` keeps its device busy. `recomputed`: its forward discards what its
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

    /// The times of an edge's messages.
    pub fn link(&self, edge: EdgeId) -> LinkCost {
        self.links.get(edge.index()).copied().unwrap_or_default()
    }
}

/// The median of `times`: the midpoint of the two middle values for an even count, 0 for none.
pub fn median(times: &mut [u64]) -> Nanos {
    times.sort_unstable();
    let at = |index: usize| times.get(index).copied().unwrap_or(0);
    let (low, high) = (at(times.len().saturating_sub(1) / 2), at(times.len() / 2));
    Nanos(low + (high - low) / 2)
}

/// An action with its time on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// The action.
    pub action: Action,
    /// When the device reached the action.
    pub start: Nanos,
    /// When the action was done. For transfers this includes waiting.
    pub end: Nanos,
}

/// Actions with times, measured or simulated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Timeline {
    /// For each device, its actions in order.
    pub devices: Vec<Vec<TimedAction>>,
    /// The time from the start of the step to the last end.
    pub makespan: Nanos,
}

impl Timeline {
    /// All actions, device by device.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        self.devices.iter().flatten().map(|timed| &timed.action)
    }

    /// The share of devices x makespan in which devices communicated or waited instead of
    /// computing. 0 is perfect.
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

    /// The bubble as the zero-bubble papers count it: the share of the longest time between a
    /// device's first and last compute action that the device does not compute (Qi et al. 2023,
    /// arXiv 2401.10241, section 5.3). It leaves out the wait for the first and after the last
    /// action, which every step has whose update waits for all devices; [`Timeline::bubble`] counts
    /// it.
    pub fn bubble_within_devices(&self) -> f64 {
        let computes = |timed: &&TimedAction| timed.action.op.computes().is_some();
        let span = |list: &Vec<TimedAction>| {
            let (first, last) = (list.iter().find(computes)?, list.iter().rfind(computes)?);
            let busy = list.iter().filter(computes).map(|timed| timed.end - timed.start).sum();
            Some((last.end - first.start, busy))
        };
        let spans: Vec<(Nanos, Nanos)> = self.devices.iter().filter_map(span).collect();
        let longest = spans.iter().map(|(span, _)| *span).max().unwrap_or_default();
        let busy: Nanos = spans.iter().map(|(_, busy)| *busy).sum();
        let area = longest.0 as f64 * spans.len() as f64;
        if area == 0.0 { 0.0 } else { (1.0 - busy.0 as f64 / area).max(0.0) }
    }
}

/// A deadlock: no device can continue. Lists each device with work left and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("deadlock: {}", waiting.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Deadlock {
    /// The devices that wait.
    pub waiting: Vec<Waiting>,
}

/// A device that waits forever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The device.
    pub device: DeviceId,
    /// The position in its list.
    pub position: usize,
    /// The send (its link is full) or receive (nothing arrives) that blocks the device.
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

/// The default number of messages that a link holds; a schedule that would deadlock gets more.
pub const LINK_CAPACITY: usize = 2;

/// Times `program` with the smallest link capacity that it needs, but at least [`LINK_CAPACITY`].
/// Returns the capacity and the timeline.
///
/// # Errors
/// [`Deadlock`] if no capacity is enough.
pub fn simulate_with_room(program: &Program, costs: &Costs) -> Result<(usize, Timeline), Deadlock> {
    if let Ok(timeline) = simulate(program, costs, LINK_CAPACITY) {
        return Ok((LINK_CAPACITY, timeline));
    }
    // If links with room for all messages do not help, it is a true deadlock. If they do, more room
    // never hurts, so a binary search finds the least.
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

/// The times of all messages that passed one edge in one direction.
#[derive(Default)]
struct Link {
    /// When each message can be received.
    arrivals: Vec<Nanos>,
    received: Vec<Nanos>,
    /// When the last message had left the link.
    free: Nanos,
}

struct Machine<'a> {
    program: &'a Program,
    recomputed: &'a RematSet,
    costs: &'a Costs,
    capacity: usize,
    /// For each edge, its two directions.
    links: Vec<[Link; 2]>,
    devices: Vec<Vec<TimedAction>>,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, costs: &'a Costs, capacity: usize) -> Self {
        let devices = program.devices.iter().map(|list| Vec::with_capacity(list.len())).collect();
        let links = program.topology.edges.iter().map(|_| Default::default()).collect();
        Self { program, recomputed: program.rematerialized(), costs, capacity, links, devices }
    }

    /// Advances every device as far as possible. Returns whether any of them advanced.
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

    /// When `action` ends if it starts at `start`; `None` while it waits for another device.
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
