//! A worker: one device's thread. It interprets the device's list, action by action, and knows no
//! schedule's name.

mod waits;

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use gpipe_core::{
    Action, Bytes, DeviceId, Direction, MicroBatch, Op, StageId, Transfer,
    lower::{Edge, EdgeKind, Program, RematSet},
    simulate::TimedAction,
};

use waits::RUN_AHEAD;
pub(crate) use waits::doing;

use crate::{
    clock::Clock,
    failure::{Failure, StepError},
    link::{Link, Links, Message},
    mailbox::Mailbox,
    peers::{PeerError, Peers},
    pulse::Pulses,
    report::Report,
    stage::{Keep, OnEdges, Payload, StageExecutor},
};

/// How far this process's stages have got with the update.
#[derive(Debug, Default)]
pub struct Updates {
    /// Stages that began the update and have not finished it.
    pub begun: Vec<StageId>,
    /// Stages that applied the update.
    pub applied: Vec<StageId>,
}

/// State that all workers of one step share.
pub struct Step<E: StageExecutor> {
    /// The lists of actions to execute.
    pub program: Arc<Program>,
    /// The micro-batches that each stage recomputes.
    pub recomputed: RematSet,
    /// Whether the program is a training step or a part of one.
    pub trains: bool,
    /// The links between the stages.
    pub links: Links<E::Value>,
    /// The first error.
    pub failure: Failure<E::Error>,
    /// Signs of life.
    pub pulses: Arc<Pulses>,
    /// Longest silence of a peer before a wait for it fails.
    pub deadline: Duration,
    /// How far the update has got. Shared, because a stuck worker reports nothing.
    pub updates: Mutex<Updates>,
    /// The other processes, if any.
    pub peers: Option<Arc<dyn Peers<E>>>,
}

impl<E: StageExecutor> Step<E> {
    /// Records a failure and ends every wait, in this process and in the others.
    pub fn fail(&self, error: StepError<E::Error>) {
        let elsewhere = match (&self.peers, &error) {
            (None, _) => None,
            (Some(_), StepError::Peer(known)) => Some(known.clone()),
            (Some(peers), own) => {
                Some(PeerError { process: Some(peers.here()), reason: own.to_string() })
            }
        };
        let first = self.failure.raise(error);
        self.links.poison();
        if let (true, Some(peers), Some(why)) = (first, &self.peers, elsewhere) {
            peers.fail(&why);
        }
    }

    /// The process of a device, as text for an error: ", on rank 1". Empty in a single process.
    pub(crate) fn process(&self, device: usize) -> String {
        let Some(peers) = &self.peers else { return String::new() };
        let process = peers.process_of(DeviceId::from_index(device));
        format!(", on rank {}", peers.rank_of(process))
    }
}

/// A closure that the driver runs on a device's stages between steps.
pub(crate) type Visitor<E> = Box<dyn FnOnce(&mut [E]) + Send>;

/// A command from the driver to a worker.
pub(crate) enum Command<E: StageExecutor> {
    /// Run this device's list.
    Run { step: Arc<Step<E>>, feeds: Vec<E::Feed>, clock: Clock, reply: mpsc::Sender<Report<E>> },
    /// Call a visitor with the stages, between steps.
    Visit(Visitor<E>),
}

/// The thread's loop; it ends when the driver is gone.
pub(crate) fn serve<E: StageExecutor>(
    device: usize,
    mut stages: Vec<E>,
    commands: &mpsc::Receiver<Command<E>>,
    pulses: &Pulses,
) {
    while let Ok(command) = commands.recv() {
        pulses.advance(device, None);
        match command {
            Command::Visit(visit) => {
                // A panic of the visitor ends here; the driver notices the missing result.
                let _ = catch_unwind(AssertUnwindSafe(|| visit(&mut stages)));
            }
            Command::Run { step, feeds, clock, reply } => {
                let mut worker = Worker::new(device, &mut stages, &step, clock);
                let outcomes = match worker.run(feeds) {
                    Ok(outcomes) => outcomes,
                    Err(Stop) => worker.abort(),
                };
                let Worker { actions, sent, .. } = worker;
                let _ = reply.send(Report { actions, outcomes, sent });
            }
        }
        pulses.advance(device, None);
    }
}

/// The step is over for this worker. The step's failure holds the reason.
struct Stop;

struct Worker<'a, E: StageExecutor> {
    device: usize,
    /// Actions that the device may not have done.
    open: usize,
    stages: &'a mut [E],
    step: &'a Step<E>,
    clock: Clock,
    actions: Vec<TimedAction>,
    sent: Bytes,
    mailbox: Mailbox<E::Value>,
}

impl<'a, E: StageExecutor> Worker<'a, E> {
    fn new(device: usize, stages: &'a mut [E], step: &'a Step<E>, clock: Clock) -> Self {
        let length = step.program.devices.get(device).map_or(0, Vec::len);
        let actions = Vec::with_capacity(length);
        let (sent, mailbox) = (Bytes(0), Mailbox::new());
        Self { device, open: 0, stages, step, clock, actions, sent, mailbox }
    }

    fn run(&mut self, feeds: Vec<E::Feed>) -> Result<Vec<(StageId, E::Outcome)>, Stop> {
        let step = self.step;
        step.pulses.leave_undone(self.device, None);
        step.pulses.advance(self.device, Some(0)); // the start counts as the first action
        for (index, feed) in feeds.into_iter().enumerate() {
            let first = Action {
                stage: self.stages.get(index).map_or(StageId(0), E::stage),
                op: Op::Forward(MicroBatch(0)),
            };
            self.guard(first, index, |stage| stage.begin(feed))?;
        }
        let list = step.program.devices.get(self.device).map_or(&[][..], Vec::as_slice);
        for (position, &action) in list.iter().enumerate() {
            if step.failure.is_raised() {
                return Err(Stop);
            }
            let index = self.index_of(action)?;
            if !action.op.communicates() {
                let waits = self.stages.get(index).is_some_and(|stage| stage.waits(action));
                self.await_device(action, if waits { 0 } else { RUN_AHEAD })?;
            }
            step.pulses.advance(self.device, Some(position));
            let start = self.clock.now();
            self.guard(action, index, |executor| executor.before(action))?;
            self.execute(action, index)?;
            self.clock.spend(action, &step.recomputed);
            let end = self.clock.now();
            self.actions.push(TimedAction { action, start, end });
            // Until the device says otherwise.
            self.open += usize::from(!action.op.communicates());
            self.guard(action, index, |executor| executor.after(action, end - start))?;
        }
        let last = list.last().copied();
        if let Some(last) = last {
            self.await_device(last, 0)?;
            let spans = self.guard(last, 0, E::spans)?;
            self.clock.correct(&mut self.actions, &spans);
        }
        (0..self.stages.len())
            .map(|index| {
                let id = self.stages[index].stage();
                let action = last.unwrap_or(Action { stage: id, op: Op::Update });
                Ok((id, self.guard(action, index, E::finish)?))
            })
            .collect()
    }

    fn abort(&mut self) -> Vec<(StageId, E::Outcome)> {
        self.mailbox = Mailbox::new();
        for stage in self.stages.iter_mut() {
            let _ = catch_unwind(AssertUnwindSafe(|| stage.abort()));
        }
        Vec::new()
    }

    /// The place of the action's stage on this device.
    fn index_of(&self, action: Action) -> Result<usize, Stop> {
        let own = self.stages.iter().position(|executor| executor.stage() == action.stage);
        match own {
            Some(index) => Ok(index),
            None => self.protocol(action, "the stage is not on this device"),
        }
    }

    fn execute(&mut self, action: Action, index: usize) -> Result<(), Stop> {
        let stage = action.stage;
        match action.op {
            Op::Send(transfer) => self.send(action, index, transfer),
            Op::Receive(transfer) => self.receive(action, index, transfer),
            Op::Forward(m) => {
                let keep = self.keep(stage, m);
                let inputs = self.mailbox.take_arrived(stage, Direction::Forward, Some(m));
                let outputs =
                    self.guard(action, index, |executor| executor.forward(m, inputs, keep))?;
                self.leave(stage, Direction::Forward, m, outputs);
                Ok(())
            }
            Op::Rematerialize(m) => self.guard(action, index, |executor| executor.rematerialize(m)),
            Op::Backward(m) => {
                let grads = self.mailbox.take_arrived(stage, Direction::Backward, Some(m));
                let outputs = self.guard(action, index, |executor| executor.backward(m, grads))?;
                self.leave(stage, Direction::Backward, m, outputs);
                Ok(())
            }
            Op::BackwardInput(m) => {
                let grads = self.mailbox.take_arrived(stage, Direction::Backward, Some(m));
                let outputs =
                    self.guard(action, index, |executor| executor.backward_input(m, grads))?;
                self.leave(stage, Direction::Backward, m, outputs);
                Ok(())
            }
            Op::BackwardWeight(m) => {
                self.guard(action, index, |executor| executor.backward_weight(m))
            }
            Op::Reduce => {
                let arrived = self.mailbox.take_arrived(stage, Direction::Forward, None);
                let sums = self.guard(action, index, |executor| executor.reduce(arrived))?;
                for (edge, sum) in sums {
                    let direction = Direction::Backward;
                    let transfer = Transfer { direction, micro_batch: None, edge };
                    self.mailbox.leave(stage, transfer, sum);
                }
                Ok(())
            }
            Op::Norm => {
                let vote = self.guard(action, index, E::norm)?;
                self.mailbox.vote(stage, vote);
                Ok(())
            }
            Op::Decide => {
                let votes = self.mailbox.all_votes();
                let verdict = self.guard(action, index, |executor| executor.decide(&votes))?;
                self.mailbox.decided(stage, verdict);
                Ok(())
            }
            Op::Update => self.update(action, index),
        }
    }

    /// Stores what a compute action produced: for its sends, or for the stage of this device that
    /// takes it over.
    fn leave(
        &mut self,
        stage: StageId,
        direction: Direction,
        micro_batch: MicroBatch,
        outputs: OnEdges<E::Value>,
    ) {
        let program = &self.step.program;
        for (edge, value) in outputs {
            let transfer = Transfer { direction, micro_batch: Some(micro_batch), edge };
            match program.topology.edges.get(edge.index()) {
                Some(Edge { from, to, .. }) if program.hands_over(edge) => {
                    let taker = if direction == Direction::Forward { to } else { from };
                    self.mailbox.arrive(*taker, transfer, value);
                }
                _ => self.mailbox.leave(stage, transfer, value),
            }
        }
    }

    fn keep(&self, stage: StageId, micro_batch: MicroBatch) -> Keep {
        if !self.step.trains {
            Keep::Nothing
        } else if self.step.recomputed.contains(stage, micro_batch) {
            Keep::Inputs
        } else {
            Keep::Activations
        }
    }

    fn update(&mut self, action: Action, index: usize) -> Result<(), Stop> {
        let Some(verdict) = self.mailbox.verdict_of(action.stage) else {
            return self.protocol(action, "no verdict has arrived");
        };
        if verdict.apply {
            // Recorded before the call, because an update that fails half-way has changed
            // something.
            self.updates().begun.push(action.stage);
        }
        self.guard(action, index, |executor| executor.update(verdict))?;
        if verdict.apply {
            let mut updates = self.updates();
            updates.begun.retain(|stage| *stage != action.stage);
            updates.applied.push(action.stage);
        }
        Ok(())
    }

    fn updates(&self) -> std::sync::MutexGuard<'_, Updates> {
        self.step.updates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&mut self, action: Action, index: usize, transfer: Transfer) -> Result<(), Stop> {
        let message = self.outgoing(action, index, transfer)?;
        let link = self.link(action, transfer)?;
        let slice = self.slice();
        let free = link.reserve(slice, || self.is_patient(action));
        let free = free.map_err(|end| self.waited(action, end))?;
        self.clock.not_before(free);
        if let Message::Value(value) = &message {
            self.sent += value.bytes();
        }
        let arrival = |busy_until| self.clock.arrival(transfer, busy_until);
        link.put(transfer.micro_batch, message, arrival);
        Ok(())
    }

    /// The message that a send puts on its link.
    fn outgoing(
        &mut self,
        action: Action,
        index: usize,
        transfer: Transfer,
    ) -> Result<Message<E::Value>, Stop> {
        let stage = action.stage;
        let message = match (self.edge(action, transfer)?.kind, transfer.direction) {
            (EdgeKind::Vote, Direction::Forward) => self.mailbox.vote_of(stage).map(Message::Vote),
            (EdgeKind::Vote, Direction::Backward) => {
                self.mailbox.verdict_of(stage).map(Message::Verdict)
            }
            (EdgeKind::Tie, Direction::Forward) => {
                let grads = self.guard(action, index, |executor| executor.tied(transfer.edge))?;
                Some(Message::Value(grads))
            }
            _ => self.mailbox.take_leaving(stage, transfer).map(Message::Value),
        };
        match message {
            Some(message) => Ok(message),
            None => self.protocol(action, "its stage gave nothing for this edge"),
        }
    }

    fn receive(&mut self, action: Action, index: usize, transfer: Transfer) -> Result<(), Stop> {
        let edge = self.edge(action, transfer)?;
        let link = self.link(action, transfer)?;
        let slice = self.slice();
        let envelope = link.take(slice, || self.is_patient(action));
        let envelope = envelope.map_err(|end| self.waited(action, end))?;
        self.clock.not_before(envelope.arrival);
        if let Message::Value(value) = &envelope.message {
            self.await_value(action, index, transfer, value)?;
        }
        link.release(self.clock.now());
        if envelope.micro_batch != transfer.micro_batch {
            let brought = Transfer { micro_batch: envelope.micro_batch, ..transfer };
            return self.protocol(action, &format!("the link brought {brought}"));
        }
        match envelope.message {
            Message::Value(sums)
                if (edge.kind, transfer.direction) == (EdgeKind::Tie, Direction::Backward) =>
            {
                self.guard(action, index, |executor| executor.accept(transfer.edge, sums))?;
            }
            Message::Value(value) => self.mailbox.arrive(action.stage, transfer, value),
            Message::Vote(vote) => self.mailbox.vote(edge.from, vote),
            Message::Verdict(verdict) => self.mailbox.decided(action.stage, verdict),
        }
        Ok(())
    }

    fn edge(&self, action: Action, transfer: Transfer) -> Result<Edge, Stop> {
        match self.step.program.topology.edges.get(transfer.edge.index()) {
            Some(edge) => Ok(*edge),
            None => self.protocol(action, "there is no such edge"),
        }
    }

    fn link(&self, action: Action, transfer: Transfer) -> Result<&'a Link<E::Value>, Stop> {
        match self.step.links.get(transfer.edge, transfer.direction) {
            Some(link) => Ok(link),
            None => self.protocol(action, "there is no such edge"),
        }
    }

    /// Calls into a stage. An error or panic becomes the step's failure.
    fn guard<T>(
        &mut self,
        action: Action,
        index: usize,
        call: impl FnOnce(&mut E) -> Result<T, E::Error>,
    ) -> Result<T, Stop> {
        let Some(stage) = self.stages.get_mut(index) else {
            return self.protocol(action, "the stage is not on this device");
        };
        match catch_unwind(AssertUnwindSafe(|| call(stage))) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(source)) => {
                let action = stage.failed().unwrap_or(action);
                self.step.fail(StepError::Stage { action, source });
            }
            Err(panic) => {
                let message = panic_message(panic.as_ref());
                self.step.fail(StepError::Panic { action, message });
            }
        }
        Err(Stop)
    }

    fn protocol<T>(&self, action: Action, reason: &str) -> Result<T, Stop> {
        self.step.fail(StepError::Protocol { action, reason: reason.to_owned() });
        Err(Stop)
    }
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
