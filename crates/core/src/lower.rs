//! Lowering: turns compute actions into the full list that is validated, simulated, drawn and
//! executed.
//!
//! Transfers on the stage's edges surround each compute action:
//!
//! ```text
//! F   ->   RECV_F (edges in)      F   SEND_F (edges out)
//! R B ->   R   RECV_B (edges out)     B   SEND_B (edges in)       the recomputation does not wait
//! I W ->       RECV_B (edges out)     I   SEND_B (edges in)   W   no stage waits for W
//! ```
//!
//! An edge between two stages of one device has no transfers for micro-batches: the first stage
//! hands its value over to the second ([`Program::hands_over`]). The second stage's action then has
//! to come later in the device's list.
//!
//! After the last backward, the step ends on all stages together, all or nothing:
//!
//! ```text
//! [1] tied weights   users SEND_F their gradients; the owner RECV_F, REDUCE, SEND_B the sum;
//!                    users RECV_B
//! [2] norm           every stage NORM: its part of the global norm; the update is made ready
//! [3] vote           stages SEND_F their part to stage 0, which RECV_F, DECIDE, SEND_B the verdict
//! [4] update         every stage UPDATE, as the verdict says
//! ```
//!
//! A step may also run in parts, with the caller's work between them. Each part is a section of the
//! list ([`Program::part`]): the forwards, the backwards, the sums of tied gradients, the update.
//!
//! Whether the result is correct is not checked here: `validate` proves that from the list alone.

use crate::{
    action::{Action, ActionLists, Direction, Op, Transfer},
    ids::{DeviceId, EdgeId, StageId},
};

pub use crate::recomputed::RematSet;

/// A direct connection between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Edge {
    /// The stage where the forward direction starts.
    pub from: StageId,
    /// The stage where the forward direction ends.
    pub to: StageId,
    /// What the edge carries.
    pub kind: EdgeKind,
}

/// What an edge carries, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EdgeKind {
    /// Boundary activations to the next stage, per micro-batch. Their gradients go back if
    /// `gradient`.
    Boundary {
        /// Whether anything before the cut needs a gradient.
        gradient: bool,
    },
    /// A long skip's value to the stage that pops it, per micro-batch. Its gradient goes back if
    /// `gradient`.
    Skip {
        /// Whether anything before the stash needs a gradient.
        gradient: bool,
    },
    /// Gradients of a tied weight, from a stage that uses it to the stage that owns it, and their
    /// sum back. Once per step.
    Tie,
    /// A stage's part of the global norm to stage 0, and the verdict back. Once per step.
    Vote,
}

impl EdgeKind {
    /// Whether the edge carries a message per micro-batch, rather than once per step.
    pub fn per_micro_batch(self) -> bool {
        matches!(self, EdgeKind::Boundary { .. } | EdgeKind::Skip { .. })
    }

    /// The phase in which the edge carries messages in `direction`.
    pub fn phase(self, direction: Direction) -> Phase {
        match (self, direction) {
            (EdgeKind::Tie, _) => Phase::Reduce,
            (EdgeKind::Vote, _) => Phase::Update,
            (EdgeKind::Boundary { .. } | EdgeKind::Skip { .. }, Direction::Forward) => {
                Phase::Forward
            }
            (EdgeKind::Boundary { .. } | EdgeKind::Skip { .. }, Direction::Backward) => {
                Phase::Backward
            }
        }
    }

    /// Whether training uses the backward direction.
    pub fn goes_back(self) -> bool {
        match self {
            EdgeKind::Boundary { gradient } | EdgeKind::Skip { gradient } => gradient,
            EdgeKind::Tie | EdgeKind::Vote => true,
        }
    }
}

/// Stages and the edges between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// The number of stages, K.
    pub stages: usize,
    /// An edge's position here is its [`EdgeId`].
    pub edges: Vec<Edge>,
}

impl Topology {
    /// The edges of a sequence without skips or ties: a boundary from each stage to the next, and
    /// votes.
    pub fn chain(stages: usize) -> Self {
        let boundaries = (1..stages).map(|k| (k - 1, k, EdgeKind::Boundary { gradient: true }));
        let votes = (1..stages).map(|k| (k, 0, EdgeKind::Vote));
        let edges = boundaries
            .chain(votes)
            .map(|(from, to, kind)| Edge {
                from: StageId::from_index(from),
                to: StageId::from_index(to),
                kind,
            })
            .collect();
        Self { stages, edges }
    }

    /// The edges that pass `test`, with their ids, in order.
    pub fn edges_where(
        &self,
        test: impl Fn(&Edge) -> bool,
    ) -> impl Iterator<Item = (EdgeId, Edge)> {
        self.edges
            .iter()
            .enumerate()
            .filter(move |(_, edge)| test(edge))
            .map(|(index, &edge)| (EdgeId::from_index(index), edge))
    }
}

/// The full lists, with the topology that they refer to. All later passes read this form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Per device, every action in order.
    pub devices: ActionLists,
    /// The stages and edges that the actions name.
    pub topology: Topology,
    /// The number of micro-batches, M.
    pub micro_batches: usize,
    /// The part of a training step that these lists run.
    pub part: Part,
    /// The micro-batches that are recomputed in the whole step.
    recomputed: RematSet,
    /// The device of each stage in the whole step.
    placement: Vec<Option<DeviceId>>,
}

/// The phases of a training step. Each action belongs to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Forwards, and their transfers.
    Forward,
    /// Re-materializations and backwards, and their transfers.
    Backward,
    /// \[1\]: the sums of tied gradients.
    Reduce,
    /// \[2\] to \[4\]: norm, vote and update.
    Update,
}

/// The part of a training step that a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// No part of a training step: forwards that keep nothing, for evaluation and prediction.
    Inference,
    /// All phases.
    Step,
    /// The forwards. They keep what the backwards need.
    Forward,
    /// The backwards of forwards that an earlier program ran.
    Backward,
    /// Forwards and backwards, without the end of the step: gradients accumulate.
    Gradients,
    /// The sums of tied gradients, after all backwards of the step.
    Reduce,
    /// Norm, vote and update, after the sums of tied gradients.
    Update,
    /// The end of a step: the sums of tied gradients, norm, vote and update.
    Finish,
}

impl Part {
    /// All parts, in no particular order.
    pub const ALL: [Part; 8] = [
        Part::Inference,
        Part::Step,
        Part::Forward,
        Part::Backward,
        Part::Gradients,
        Part::Reduce,
        Part::Update,
        Part::Finish,
    ];

    /// Whether the part has the actions of `phase`.
    pub fn has(self, phase: Phase) -> bool {
        match self {
            Part::Inference | Part::Forward => phase == Phase::Forward,
            Part::Step => true,
            Part::Backward => phase == Phase::Backward,
            Part::Gradients => matches!(phase, Phase::Forward | Phase::Backward),
            Part::Reduce => phase == Phase::Reduce,
            Part::Update => phase == Phase::Update,
            Part::Finish => matches!(phase, Phase::Reduce | Phase::Update),
        }
    }
}

impl Program {
    /// The actions of one part of this training step, in their order here.
    ///
    /// The parts [`Part::Forward`], [`Part::Backward`] and [`Part::Finish`], run one after the
    /// other, are the whole step. So are [`Part::Gradients`], [`Part::Reduce`] and
    /// [`Part::Update`].
    #[must_use]
    pub fn part(&self, part: Part) -> Self {
        let own = |action: &&Action| part.has(self.phase(**action));
        let lists = self.devices.iter().map(|list| list.iter().filter(own).copied().collect());
        Self {
            devices: lists.collect(),
            topology: self.topology.clone(),
            micro_batches: self.micro_batches,
            part,
            recomputed: self.recomputed.clone(),
            placement: self.placement.clone(),
        }
    }

    fn phase(&self, action: Action) -> Phase {
        match action.op {
            Op::Forward(_) => Phase::Forward,
            Op::Rematerialize(_)
            | Op::Backward(_)
            | Op::BackwardInput(_)
            | Op::BackwardWeight(_) => Phase::Backward,
            Op::Reduce => Phase::Reduce,
            Op::Norm | Op::Decide | Op::Update => Phase::Update,
            Op::Send(transfer) | Op::Receive(transfer) => {
                let edge = self.topology.edges.get(transfer.edge.index());
                edge.map_or(Phase::Forward, |edge| edge.kind.phase(transfer.direction))
            }
        }
    }

    /// The device of each stage in the whole step; `None` for a stage that never acts.
    pub fn placement(&self) -> &[Option<DeviceId>] {
        &self.placement
    }

    /// The stages of `device`, in order.
    pub fn stages_on(&self, device: DeviceId) -> impl Iterator<Item = StageId> {
        let on = self.placement.iter().enumerate();
        on.filter(move |(_, on)| **on == Some(device)).map(|(stage, _)| StageId::from_index(stage))
    }

    /// Whether the values of `edge` pass from stage to stage on one device, without a message.
    /// Gradients of tied weights and votes are messages on one device, too.
    pub fn hands_over(&self, edge: EdgeId) -> bool {
        let edge = self.topology.edges.get(edge.index());
        edge.is_some_and(|edge| hands_over(edge, &self.placement))
    }

    /// The micro-batches that are recomputed in the whole step, whose forward may discard.
    pub fn rematerialized(&self) -> &RematSet {
        &self.recomputed
    }

    /// Returns the program with each re-materialization moved after the gradient receives that
    /// directly follow it. Waiting gains nothing: this exists to measure the benefit of recomputing
    /// before the gradients arrive (Huang et al. 2019, section 2.3).
    #[must_use]
    pub fn rematerializing_late(mut self) -> Self {
        for list in &mut self.devices {
            let mut at = 0;
            while at < list.len() {
                let Action { stage, op } = list[at];
                let is_awaited = |next: &&Action| {
                    let gradient = |own: Transfer| {
                        own.direction == Direction::Backward && own.micro_batch == op.computes()
                    };
                    next.stage == stage && matches!(next.op, Op::Receive(own) if gradient(own))
                };
                let waits = match op {
                    Op::Rematerialize(_) => list[at + 1..].iter().take_while(is_awaited).count(),
                    _ => 0,
                };
                list[at..=at + waits].rotate_left(1);
                at += waits + 1;
            }
        }
        self
    }

    /// Whether the program is a training step or a part of one. Otherwise it only evaluates or
    /// predicts.
    pub fn trains(&self) -> bool {
        self.part != Part::Inference
    }
}

/// Why compute actions cannot be lowered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// An action names a stage that the topology does not have.
    #[error("action {action} on device {device}: there are only {stages} stages, numbered from 0")]
    UnknownStage {
        /// The action.
        action: Action,
        /// Its device.
        device: DeviceId,
        /// The number of stages, K.
        stages: usize,
    },
    /// The input already holds an action that lowering would add.
    #[error(
        "action {action} on device {device} is not a compute action (F, R, B, I or W): lowering \
        adds the others itself"
    )]
    NotCompute {
        /// The action.
        action: Action,
        /// Its device.
        device: DeviceId,
    },
    /// An edge names an unknown stage, or goes in the wrong direction.
    #[error(
        "edge {edge} from stage {from} to stage {to} does not fit {stages} stages: boundary and \
        skip edges go to a later stage, ties and votes to an earlier one"
    )]
    BadEdge {
        /// The edge.
        edge: EdgeId,
        /// Its source.
        from: StageId,
        /// Its target.
        to: StageId,
        /// The number of stages, K.
        stages: usize,
    },
}

/// Adds send, receive, reduce, norm, decide and update to the compute actions. Lists without any
/// backward make a forward-only program, which ends after its last forward.
///
/// # Errors
/// See [`LowerError`]. Use [`crate::validate`] to check whether the order of the actions is
/// correct.
pub fn lower(
    compute: &ActionLists,
    topology: &Topology,
    micro_batches: usize,
) -> Result<Program, LowerError> {
    check(compute, topology)?;
    let placement = placement(compute, topology.stages);
    let trains = compute.iter().flatten().any(|action| action.op.goes_back().is_some());
    let devices = compute
        .iter()
        .map(|list| {
            let mut lowered = Vec::with_capacity(list.len() * 3);
            for &action in list {
                lower_compute(action, topology, &placement, trains, &mut lowered);
            }
            if trains {
                finish_step(list, topology, &mut lowered);
            }
            lowered
        })
        .collect();
    let part = if trains { Part::Step } else { Part::Inference };
    let recomputed = RematSet::from_actions(compute.iter().flatten());
    let topology = topology.clone();
    Ok(Program { devices, topology, micro_batches, part, recomputed, placement })
}

fn placement(compute: &ActionLists, stages: usize) -> Vec<Option<DeviceId>> {
    let mut placement = vec![None; stages];
    for (device, list) in compute.iter().enumerate() {
        for action in list {
            if let Some(place) = placement.get_mut(action.stage.index()) {
                place.get_or_insert(DeviceId::from_index(device));
            }
        }
    }
    placement
}

fn hands_over(edge: &Edge, placement: &[Option<DeviceId>]) -> bool {
    let device = |stage: StageId| placement.get(stage.index()).copied().flatten();
    edge.kind.per_micro_batch() && device(edge.from) == device(edge.to)
}

fn check(compute: &ActionLists, topology: &Topology) -> Result<(), LowerError> {
    let stages = topology.stages;
    for (edge, &Edge { from, to, kind }) in topology.edges.iter().enumerate() {
        let direction = if kind.per_micro_batch() { from < to } else { from > to };
        if !direction || from.index() >= stages || to.index() >= stages {
            return Err(LowerError::BadEdge { edge: EdgeId::from_index(edge), from, to, stages });
        }
    }
    for (device, list) in compute.iter().enumerate() {
        let device = DeviceId::from_index(device);
        for &action in list {
            if action.stage.index() >= stages {
                return Err(LowerError::UnknownStage { action, device, stages });
            }
            if action.op.computes().is_none() {
                return Err(LowerError::NotCompute { action, device });
            }
        }
    }
    Ok(())
}

fn lower_compute(
    action: Action,
    topology: &Topology,
    placement: &[Option<DeviceId>],
    trains: bool,
    out: &mut Vec<Action>,
) {
    let stage = action.stage;
    let data_edges = |test: fn(&Edge, StageId) -> bool| {
        topology.edges_where(move |edge| {
            edge.kind.per_micro_batch() && test(edge, stage) && !hands_over(edge, placement)
        })
    };
    let into = |edge: &Edge, stage| edge.to == stage;
    let out_of = |edge: &Edge, stage| edge.from == stage;
    let transfer =
        |direction, micro_batch, edge| Transfer { direction, micro_batch: Some(micro_batch), edge };
    let mut push = |op| out.push(Action { stage, op });
    match action.op {
        Op::Forward(m) => {
            for (edge, _) in data_edges(into) {
                push(Op::Receive(transfer(Direction::Forward, m, edge)));
            }
            push(action.op);
            for (edge, _) in data_edges(out_of) {
                push(Op::Send(transfer(Direction::Forward, m, edge)));
            }
        }
        Op::Backward(m) | Op::BackwardInput(m) => {
            for (edge, _) in data_edges(out_of).filter(|(_, edge)| trains && edge.kind.goes_back())
            {
                push(Op::Receive(transfer(Direction::Backward, m, edge)));
            }
            push(action.op);
            for (edge, _) in data_edges(into).filter(|(_, edge)| edge.kind.goes_back()) {
                push(Op::Send(transfer(Direction::Backward, m, edge)));
            }
        }
        _ => push(action.op),
    }
}

/// Appends the end of a step on one device. All stages of the device go through each phase
/// together.
fn finish_step(list: &[Action], topology: &Topology, out: &mut Vec<Action>) {
    let mut stages: Vec<StageId> = list.iter().map(|action| action.stage).collect();
    stages.sort_unstable();
    stages.dedup();
    let mut exchange = |direction, receive: bool, kind| {
        for &stage in &stages {
            // Forward messages leave at the edge's source; backward messages arrive there.
            let at_source = (direction == Direction::Forward) != receive;
            let here = |edge: &Edge| (if at_source { edge.from } else { edge.to }) == stage;
            for (edge, _) in topology.edges_where(|edge| edge.kind == kind && here(edge)) {
                let transfer = Transfer { direction, micro_batch: None, edge };
                let op = if receive { Op::Receive(transfer) } else { Op::Send(transfer) };
                out.push(Action { stage, op });
            }
            let between = match (direction, receive, kind) {
                (Direction::Forward, true, EdgeKind::Tie) => Some(Op::Reduce), // [1]
                (Direction::Backward, true, EdgeKind::Tie) => Some(Op::Norm),  // [2]
                (Direction::Forward, true, EdgeKind::Vote) if stage.index() == 0 => {
                    Some(Op::Decide)
                } // [3]
                (Direction::Backward, true, EdgeKind::Vote) => Some(Op::Update), // [4]
                _ => None,
            };
            out.extend(between.map(|op| Action { stage, op }));
        }
    };
    for kind in [EdgeKind::Tie, EdgeKind::Vote] {
        exchange(Direction::Forward, false, kind);
        exchange(Direction::Forward, true, kind);
        exchange(Direction::Backward, false, kind);
        exchange(Direction::Backward, true, kind);
    }
}
