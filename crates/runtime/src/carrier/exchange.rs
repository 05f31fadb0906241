//! The carrier of a device whose links to other processes have no buffer.

use std::sync::Arc;

use gpipe_core::{MicroBatch, Transfer, exchange::Group};

use super::{SLICE, check_due};
use crate::{
    clock::Clock,
    peers::{Envelope, PeerError, Peers, RemoteEdge},
    stage::StageExecutor,
    worker::Step,
};

/// The exchanges of one device in one run, in order.
#[derive(Debug)]
pub(crate) struct Exchanger {
    groups: Vec<Crossings>,
}

/// One group: links, and the micro-batch of each message.
#[derive(Debug)]
struct Crossings {
    sends: Vec<RemoteEdge>,
    receives: Vec<(RemoteEdge, Option<MicroBatch>)>,
}

impl Exchanger {
    /// The exchanges of `groups`; `crossing` finds the processes.
    pub(super) fn new(groups: &[Group], crossing: impl Fn(Transfer) -> Option<RemoteEdge>) -> Self {
        let group = |group: &Group| {
            let transfers = |actions: &[gpipe_core::Action]| {
                let transfers = actions.iter().filter_map(|action| action.op.transfer());
                transfers.filter_map(|own| Some((crossing(own)?, own.micro_batch))).collect()
            };
            let sends: Vec<_> = transfers(&group.sends);
            let sends = sends.into_iter().map(|(crossing, _)| crossing).collect();
            Crossings { sends, receives: transfers(&group.receives) }
        };
        Self { groups: groups.iter().map(group).collect() }
    }

    /// Moves all values of the run. A poisoned link ends it: the reason is already recorded.
    pub(super) fn run<E: StageExecutor>(
        &self,
        step: &Step<E>,
        peers: &Arc<dyn Peers<E>>,
        clock: &Clock,
    ) -> Result<(), PeerError> {
        let mut exchange = peers.exchange()?;
        for Crossings { sends, receives } in &self.groups {
            let mut leaving = Vec::with_capacity(sends.len());
            for &crossing in sends {
                let Some(link) = step.links.get(crossing.edge, crossing.direction) else {
                    return Ok(());
                };
                let Ok(queued) = link.take(SLICE, || true) else { return Ok(()) };
                link.release(queued.arrival);
                let (micro_batch, message) = (queued.micro_batch, queued.message);
                leaving.push((crossing, Envelope { micro_batch, message }));
            }
            for (crossing, _) in receives {
                let link = step.links.get(crossing.edge, crossing.direction);
                if link.is_none_or(|link| link.reserve(SLICE, || true).is_err()) {
                    return Ok(());
                }
            }
            let from: Vec<RemoteEdge> = receives.iter().map(|(crossing, _)| *crossing).collect();
            let arrived = exchange.exchange(leaving, &from)?;
            for (&(crossing, expected), envelope) in receives.iter().zip(arrived) {
                check_due(peers.as_ref(), crossing, expected, envelope.micro_batch)?;
                if let Some(link) = step.links.get(crossing.edge, crossing.direction) {
                    let now = clock.now();
                    link.put(envelope.micro_batch, envelope.message, |_| (now, now));
                }
            }
        }
        exchange.flush()
    }
}
