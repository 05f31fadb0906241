//! Carriers: threads that move the messages of one link to, or from, another process. Workers see links only; a carrier
//! is at the other end of those that cross. It knows from the program what will come, so it ends by itself.

use std::{sync::Arc, time::Duration};

use gpipe_core::{
    DeviceId, EdgeId, Half, MicroBatch, Op, StageId, Transfer,
    lower::{Edge, Program},
};

use crate::{
    clock::Clock,
    failure::StepError,
    peers::{Crossing, Elsewhere, Parcel, Peers},
    stage::StageExecutor,
    worker::Step,
};

/// How often a wait for a worker looks whether the run has failed. A failure wakes it at once; this is for nothing else.
const SLICE: Duration = Duration::from_secs(1);

/// One link that crosses, and what moves on it in one run.
#[derive(Debug, Clone)]
pub(crate) struct Carrier {
    crossing: Crossing,
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
        for half in [Half::Forward, Half::Backward] {
            let (sender, receiver) = ends(edge, half);
            let (Some(from), Some(to)) = (process(sender), process(receiver)) else { continue };
            let messages = sent(program, EdgeId::from_index(index), half);
            if from != to && (from == here || to == here) && !messages.is_empty() {
                let crossing = Crossing { edge: EdgeId::from_index(index), half, from, to };
                carriers.push(Carrier { crossing, messages });
            }
        }
    }
    carriers
}

/// The stages that send and receive on one half of an edge.
fn ends(edge: &Edge, half: Half) -> (StageId, StageId) {
    match half {
        Half::Forward => (edge.from, edge.to),
        Half::Backward => (edge.to, edge.from),
    }
}

/// What is sent on one half of an edge, in order; one device sends all of it.
fn sent(program: &Program, edge: EdgeId, half: Half) -> Vec<Option<MicroBatch>> {
    let actions = program.devices.iter().flatten();
    let of_link = actions.filter_map(|action| match action.op {
        Op::Send(transfer) if transfer.edge == edge && transfer.half == half => {
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
            step.fail(StepError::Elsewhere(error));
        }
    }

    fn carry_out<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
    ) -> Result<(), Elsewhere> {
        let Some(link) = step.links.get(self.crossing.edge, self.crossing.half) else {
            return Ok(());
        };
        let mut outbound = peers.outbound(self.crossing)?;
        for _ in &self.messages {
            // Poisoned: the run failed, and its reason is known.
            let Ok(envelope) = link.take(SLICE, || true) else { return Ok(()) };
            let parcel = Parcel { micro_batch: envelope.micro_batch, message: envelope.message };
            outbound.send(parcel)?;
            link.release(envelope.arrival);
        }
        outbound.flush()
    }

    fn carry_in<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
        clock: &Clock,
    ) -> Result<(), Elsewhere> {
        let Some(link) = step.links.get(self.crossing.edge, self.crossing.half) else {
            return Ok(());
        };
        let mut inbound = peers.inbound(self.crossing)?;
        for &expected in &self.messages {
            let parcel = inbound.receive()?;
            if parcel.micro_batch != expected {
                let of = |micro_batch| {
                    let Crossing { edge, half, .. } = self.crossing;
                    Transfer { half, micro_batch, edge }
                };
                let reason = format!(
                    "it sent {} where {} was due: its schedule is another",
                    of(parcel.micro_batch),
                    of(expected)
                );
                return Err(Elsewhere { process: Some(self.crossing.from), reason });
            }
            if link.reserve(SLICE, || true).is_err() {
                return Ok(());
            }
            let now = clock.now();
            link.put(parcel.micro_batch, parcel.message, |_| (now, now));
        }
        Ok(())
    }
}
