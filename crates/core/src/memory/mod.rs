//! The bytes that stages hold, from the order of a program alone. No timing can make a stage hold
//! more.
//!
//! A stage is charged for what it allocates, whoever frees it. What it keeps for a micro-batch
//! lives from its forward to its backward. A kept output lives longer if its receiver splits the
//! backward: until the receiver's second half.
//!
//! A message lives until its receiver's backward is done. The sender knows that the backward is
//! done in two cases. A message arrives that the receiver sent after it. Or a send finds a free
//! slot that the receiver freed after it. Until then the message counts as held. A value that one
//! stage hands over to another on its own device counts likewise.
//!
//! ```text
//! held at an action = resident + gradients (after the first backward)
//!                   + kept or discarded micro-batches x what they hold
//!                   + messages x their size, or what has arrived ahead
//!                   + split backwards x what their first half leaves
//!                   + the early gradients that first halves compute
//!                   + offloaded micro-batches on their way out or back
//!                   + the action's own peak
//! ```
//!
//! The counts depend only on the program ([`moments`]), and the sizes only on the cut
//! ([`StageBytes`]). A planner therefore computes the moments once and prices many cuts with them.
//!
//! - `order`: what may be live at each action
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

/// What an action holds, above what was there at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActionMemory {
    /// The peak while it runs.
    pub peak: Bytes,
    /// What remains from its end until the micro-batch's backward.
    pub after: Bytes,
}

/// What a stage's actions hold, for micro-batches of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageBytes {
    /// Held always: parameters, optimizer state and averages.
    pub resident: Bytes,
    /// Held from the first backward to the update: gradients.
    pub gradients: Bytes,
    /// Left by each forward until the norm, whatever else it keeps, and counted until the update:
    /// the statistics of batch norms.
    pub statistics: Bytes,
    /// A forward that discards. `after` does not include what it sends.
    pub forward: ActionMemory,
    /// A forward that keeps its activations. `after` includes what it sends, but not the
    /// statistics.
    pub forward_kept: ActionMemory,
    /// A re-materialization.
    pub rematerialize: ActionMemory,
    /// What is in memory of a micro-batch while it is moved out of the device's memory, or back
    /// ahead of its backward. 0 for stages that do not offload.
    pub moving: Bytes,
    /// Peak above the start of a backward after a re-materialization.
    pub backward: Bytes,
    /// Peak above the start of a backward whose forward kept its activations.
    pub backward_kept: Bytes,
    /// Like `backward`, for the step's first backward, which allocates the gradients.
    pub first_backward: Bytes,
    /// Like `backward_kept`, for the step's first backward.
    pub first_backward_kept: Bytes,
    /// What remains between the halves of a split backward, of all that was held before it.
    pub split: Bytes,
    /// The part of `gradients` that first halves already compute. It exists from the step's first
    /// such half, and once more for each first half that waits for the turn of its micro-batch.
    pub early: Bytes,
    /// Peak above the start of a first half after a re-materialization.
    pub backward_input: Bytes,
    /// Peak above the start of a first half whose forward kept its activations.
    pub backward_input_kept: Bytes,
    /// Like `backward_input`, for a first half that allocates the `early` gradients: the step's
    /// first one, or one out of turn.
    pub first_backward_input: Bytes,
    /// Like `backward_input_kept`, for a first half that allocates the `early` gradients.
    pub first_backward_input_kept: Bytes,
    /// Peak above the start of a second half.
    pub backward_weight: Bytes,
    /// Like `backward_weight`, for the step's first second half.
    pub first_backward_weight: Bytes,
    /// Peak of the norm and the update, above parameters, state and gradients.
    pub update: Bytes,
    /// What other stages and the driver have already copied to the stage's own memory, for later
    /// micro-batches, at most, over links of [`LINK_CAPACITY`](crate::simulate::LINK_CAPACITY). It
    /// depends on timing.
    pub ahead: Bytes,
    /// A message of each link to the stage, if it has a memory of its own. Links that hold more
    /// messages may bring as many more ahead.
    pub message: Bytes,
}

/// The sizes of an edge's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeBytes {
    /// Bytes of a message along the edge.
    pub forward: Bytes,
    /// Bytes of a message against the edge.
    pub backward: Bytes,
}

impl EdgeBytes {
    /// The size in one direction.
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

/// Upper bounds on how much of each kind a stage holds at the start of one of its actions.
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
    /// Other micro-batches that may be on their way out, or back, if the stage offloads.
    moving: u32,
    /// Sent messages that may still be live, by the stage's edges (see [`Moments`]).
    messages: Vec<u32>,
}

impl Moment {
    /// Whether `other` holds at least as much of everything.
    fn is_within(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.gradients <= other.gradients
            && self.early <= other.early
            && self.forwards <= other.forwards
            && self.kept <= other.kept
            && self.discarded <= other.discarded
            && self.recomputed <= other.recomputed
            && self.split <= other.split
            && self.moving <= other.moving
            && self.messages.iter().zip(&other.messages).all(|(own, other)| own <= other)
    }
}

/// The moments at which a stage may hold the most.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Moments {
    /// The edges that the message counts of each moment refer to, in order.
    edges: Vec<(EdgeId, Direction)>,
    moments: Vec<Moment>,
    /// How many messages more than [`LINK_CAPACITY`](crate::simulate::LINK_CAPACITY) a link holds.
    beyond: usize,
}

impl Moments {
    /// The most that the stage can hold, whatever the timing. `edges` is by edge; a missing edge
    /// has empty messages.
    pub fn peak(&self, bytes: &StageBytes, edges: &[EdgeBytes]) -> Bytes {
        let message = |&(edge, direction): &(EdgeId, Direction)| {
            edges.get(edge.index()).copied().unwrap_or_default().of(direction)
        };
        let messages: Vec<Bytes> = self.edges.iter().map(message).collect();
        let peaks = self.moments.iter().map(|moment| {
            let sent = moment.messages.iter().zip(&messages);
            let sent: Bytes =
                sent.map(|(&count, size)| Bytes(u64::from(count).saturating_mul(size.0))).sum();
            let more = if moment.kind == Kind::Update { 0 } else { self.beyond };
            let ahead = bytes.message.times(more);
            own_bytes(bytes, moment) + ahead + sent + peak_of(bytes, moment.kind)
        });
        peaks.max().unwrap_or_default().max(bytes.resident)
    }

    /// Returns a copy without messages at the norm and the update. By then, ties may have shown
    /// that the messages are gone.
    pub fn forget_messages_at_update(&self) -> Self {
        let mut own = self.clone();
        for moment in own.moments.iter_mut().filter(|moment| moment.kind == Kind::Update) {
            moment.messages.fill(0);
        }
        own
    }

    /// Starts counting the messages of these links, in this order. New links are only added at the
    /// end.
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

/// The bytes of a moment without messages and without the action's own peak.
fn own_bytes(bytes: &StageBytes, moment: &Moment) -> Bytes {
    let times = |count: u32, size: Bytes| Bytes(u64::from(count).saturating_mul(size.0));
    let gradients = if moment.gradients { bytes.gradients } else { Bytes(0) };
    let ahead = if moment.kind == Kind::Update { Bytes(0) } else { bytes.ahead };
    bytes.resident
        + ahead
        + gradients
        + times(moment.early, bytes.early)
        + times(moment.forwards, bytes.statistics)
        + times(moment.kept, bytes.forward_kept.after)
        + times(moment.discarded, bytes.forward.after)
        + times(moment.recomputed, bytes.rematerialize.after)
        + times(moment.split, bytes.split)
        + times(moment.moving, bytes.moving)
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

/// What a stage holds for itself, updated action by action.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    gradients: bool,
    /// How many copies of the early gradients exist: the running sums, and those that wait for the
    /// turn of their micro-batch.
    early: u32,
    /// The micro-batch whose turn it is. Gradients are summed in this order.
    turn: u32,
    forwards: u32,
    kept: u32,
    discarded: u32,
    recomputed: u32,
    split: u32,
}

impl Counts {
    /// The kind of `action`, and the counts once it is done.
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
                // The early sums now become part of all gradients.
                after.early -= u32::from(!self.gradients).min(self.early);
                after.gradients = true;
                after.turn = after.turn.max(m.0 + 1);
                after.split = after.split.saturating_sub(1);
                // Early gradients that wait belong to a micro-batch whose second half is still to
                // come.
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

    /// Releases what was held for a micro-batch until its backward.
    fn release(&mut self, recomputed: bool) {
        if recomputed {
            self.discarded = self.discarded.saturating_sub(1);
            self.recomputed = self.recomputed.saturating_sub(1);
        } else {
            self.kept = self.kept.saturating_sub(1);
        }
    }

    /// How many micro-batches may be on their way out, or back, during an action of this kind,
    /// where discarding means moving away.
    ///
    /// At most one is on its way out, and at most one was read ahead. A forward that moves away
    /// waits for the first if there is a second. A read begins after a re-materialization, when the
    /// write before it is done, so the backward finds one of both.
    fn moving(self, kind: Kind) -> u32 {
        let away = self.discarded.saturating_sub(self.recomputed);
        match kind {
            Kind::Rematerialize => away.saturating_sub(1).min(1),
            Kind::Forward { keeps: false } => away.min(1),
            Kind::Backward { kept: false, .. } | Kind::BackwardInput { kept: false, .. } => {
                away.min(1)
            }
            _ => away.min(2),
        }
    }

    fn moment(self, kind: Kind, messages: Vec<u32>) -> Moment {
        let Self { gradients, early, turn: _, forwards, kept, discarded, recomputed, split } = self;
        Moment {
            kind,
            gradients,
            early,
            forwards,
            kept,
            discarded,
            recomputed,
            split,
            moving: self.moving(kind),
            messages,
        }
    }
}

/// Computes the moments of every stage of a training program whose links hold `capacity` messages.
pub fn moments(program: &Program, capacity: usize) -> Vec<Moments> {
    let order = Order::new(program, capacity);
    let mut all = vec![Moments::default(); program.topology.stages];
    for (device, list) in program.devices.iter().enumerate() {
        order.add_moments(device, list, &mut all);
    }
    all
}

/// The most that each stage can hold, whatever the timing.
pub fn peaks(
    program: &Program,
    capacity: usize,
    stages: &[StageBytes],
    edges: &[EdgeBytes],
) -> Vec<Bytes> {
    let moments = moments(program, capacity);
    moments.iter().zip(stages).map(|(moments, bytes)| moments.peak(bytes, edges)).collect()
}

/// The bytes of each stage over the time of `timeline`. Each value holds until the next time.
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
            && let Some(living) = places.living(&program.topology, stage, transfer, recomputed)
        {
            let size = edges.get(transfer.edge.index()).copied().unwrap_or_default();
            let size = signed(size.of(transfer.direction));
            let consumed = timeline.devices.get(living.device);
            let consumed = consumed.and_then(|list| list.get(living.consumed));
            changes[stage.index()].push((timed.start, size));
            changes[stage.index()]
                .extend(consumed.map(|consumed| (consumed.end.max(timed.start), -size)));
        }
        let outputs = places.outlive(&program.topology, timed.action, recomputed).into_iter();
        let handed = places.handed_over(&program.topology, timed.action, recomputed);
        for output in outputs.chain(handed) {
            let (edge, direction) = output.link;
            let size = signed(edges.get(edge.index()).copied().unwrap_or_default().of(direction));
            let consumed = timeline.devices.get(output.device);
            let consumed = consumed.and_then(|list| list.get(output.consumed));
            changes[stage.index()].push((timed.end, size));
            changes[stage.index()]
                .extend(consumed.map(|consumed| (consumed.end.max(timed.end), -size)));
        }
        let before = counts[stage.index()];
        let Some((kind, after)) = before.act(timed.action, recomputed) else { continue };
        let held = |counts: Counts| {
            // What is moving depends on how fast it moves, which is not drawn.
            let moment = counts.moment(Kind::Update, Vec::new());
            signed(own_bytes(bytes, &Moment { moving: 0, ..moment }))
        };
        let peak = signed(peak_of(bytes, kind));
        // The peak of a first backward already contains the gradients that it allocates.
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
