//! The bytes that stages hold, from the order of a program alone: no timing can make a stage hold
//! more.
//!
//! A stage is charged for what it allocates, whoever frees it. What it keeps for a micro-batch
//! lives from its own forward to its own backward; an output that it keeps lives longer where its
//! receiver splits the backward, to the second half. A message lives until its receiver's backward
//! is done; when that is, the sender knows only from what it hears: it is certainly done once a
//! message arrives that the receiver sent later, or once a send finds room that the receiver made
//! later. Until then it counts as held.
//!
//! ```text
//! held at an action = resident + gradients (after the first backward)
//!                   + kept or discarded micro-batches x what they hold + messages x their size + the action's own peak
//!                   + split backwards x what their first half leaves, and the gradients that it found already
//! ```
//!
//! The counts depend on the program alone ([`moments`]); the sizes on the cut ([`StageBytes`]). A
//! planner therefore asks for the moments once, and prices many cuts with them.
//!
//! - `order`: what may live when
//! - here: moments, their price, and the bytes over a timeline

mod order;
pub use self::order::Order;
use self::order::Places;
use crate::{
    action::{Action, Direction, Op},
    ids::EdgeId,
    lower::{Program, RematSet},
    simulate::Timeline,
    units::{Bytes, Nanos},
};

/// What an action holds: at most while it runs, and when it is done; both above what was there at
/// its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActionMemory {
    /// Most while it runs.
    pub peak: Bytes,
    /// From its end on, until the micro-batch's backward.
    pub after: Bytes,
}

/// What a stage's actions hold, for micro-batches of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageBytes {
    /// Parameters, optimizer state, averages: always.
    pub resident: Bytes,
    /// Gradients: from the first backward to the update.
    pub gradients: Bytes,
    /// What each forward leaves until the norm, whatever it keeps: the statistics of batch norms.
    pub statistics: Bytes,
    /// A forward that discards; what it sends is not in `after`.
    pub forward: ActionMemory,
    /// A forward that keeps its activations; what it sends is among them, and the statistics are
    /// not.
    pub forward_kept: ActionMemory,
    /// A re-materialization.
    pub rematerialize: ActionMemory,
    /// Most above its start, of a backward after a re-materialization.
    pub backward: Bytes,
    /// The same, where the forward kept its activations.
    pub backward_kept: Bytes,
    /// As `backward`, of the step's first one: gradients come into being, and are not there before.
    pub first_backward: Bytes,
    /// As `backward_kept`, of the step's first one.
    pub first_backward_kept: Bytes,
    /// What a backward that is split leaves from its first half to its second, of all that was held
    /// before it.
    pub split: Bytes,
    /// Of `gradients`, what first halves find: there from the step's first one, and once more for
    /// each that waits for the turn of its micro-batch.
    pub early: Bytes,
    /// Most above its start, of the first half after a re-materialization.
    pub backward_input: Bytes,
    /// The same, where the forward kept its activations.
    pub backward_input_kept: Bytes,
    /// As `backward_input`, of one that makes the `early` gradients: the step's first one, or one
    /// out of turn.
    pub first_backward_input: Bytes,
    /// As `backward_input_kept`, of one that makes them.
    pub first_backward_input_kept: Bytes,
    /// Most above its start, of the second half.
    pub backward_weight: Bytes,
    /// The same, of the step's first one.
    pub first_backward_weight: Bytes,
    /// The norm and the update, above parameters, state and gradients.
    pub update: Bytes,
}

/// The sizes of an edge's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeBytes {
    /// Along the edge.
    pub forward: Bytes,
    /// And back.
    pub backward: Bytes,
}

impl EdgeBytes {
    /// Of one direction.
    pub fn of(&self, direction: Direction) -> Bytes {
        match direction {
            Direction::Forward => self.forward,
            Direction::Backward => self.backward,
        }
    }
}

/// The kinds of action that allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Forward { keeps: bool },
    Rematerialize,
    Backward { kept: bool, first: bool },
    BackwardInput { kept: bool, first: bool },
    BackwardWeight { first: bool },
    Update,
}

/// How many of what a stage holds at the start of one of its actions, at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    kind: Kind,
    gradients: bool,
    early: u32,
    forwards: u32,
    kept: u32,
    discarded: u32,
    recomputed: u32,
    split: u32,
    /// Messages that it sent and that may still live, by the stage's edges (see [`Moments`]).
    messages: Vec<u32>,
}

impl Moment {
    /// Whether `other` holds no less of anything.
    fn is_within(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.gradients <= other.gradients
            && self.early <= other.early
            && self.forwards <= other.forwards
            && self.kept <= other.kept
            && self.discarded <= other.discarded
            && self.recomputed <= other.recomputed
            && self.split <= other.split
            && self.messages.iter().zip(&other.messages).all(|(own, other)| own <= other)
    }
}

/// The moments of a stage at which it may hold most.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Moments {
    /// What the counts of messages in each moment are of.
    edges: Vec<(EdgeId, Direction)>,
    moments: Vec<Moment>,
}

impl Moments {
    /// Most that the stage can hold, whatever the timing. `edges` by edge; a missing one is empty.
    pub fn peak(&self, bytes: &StageBytes, edges: &[EdgeBytes]) -> Bytes {
        let message = |&(edge, direction): &(EdgeId, Direction)| {
            edges.get(edge.index()).copied().unwrap_or_default().of(direction)
        };
        let messages: Vec<Bytes> = self.edges.iter().map(message).collect();
        let peaks = self.moments.iter().map(|moment| {
            let sent = moment.messages.iter().zip(&messages);
            let sent: Bytes =
                sent.map(|(&count, size)| Bytes(u64::from(count).saturating_mul(size.0))).sum();
            own_bytes(bytes, moment) + sent + peak_of(bytes, moment.kind)
        });
        peaks.max().unwrap_or_default().max(bytes.resident)
    }

    /// The same with no messages at the norm and the update, before which ties may have shown that
    /// they are gone.
    pub fn forget_messages_at_update(&self) -> Self {
        let mut own = self.clone();
        for moment in own.moments.iter_mut().filter(|moment| moment.kind == Kind::Update) {
            moment.messages.fill(0);
        }
        own
    }

    /// Counts the messages of these links, in this order; links are only ever added at the end.
    fn watch(&mut self, links: impl Iterator<Item = (EdgeId, Direction)>) {
        for link in links.skip(self.edges.len()) {
            self.edges.push(link);
            self.moments.iter_mut().for_each(|moment| moment.messages.push(0));
        }
    }

    fn add(&mut self, moment: Moment) {
        if self.moments.iter().any(|other| moment.is_within(other)) {
            return;
        }
        self.moments.retain(|other| !other.is_within(&moment));
        self.moments.push(moment);
    }
}

/// Without messages and the action's own peak.
fn own_bytes(bytes: &StageBytes, moment: &Moment) -> Bytes {
    let times = |count: u32, size: Bytes| Bytes(u64::from(count).saturating_mul(size.0));
    let gradients = if moment.gradients { bytes.gradients } else { Bytes(0) };
    bytes.resident
        + gradients
        + times(moment.early, bytes.early)
        + times(moment.forwards, bytes.statistics)
        + times(moment.kept, bytes.forward_kept.after)
        + times(moment.discarded, bytes.forward.after)
        + times(moment.recomputed, bytes.rematerialize.after)
        + times(moment.split, bytes.split)
}

fn peak_of(bytes: &StageBytes, kind: Kind) -> Bytes {
    match kind {
        Kind::Forward { keeps: true } => bytes.forward_kept.peak,
        Kind::Forward { keeps: false } => bytes.forward.peak,
        Kind::Rematerialize => bytes.rematerialize.peak,
        Kind::Backward { kept: true, first: true } => bytes.first_backward_kept,
        Kind::Backward { kept: true, first: false } => bytes.backward_kept,
        Kind::Backward { kept: false, first: true } => bytes.first_backward,
        Kind::Backward { kept: false, first: false } => bytes.backward,
        Kind::BackwardInput { kept: true, first: true } => bytes.first_backward_input_kept,
        Kind::BackwardInput { kept: true, first: false } => bytes.backward_input_kept,
        Kind::BackwardInput { kept: false, first: true } => bytes.first_backward_input,
        Kind::BackwardInput { kept: false, first: false } => bytes.backward_input,
        Kind::BackwardWeight { first: true } => bytes.first_backward_weight,
        Kind::BackwardWeight { first: false } => bytes.backward_weight,
        Kind::Update => bytes.update,
    }
}

/// What a stage holds for itself, as its actions go by.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    gradients: bool,
    /// What first halves found: the sums that they began, and what waits for the turn of its
    /// micro-batch.
    early: u32,
    /// The micro-batch whose turn it is: gradients are summed in order.
    turn: u32,
    forwards: u32,
    kept: u32,
    discarded: u32,
    recomputed: u32,
    split: u32,
}

impl Counts {
    /// The kind of `action`, and what is held once it is done.
    fn act(self, action: Action, recomputed: &RematSet) -> Option<(Kind, Self)> {
        let again = |m| recomputed.contains(action.stage, m);
        let mut after = self;
        after.forwards += u32::from(matches!(action.op, Op::Forward(_)));
        let kind = match action.op {
            Op::Forward(m) if again(m) => {
                after.discarded += 1;
                Kind::Forward { keeps: false }
            }
            Op::Forward(_) => {
                after.kept += 1;
                Kind::Forward { keeps: true }
            }
            Op::Rematerialize(_) => {
                after.recomputed += 1;
                Kind::Rematerialize
            }
            Op::Backward(m) => {
                after.gradients = true;
                after.turn = after.turn.max(m.0 + 1);
                after.release(again(m));
                Kind::Backward { kept: !again(m), first: !self.gradients }
            }
            Op::BackwardInput(m) => {
                after.release(again(m));
                after.split += 1;
                let in_turn = m.0 == self.turn;
                let first = !in_turn || m.0 == 0;
                after.turn += u32::from(in_turn);
                after.early += u32::from(first);
                Kind::BackwardInput { kept: !again(m), first }
            }
            Op::BackwardWeight(m) => {
                // The sums that were begun are among all of them from now on.
                after.early -= u32::from(!self.gradients).min(self.early);
                after.gradients = true;
                after.turn = after.turn.max(m.0 + 1);
                after.split = after.split.saturating_sub(1);
                // Whose gradients wait, its second half is still to come.
                after.early = after.early.min(after.split);
                Kind::BackwardWeight { first: !self.gradients }
            }
            Op::Norm => Kind::Update,
            Op::Update => {
                after.gradients = false;
                after.turn = 0;
                after.forwards = 0;
                Kind::Update
            }
            _ => return None,
        };
        Some((kind, after))
    }

    /// What was held for a micro-batch until its backward.
    fn release(&mut self, recomputed: bool) {
        if recomputed {
            self.discarded = self.discarded.saturating_sub(1);
            self.recomputed = self.recomputed.saturating_sub(1);
        } else {
            self.kept = self.kept.saturating_sub(1);
        }
    }

    fn moment(self, kind: Kind, messages: Vec<u32>) -> Moment {
        let Self { gradients, early, turn: _, forwards, kept, discarded, recomputed, split } = self;
        Moment { kind, gradients, early, forwards, kept, discarded, recomputed, split, messages }
    }
}

/// The moments of every stage of a training program whose links hold `capacity` messages.
pub fn moments(program: &Program, capacity: usize) -> Vec<Moments> {
    let order = Order::new(program, capacity);
    let mut all = vec![Moments::default(); program.topology.stages];
    for (device, list) in program.devices.iter().enumerate() {
        order.add_moments(device, list, &mut all);
    }
    all
}

/// Most that each stage can hold, whatever the timing.
pub fn peaks(
    program: &Program,
    capacity: usize,
    stages: &[StageBytes],
    edges: &[EdgeBytes],
) -> Vec<Bytes> {
    let moments = moments(program, capacity);
    moments.iter().zip(stages).map(|(moments, bytes)| moments.peak(bytes, edges)).collect()
}

/// The bytes of each stage over the time of `timeline`: from each time on, until the next one.
pub fn series(
    program: &Program,
    timeline: &Timeline,
    stages: &[StageBytes],
    edges: &[EdgeBytes],
) -> Vec<Vec<(Nanos, Bytes)>> {
    let recomputed = program.rematerialized();
    let places = Places::new(program);
    let mut changes: Vec<Vec<(Nanos, i64)>> = vec![Vec::new(); program.topology.stages];
    let mut counts: Vec<Counts> = vec![Counts::default(); program.topology.stages];
    for timed in timeline.devices.iter().flatten() {
        let stage = timed.action.stage;
        let Some(bytes) = stages.get(stage.index()) else { continue };
        if let Op::Send(transfer) = timed.action.op
            && let Some(living) = places.living(&program.topology, stage, transfer, &recomputed)
        {
            let size = edges.get(transfer.edge.index()).copied().unwrap_or_default();
            let size = signed(size.of(transfer.direction));
            let consumed = timeline.devices.get(living.device);
            let consumed = consumed.and_then(|list| list.get(living.consumed));
            changes[stage.index()].push((timed.start, size));
            changes[stage.index()]
                .extend(consumed.map(|consumed| (consumed.end.max(timed.start), -size)));
        }
        for output in places.outlive(&program.topology, timed.action, &recomputed) {
            let (edge, direction) = output.link;
            let size = signed(edges.get(edge.index()).copied().unwrap_or_default().of(direction));
            let consumed = timeline.devices.get(output.device);
            let consumed = consumed.and_then(|list| list.get(output.consumed));
            changes[stage.index()].push((timed.end, size));
            changes[stage.index()]
                .extend(consumed.map(|consumed| (consumed.end.max(timed.end), -size)));
        }
        let before = counts[stage.index()];
        let Some((kind, after)) = before.act(timed.action, &recomputed) else { continue };
        let held =
            |counts: Counts| signed(own_bytes(bytes, &counts.moment(Kind::Update, Vec::new())));
        let peak = signed(peak_of(bytes, kind));
        // Gradients that a first backward makes are in its peak.
        changes[stage.index()].push((timed.start, peak));
        changes[stage.index()].push((timed.end, held(after) - held(before) - peak));
        counts[stage.index()] = after;
    }
    let add_up = |(mut changes, bytes): (Vec<(Nanos, i64)>, &StageBytes)| {
        changes.sort_by_key(|(time, _)| *time);
        let mut now = signed(bytes.resident);
        let mut series = vec![(Nanos(0), bytes.resident)];
        for (time, change) in changes {
            now = now.saturating_add(change);
            let point = (time, Bytes(u64::try_from(now).unwrap_or(0)));
            match series.last_mut() {
                Some(last) if last.0 == time => *last = point,
                _ => series.push(point),
            }
        }
        series
    };
    changes.into_iter().zip(stages).map(add_up).collect()
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX).min(i64::MAX / 4)
}
