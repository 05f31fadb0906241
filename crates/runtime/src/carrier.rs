//! Carriers: threads that move messages to or from another process.
//!
//! Workers see only links; where a link crosses processes, a carrier serves its other end. A
//! carrier takes the list of messages from the program, so it ends by itself.
//!
//! Each link has a carrier of its own, if the transport has buffers. Otherwise one carrier moves
//! all values of the process's device, in groups ([`exchange`]).

mod exchange;

use std::{sync::Arc, time::Duration};

use gpipe_core::{
    DeviceId, Direction, EdgeId, MicroBatch, Op, StageId, Transfer,
    exchange::Exchanges,
    lower::{Edge, EdgeKind, Program},
};

use crate::{
    clock::Clock,
    failure::StepError,
    peers::{Envelope, PeerError, Peers, RemoteEdge},
    stage::StageExecutor,
    worker::Step,
};

/// Interval at which a wait checks whether the run has failed. A failure also wakes the wait at
/// once; this interval is only a fallback.
const SLICE: Duration = Duration::from_secs(1);

/// What one thread carries in one run.
#[derive(Debug)]
pub(crate) enum Carrier {
    /// The messages of one link.
    Link(LinkCarrier),
    /// All values of one device.
    Exchange(exchange::Exchanger),
}

/// One link that crosses processes, and the messages that move on it in one run.
#[derive(Debug, Clone)]
pub(crate) struct LinkCarrier {
    crossing: RemoteEdge,
    /// The micro-batch of each message, in order.
    messages: Vec<Option<MicroBatch>>,
}

/// The carriers that process `here` needs for `program`. With `exchanges`, values take those.
pub(crate) fn carriers(
    program: &Program,
    exchanges: Option<&Exchanges>,
    here: usize,
    process_of: impl Fn(DeviceId) -> usize,
) -> Vec<Carrier> {
    let placement = program.placement();
    let process = |stage: StageId| placement.get(stage.index()).copied().flatten().map(&process_of);
    let mut carriers: Vec<Carrier> = Vec::new();
    for (index, edge) in program.topology.edges.iter().enumerate() {
        if exchanges.is_some() && edge.kind != EdgeKind::Vote {
            continue;
        }
        for direction in [Direction::Forward, Direction::Backward] {
            let (sender, receiver) = ends(edge, direction);
            let (Some(from), Some(to)) = (process(sender), process(receiver)) else { continue };
            let messages = sent(program, EdgeId::from_index(index), direction);
            if from != to && (from == here || to == here) && !messages.is_empty() {
                let crossing = RemoteEdge { edge: EdgeId::from_index(index), direction, from, to };
                carriers.push(Carrier::Link(LinkCarrier { crossing, messages }));
            }
        }
    }
    let devices = exchanges.into_iter().flat_map(|own| own.devices.iter().enumerate());
    for (device, groups) in devices {
        if process_of(DeviceId::from_index(device)) == here && !groups.is_empty() {
            let crossing = |transfer: Transfer| {
                let edge = program.topology.edges.get(transfer.edge.index())?;
                let (sender, receiver) = ends(edge, transfer.direction);
                let Transfer { edge, direction, .. } = transfer;
                let (from, to) = (process(sender)?, process(receiver)?);
                Some(RemoteEdge { edge, direction, from, to })
            };
            carriers.push(Carrier::Exchange(exchange::Exchanger::new(groups, crossing)));
        }
    }
    carriers
}

/// The sending and the receiving stage for one direction of an edge.
fn ends(edge: &Edge, direction: Direction) -> (StageId, StageId) {
    match direction {
        Direction::Forward => (edge.from, edge.to),
        Direction::Backward => (edge.to, edge.from),
    }
}

/// The messages sent in one direction of an edge, in order; a single device sends all of them.
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
    /// The other process; `None` if there may be several.
    pub(crate) fn peer(&self, here: usize) -> Option<usize> {
        match self {
            Carrier::Link(LinkCarrier { crossing: RemoteEdge { from, to, .. }, .. }) => {
                Some(if *from == here { *to } else { *from })
            }
            Carrier::Exchange(_) => None,
        }
    }

    /// Carries all messages of the run. A failure here fails the step.
    pub(crate) fn run<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
        clock: &Clock,
    ) {
        let outcome = match self {
            Carrier::Link(link) if link.crossing.from == peers.here() => {
                link.carry_out(step, peers)
            }
            Carrier::Link(link) => link.carry_in(step, peers, clock),
            Carrier::Exchange(exchanger) => exchanger.run(step, peers, clock),
        };
        if let Err(error) = outcome {
            step.fail(StepError::Peer(error));
        }
    }
}

/// Checks that a process sent the message that was due.
fn check_due<E: StageExecutor>(
    peers: &dyn Peers<E>,
    crossing: RemoteEdge,
    expected: Option<MicroBatch>,
    found: Option<MicroBatch>,
) -> Result<(), PeerError> {
    if found == expected {
        return Ok(());
    }
    let RemoteEdge { edge, direction, from, .. } = crossing;
    let of = |micro_batch| Transfer { direction, micro_batch, edge };
    let reason =
        format!("it sent {} where {} was due: its schedule is another", of(found), of(expected));
    Err(PeerError { process: Some(peers.rank_of(from)), reason })
}

impl LinkCarrier {
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
            // Poisoned: the run has failed, and the reason is already recorded.
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
            check_due(peers.as_ref(), self.crossing, expected, envelope.micro_batch)?;
            if link.reserve(SLICE, || true).is_err() {
                return Ok(());
            }
            let now = clock.now();
            link.put(envelope.micro_batch, envelope.message, |_| (now, now));
        }
        Ok(())
    }
}
