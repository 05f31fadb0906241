//! Carriers: threads that move the messages of one link to, or from, another process. Workers see
//! links only; a carrier is at the other end of those that cross. It knows from the program what
//! will come, so it ends by itself.

use std::{sync::Arc, time::Duration};

use gpipe_core::{
    DeviceId, Direction, EdgeId, MicroBatch, Op, StageId, Transfer,
    lower::{Edge, Program},
};

use crate::{
    clock::Clock,
    failure::StepError,
    peers::{Envelope, PeerError, Peers, RemoteEdge},
    stage::StageExecutor,
    worker::Step,
};

/// How often a wait for a worker looks whether the run has failed. A failure wakes it at once; this
/// is for nothing else.
const SLICE: Duration = Duration::from_secs(1);

/// One link that crosses, and what moves on it in one run.
#[derive(Debug, Clone)]
pub(crate) struct Carrier {
    crossing: RemoteEdge,
    /// Of which micro-batches, in order.
    messages: Vec<Option<MicroBatch>>,
}

/// The carriers that process `here` needs for `program`.
pub(crate) fn carriers(
    program: &Program,
    here: usize,
    process_of: impl Fn(DeviceId) -> usize,
) -> Vec<Carrier> {
    let placement = program.placement();
    let process = |stage: StageId| placement.get(stage.index()).copied().flatten().map(&process_of);
    let mut carriers = Vec::new();
    for (index, edge) in program.topology.edges.iter().enumerate() {
        for direction in [Direction::Forward, Direction::Backward] {
            let (sender, receiver) = ends(edge, direction);
            let (Some(from), Some(to)) = (process(sender), process(receiver)) else { continue };
            let messages = sent(program, EdgeId::from_index(index), direction);
            if from != to && (from == here || to == here) && !messages.is_empty() {
                let crossing = RemoteEdge { edge: EdgeId::from_index(index), direction, from, to };
                carriers.push(Carrier { crossing, messages });
            }
        }
    }
    carriers
}

/// The stages that send and receive on one half of an edge.
fn ends(edge: &Edge, direction: Direction) -> (StageId, StageId) {
    match direction {
        Direction::Forward => (edge.from, edge.to),
        Direction::Backward => (edge.to, edge.from),
    }
}

/// What is sent on one half of an edge, in order; one device sends all of it.
fn sent(program: &Program, edge: EdgeId, direction: Direction) -> Vec<Option<MicroBatch>> {
    let actions = program.devices.iter().flatten();
    let of_link = actions.filter_map(|action| match action.op {
        Op::Send(transfer) if transfer.edge == edge && transfer.direction == direction => {
            Some(transfer.micro_batch)
        }
        _ => None,
    });
    of_link.collect()
}

impl Carrier {
    /// Carries all messages of the run; a failure becomes the step's.
    pub(crate) fn run<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
        clock: &Clock,
    ) {
        let outcome = if self.crossing.from == peers.here() {
            self.carry_out(step, peers)
        } else {
            self.carry_in(step, peers, clock)
        };
        if let Err(error) = outcome {
            step.fail(StepError::Peer(error));
        }
    }

    fn carry_out<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
    ) -> Result<(), PeerError> {
        let Some(link) = step.links.get(self.crossing.edge, self.crossing.direction) else {
            return Ok(());
        };
        let mut outbound = peers.outbound(self.crossing)?;
        for _ in &self.messages {
            // Poisoned: the run failed, and its reason is known.
            let Ok(queued) = link.take(SLICE, || true) else { return Ok(()) };
            let envelope = Envelope { micro_batch: queued.micro_batch, message: queued.message };
            outbound.send(envelope)?;
            link.release(queued.arrival);
        }
        outbound.flush()
    }

    fn carry_in<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
        clock: &Clock,
    ) -> Result<(), PeerError> {
        let Some(link) = step.links.get(self.crossing.edge, self.crossing.direction) else {
            return Ok(());
        };
        let mut inbound = peers.inbound(self.crossing)?;
        for &expected in &self.messages {
            let envelope = inbound.receive()?;
            if envelope.micro_batch != expected {
                let of = |micro_batch| {
                    let RemoteEdge { edge, direction, .. } = self.crossing;
                    Transfer { direction, micro_batch, edge }
                };
                let reason = format!(
                    "it sent {} where {} was due: its schedule is another",
                    of(envelope.micro_batch),
                    of(expected)
                );
                return Err(PeerError { process: Some(self.crossing.from), reason });
            }
            if link.reserve(SLICE, || true).is_err() {
                return Ok(());
            }
            let now = clock.now();
            link.put(envelope.micro_batch, envelope.message, |_| (now, now));
        }
        Ok(())
    }
}
