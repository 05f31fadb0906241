//! Proves, before anything runs, that a program is correct. Generated schedules and schedules from
//! a file are checked alike. The checks, in order:
//!
//! ```text
//! [1] every stage acts, and on one device only
//! [2] each stage runs each micro-batch once: F, then (R, then) B, or I and later W;
//!     B and W ascend (all schedules then sum weight gradients in one order)
//! [3] every edge's messages are sent and received exactly once, by the right stages, on the right
//!     side of the compute action they belong to, and in one order at both ends (links are queues);
//!     between stages of one device there is no message, and the order of the list decides
//! [4] the step ends together: reduce, norm, decide, update, each after what it needs
//! [5] no deadlock with links of the given capacity
//! ```
//!
//! [`crate::exchange`] proves the same for links without a buffer.
//!
//! A program that is a part of a step starts where the parts before it ended: a backward finds all
//! forwards done, and an update finds all gradients summed.

mod complete;

use std::collections::{HashMap, HashSet};

use crate::{
    action::{Action, Direction, Op, Transfer},
    ids::{DeviceId, EdgeId, MicroBatch, StageId},
    lower::{EdgeKind, Part, Phase, Program, RematSet},
    simulate::{Costs, Deadlock, simulate},
};

/// The most that each stage holds, in micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldMicroBatches {
    /// By stage: inputs kept from a forward to its backward, or to the second half of a split
    /// backward.
    pub inputs: Vec<usize>,
    /// By stage: full activations of micro-batches whose forward kept them or that are recomputed.
    pub activations: Vec<usize>,
    /// By device: inputs that all its stages keep at one time, each for one stage.
    pub on_devices: Vec<usize>,
}

/// The reason why a program is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// An action breaks a rule.
    #[error("action {position} of device {device} ({action}): {reason}")]
    Action {
        /// The device whose list contains the action.
        device: DeviceId,
        /// Position in the list, from 0.
        position: usize,
        /// The action.
        action: Action,
        /// The rule that is broken, and how.
        reason: String,
    },
    /// Something is missing at the end of the lists.
    #[error("stage {stage}: {reason}")]
    Missing {
        /// The stage that lacks something.
        stage: StageId,
        /// What is missing.
        reason: String,
    },
    /// Every action is correct, but the devices wait for each other.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

/// Checks `program`, whose links hold at most `capacity` messages each way, and returns what each
/// stage holds.
///
/// # Errors
/// [`Invalid`]: the first action that breaks a rule and why, what is missing, or which devices
/// deadlock.
pub fn validate(program: &Program, capacity: usize) -> Result<HeldMicroBatches, Invalid> {
    let mut checker = Checker::new(program);
    for (device, list) in program.devices.iter().enumerate() {
        for (position, &action) in list.iter().enumerate() {
            checker.check(DeviceId::from_index(device), action).map_err(|reason| {
                Invalid::Action { device: DeviceId::from_index(device), position, action, reason }
            })?;
        }
    }
    checker.check_complete()?;
    simulate(program, &Costs::unit(program.topology.stages), capacity)?;
    Ok(HeldMicroBatches {
        inputs: checker.stages.iter().map(|stage| stage.most_inputs).collect(),
        activations: checker.stages.iter().map(|stage| stage.most_activations).collect(),
        on_devices: checker.on_devices.iter().map(|(_, most)| *most).collect(),
    })
}

/// How far a stage has come with a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Progress {
    #[default]
    Untouched,
    Forwarded,
    Rematerialized,
    /// The first half of the backward is done.
    Split,
    Done,
}

#[derive(Default)]
struct StageState {
    device: Option<DeviceId>,
    progress: Vec<Progress>,
    /// The number of micro-batches whose weight gradients are summed.
    backwards: usize,
    inputs: usize,
    activations: usize,
    most_inputs: usize,
    most_activations: usize,
    reduced: bool,
    normed: bool,
    decided: bool,
    updated: bool,
}

impl StageState {
    /// The state of `stage` before `program`: what the earlier parts of the step left.
    fn new(program: &Program, stage: StageId) -> Self {
        let (part, count) = (program.part, program.micro_batches);
        let before = match part {
            part if part.has(Phase::Forward) => Progress::Untouched,
            part if part.has(Phase::Backward) => Progress::Forwarded,
            _ => Progress::Done,
        };
        let open = if before == Progress::Forwarded { count } else { 0 };
        let kept = open.saturating_sub(program.rematerialized().count(stage));
        Self {
            progress: vec![before; count],
            backwards: if before == Progress::Done { count } else { 0 },
            inputs: open,
            most_inputs: open,
            activations: kept,
            most_activations: kept,
            reduced: part == Part::Update,
            ..Self::default()
        }
    }
}

struct Checker<'a> {
    program: &'a Program,
    recomputed: &'a RematSet,
    stages: Vec<StageState>,
    /// By device, the inputs that its stages keep now, and the most.
    on_devices: Vec<(usize, usize)>,
    /// By edge and direction, the micro-batches that were sent, in order.
    sent: HashMap<(EdgeId, Direction), Passed>,
    received: HashMap<(EdgeId, Direction), Passed>,
}

/// The messages that passed one end of an edge in one direction.
#[derive(Default)]
struct Passed {
    order: Vec<Option<MicroBatch>>,
    set: HashSet<Option<MicroBatch>>,
}

type Checked = Result<(), String>;

impl<'a> Checker<'a> {
    fn new(program: &'a Program) -> Self {
        let stages = (0..program.topology.stages).map(StageId::from_index);
        let stages: Vec<_> = stages.map(|stage| StageState::new(program, stage)).collect();
        let kept = |device| {
            let own = program.stages_on(DeviceId::from_index(device));
            own.filter_map(|stage| stages.get(stage.index())).map(|state| state.inputs).sum()
        };
        let on_devices = (0..program.devices.len()).map(kept).map(|kept| (kept, kept)).collect();
        Self {
            program,
            recomputed: program.rematerialized(),
            stages,
            on_devices,
            sent: HashMap::new(),
            received: HashMap::new(),
        }
    }

    fn check(&mut self, device: DeviceId, action: Action) -> Checked {
        let count = self.stages.len();
        let Some(state) = self.stages.get_mut(action.stage.index()) else {
            return Err(format!("there are only {count} stages, numbered from 0"));
        };
        let first = *state.device.get_or_insert(device);
        if first != device {
            return Err(format!(
                "stage {} already acts on device {first}: a stage has one device",
                action.stage
            ));
        }
        let before = state.inputs;
        self.act(action)?;
        let after = self.stages.get(action.stage.index()).map_or(0, |state| state.inputs);
        if let Some((now, most)) = self.on_devices.get_mut(device.index()) {
            *now = (*now + after).saturating_sub(before);
            *most = (*most).max(*now);
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> Checked {
        match action.op {
            Op::Forward(m) => self.forward(action.stage, m),
            Op::Rematerialize(m) => self.rematerialize(action.stage, m),
            Op::Backward(m) => {
                self.gradient(action.stage, m, Progress::Done)?;
                self.complete(action.stage, m)
            }
            Op::BackwardInput(m) => self.gradient(action.stage, m, Progress::Split),
            Op::BackwardWeight(m) => self.weights(action.stage, m),
            Op::Send(transfer) => self.transfer(action.stage, transfer, true),
            Op::Receive(transfer) => self.transfer(action.stage, transfer, false),
            Op::Reduce | Op::Norm | Op::Decide | Op::Update => self.finish(action),
        }
    }

    fn progress(&mut self, stage: StageId, m: MicroBatch) -> Result<&mut Progress, String> {
        let count = self.program.micro_batches;
        let progress = self.stages[stage.index()].progress.get_mut(m.index());
        progress.ok_or_else(|| format!("there are only {count} micro-batches, numbered from 0"))
    }

    fn forward(&mut self, stage: StageId, m: MicroBatch) -> Checked {
        let progress = self.progress(stage, m)?;
        if *progress != Progress::Untouched {
            return Err("its forward already ran".into());
        }
        *progress = Progress::Forwarded;
        self.require_inputs(stage, m, Direction::Forward)?;
        if !self.program.trains() {
            return Ok(());
        }
        let keeps = !self.recomputed.contains(stage, m);
        let state = &mut self.stages[stage.index()];
        state.inputs += 1;
        state.activations += usize::from(keeps);
        state.most_inputs = state.most_inputs.max(state.inputs);
        state.most_activations = state.most_activations.max(state.activations);
        Ok(())
    }

    fn rematerialize(&mut self, stage: StageId, m: MicroBatch) -> Checked {
        let progress = self.progress(stage, m)?;
        match progress {
            Progress::Untouched => return Err("its forward comes later or never".into()),
            Progress::Rematerialized => return Err("it was already re-materialized".into()),
            Progress::Split | Progress::Done => return Err("its backward already ran".into()),
            Progress::Forwarded => *progress = Progress::Rematerialized,
        }
        let state = &mut self.stages[stage.index()];
        state.activations += 1;
        state.most_activations = state.most_activations.max(state.activations);
        Ok(())
    }

    /// Checks an action that computes input gradients: a whole backward, or the first half of one.
    fn gradient(&mut self, stage: StageId, m: MicroBatch, then: Progress) -> Checked {
        let discarded = self.recomputed.contains(stage, m);
        let progress = self.progress(stage, m)?;
        match *progress {
            Progress::Forwarded if discarded => {
                return Err("its re-materialization comes later or never".into());
            }
            Progress::Untouched => return Err("its forward comes later or never".into()),
            Progress::Split | Progress::Done => return Err("its backward already ran".into()),
            Progress::Forwarded | Progress::Rematerialized => *progress = then,
        }
        self.require_inputs(stage, m, Direction::Backward)
    }

    /// Checks the second half of a split backward.
    fn weights(&mut self, stage: StageId, m: MicroBatch) -> Checked {
        let progress = self.progress(stage, m)?;
        match *progress {
            Progress::Split => *progress = Progress::Done,
            Progress::Done => return Err("its weights' gradients were already computed".into()),
            _ => {
                return Err(format!(
                    "{stage}I{m}, the first half of its backward, comes later or never"
                ));
            }
        }
        self.complete(stage, m)
    }

    /// Records that the weight gradients are summed and that the micro-batch's memory is released.
    fn complete(&mut self, stage: StageId, m: MicroBatch) -> Checked {
        let state = &mut self.stages[stage.index()];
        if m.index() != state.backwards {
            return Err(format!(
                "backwards run in ascending micro-batch order, so that gradients are summed in \
                one order: {} is next",
                state.backwards
            ));
        }
        state.backwards += 1;
        state.inputs -= 1;
        state.activations -= 1;
        Ok(())
    }

    /// Checks that all values that the edges bring for a compute action are there: received, or
    /// handed over by a stage of the same device.
    fn require_inputs(&self, stage: StageId, m: MicroBatch, direction: Direction) -> Checked {
        let needed = self.program.topology.edges_where(|edge| {
            let brings = if direction == Direction::Forward { edge.to } else { edge.from };
            edge.kind.per_micro_batch()
                && brings == stage
                && (direction == Direction::Forward || edge.kind.goes_back())
        });
        for (id, edge) in needed {
            let transfer = Transfer { direction, micro_batch: Some(m), edge: id };
            if self.program.hands_over(id) {
                let (maker, kind) = match direction {
                    Direction::Forward => (edge.from, "F"),
                    Direction::Backward => (edge.to, "B or I"),
                };
                if !self.has_made(maker, m, direction) {
                    return Err(format!(
                        "it needs {kind} of stage {maker}, which is on the same device, before it"
                    ));
                }
            } else if !self
                .received
                .get(&(id, direction))
                .is_some_and(|passed| passed.set.contains(&Some(m)))
            {
                return Err(format!("it needs {stage}RECV_{transfer} before it"));
            }
        }
        Ok(())
    }

    /// Whether `stage` has computed what it passes on in `direction` for a micro-batch.
    fn has_made(&self, stage: StageId, m: MicroBatch, direction: Direction) -> bool {
        let state = self.stages.get(stage.index());
        let progress = state.and_then(|state| state.progress.get(m.index()));
        match direction {
            Direction::Forward => progress.is_some_and(|&at| at != Progress::Untouched),
            Direction::Backward => {
                progress.is_some_and(|at| matches!(at, Progress::Split | Progress::Done))
            }
        }
    }

    fn transfer(&mut self, stage: StageId, transfer: Transfer, sends: bool) -> Checked {
        let Transfer { direction, micro_batch, edge: id } = transfer;
        let Some(&edge) = self.program.topology.edges.get(id.index()) else {
            return Err(format!("there is no edge {id}"));
        };
        let right = if sends == (direction == Direction::Forward) { edge.from } else { edge.to };
        if right != stage {
            let verb = if sends { "sends" } else { "receives" };
            return Err(format!(
                "stage {right} {verb} on this half of edge {id} ({} to {})",
                edge.from, edge.to
            ));
        }
        if direction == Direction::Backward && !edge.kind.goes_back() {
            return Err(format!("edge {id} carries no gradient"));
        }
        if micro_batch.is_some() != edge.kind.per_micro_batch() {
            let rule =
                if edge.kind.per_micro_batch() { "per micro-batch" } else { "once per step" };
            return Err(format!("edge {id} carries messages {rule}"));
        }
        if self.program.hands_over(id) {
            return Err(format!(
                "stages {} and {} are on one device: edge {id} has no messages",
                edge.from, edge.to
            ));
        }
        if sends {
            self.require_produced(stage, transfer, edge.kind)?;
        } else if let Some(m) = micro_batch {
            self.require_unused(stage, m, direction)?;
        }
        let lists = if sends { &mut self.sent } else { &mut self.received };
        let passed = lists.entry((id, direction)).or_default();
        if !passed.set.insert(micro_batch) {
            return Err(format!("it was already {}", if sends { "sent" } else { "received" }));
        }
        passed.order.push(micro_batch);
        Ok(())
    }

    fn require_produced(&mut self, stage: StageId, transfer: Transfer, kind: EdgeKind) -> Checked {
        if let Some(m) = transfer.micro_batch {
            self.progress(stage, m)?;
        }
        let state = &self.stages[stage.index()];
        let (ready, what) = match (transfer.micro_batch, kind, transfer.direction) {
            (Some(m), _, direction) => {
                let what =
                    if direction == Direction::Forward { "its forward" } else { "its backward" };
                (self.has_made(stage, m, direction), what)
            }
            (None, EdgeKind::Tie, Direction::Forward) => {
                (state.backwards == self.program.micro_batches, "the last backward")
            }
            (None, EdgeKind::Tie, Direction::Backward) => (state.reduced, "REDUCE"),
            (None, _, Direction::Forward) => (state.normed, "NORM"),
            (None, _, Direction::Backward) => (state.decided, "DECIDE"),
        };
        if ready { Ok(()) } else { Err(format!("{what} has to come before it")) }
    }

    fn require_unused(&mut self, stage: StageId, m: MicroBatch, direction: Direction) -> Checked {
        let progress = *self.progress(stage, m)?;
        let late = match direction {
            Direction::Forward => progress != Progress::Untouched,
            Direction::Backward => matches!(progress, Progress::Split | Progress::Done),
        };
        if late { Err("the compute that needs it already ran".into()) } else { Ok(()) }
    }

    fn finish(&mut self, action: Action) -> Checked {
        let micro_batches = self.program.micro_batches;
        let complete = |checker: &Self, kind, direction| {
            let edges = checker.program.topology.edges_where(|edge| {
                edge.kind == kind
                    && action.stage
                        == if direction == Direction::Forward { edge.to } else { edge.from }
            });
            edges.into_iter().all(|(edge, _)| checker.received.contains_key(&(edge, direction)))
        };
        let ties_in = complete(self, EdgeKind::Tie, Direction::Forward);
        let sums_in = !self.program.part.has(Phase::Reduce)
            || complete(self, EdgeKind::Tie, Direction::Backward);
        let votes_in = complete(self, EdgeKind::Vote, Direction::Forward);
        let verdict_in = complete(self, EdgeKind::Vote, Direction::Backward);
        let state = &mut self.stages[action.stage.index()];
        let (flag, ready, needs) = match action.op {
            Op::Reduce => (
                &mut state.reduced,
                ties_in && state.backwards == micro_batches,
                "every backward and every tied gradient",
            ),
            Op::Norm => (
                &mut state.normed,
                state.reduced && sums_in,
                "REDUCE and the sums of tied gradients",
            ),
            Op::Decide => (
                &mut state.decided,
                state.normed && votes_in && action.stage.index() == 0,
                "to be stage 0's, with the parts of all stages",
            ),
            _ => {
                let decided = if action.stage.index() == 0 { state.decided } else { verdict_in };
                (&mut state.updated, decided, "the verdict")
            }
        };
        if *flag {
            return Err("it already ran in this step".into());
        }
        *flag = true;
        if ready { Ok(()) } else { Err(format!("it needs {needs} before it")) }
    }
}
