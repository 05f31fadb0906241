//! The pool's side of links to other processes: starts carriers before a run and waits for them
//! after.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use gpipe_core::{Direction, EdgeId, exchange::Exchanges, lower::Program};

use super::WorkerPool;
use crate::{
    carrier::carriers,
    clock::Clock,
    failure::StepError,
    link::Links,
    peers::{PeerError, Run, Share},
    stage::StageExecutor,
    worker::Step,
};

/// How many programs' exchanges are kept: those of a step, of its parts and of an evaluation.
const KEPT: usize = 8;

/// A carrier thread of a run.
pub(super) struct Carrying {
    /// Closed when the thread ends.
    ended: mpsc::Receiver<()>,
    /// The rank at the other end; `None` if there may be several.
    peer: Option<usize>,
}

impl<E: StageExecutor> WorkerPool<E> {
    /// The exchanges of `program`, if links between processes have no buffer.
    ///
    /// # Errors
    /// The program would deadlock; a process has several devices.
    pub(super) fn exchanges_of(
        &mut self,
        program: &Arc<Program>,
    ) -> Result<Option<Arc<Exchanges>>, StepError<E::Error>> {
        let Some(peers) = self.peers.as_ref().filter(|peers| peers.is_unbuffered()) else {
            return Ok(None);
        };
        if let Some((_, known)) = self.exchanges.iter().find(|(own, _)| Arc::ptr_eq(own, program)) {
            return Ok(Some(Arc::clone(known)));
        }
        let unusable = |reason: String| StepError::Unusable { reason };
        if self.here().count() > 1 {
            return Err(unusable("a process without buffered links has one device".into()));
        }
        let process_of = |device| peers.process_of(device);
        let made = Exchanges::new(program, process_of, self.settings.link_capacity);
        let made = Arc::new(made.map_err(|error| unusable(error.to_string()))?);
        if self.exchanges.len() >= KEPT {
            self.exchanges.remove(0);
        }
        self.exchanges.push((Arc::clone(program), Arc::clone(&made)));
        Ok(Some(made))
    }

    /// The links of a run.
    pub(super) fn links(
        &self,
        program: &Program,
        exchanges: Option<&Exchanges>,
    ) -> Links<E::Value> {
        let placement = program.placement();
        let arrives_here = |edge: EdgeId, direction| {
            let edge = program.topology.edges.get(edge.index())?;
            let receiver = if direction == Direction::Forward { edge.to } else { edge.from };
            let device = placement.get(receiver.index()).copied().flatten()?;
            self.worker(device.index())
        };
        Links::new(program, |edge, direction| match exchanges {
            Some(own) if arrives_here(edge, direction).is_some() => own.room(edge, direction),
            _ => self.settings.link_capacity,
        })
    }

    /// Starts the carrier threads of a run.
    pub(super) fn begin_crossings(
        &self,
        step: &Arc<Step<E>>,
        exchanges: Option<&Exchanges>,
        clock: &Clock,
    ) -> Vec<Carrying> {
        let Some(peers) = &self.peers else { return Vec::new() };
        let alarm = {
            // A weak reference, because the transport keeps the alarm until the next run.
            let step = Arc::downgrade(step);
            Arc::new(move |error| {
                if let Some(step) = step.upgrade() {
                    step.fail(StepError::Peer(error));
                }
            })
        };
        let (program, pulses) = (Arc::clone(&step.program), Arc::clone(&self.pulses));
        if let Err(error) = peers.begin(Run { program, pulses, alarm }) {
            step.fail(StepError::Peer(error));
            return Vec::new();
        }
        let carriers =
            carriers(&step.program, exchanges, peers.here(), |device| peers.process_of(device));
        let carry = carriers.into_iter().map(|carrier| {
            let (done, ended) = mpsc::channel();
            let peer = carrier.peer(peers.here()).map(|process| peers.rank_of(process));
            let (step, peers, clock) = (Arc::clone(step), Arc::clone(peers), clock.clone());
            let thread = std::thread::Builder::new().name("gpipe-carrier".into());
            let failing = Arc::clone(&step);
            let spawned = thread.spawn(move || {
                let _done = done; // dropped when the thread ends, even by a panic
                carrier.run(&step, &peers, &clock);
            });
            if let Err(error) = spawned {
                let reason = format!(
                    "no thread for a link to another process: {error}; raise the limit on threads \
                    (ulimit -u)"
                );
                failing.fail(StepError::Unusable { reason });
            }
            Carrying { ended, peer }
        });
        carry.collect()
    }

    /// Waits for the carriers. They end when every message has moved or the step has failed.
    pub(super) fn end_crossings(&mut self, step: &Step<E>, carrying: &[Carrying]) {
        for Carrying { ended, peer } in carrying {
            let mut patience = Instant::now() + step.deadline;
            while let Err(mpsc::RecvTimeoutError::Timeout) =
                ended.recv_timeout(Duration::from_millis(100))
            {
                let moves = !step.failure.is_raised() && self.pulses.standstill() < step.deadline;
                if Instant::now() < patience || moves {
                    continue;
                }
                if step.failure.is_raised() {
                    // The carrier does not react to the failure, so it is abandoned.
                    self.unusable = Some("a link to another process did not end".into());
                    return;
                }
                // The workers are done, so only messages that leave are left.
                let whom = if peer.is_some() { "it" } else { "other ranks" };
                let reason = format!(
                    "messages to {whom} were not all sent within {:.1?}: a process was stopped, or \
                    the network is cut",
                    step.deadline
                );
                step.fail(StepError::Peer(PeerError { process: *peer, reason }));
                patience = Instant::now() + step.deadline;
            }
        }
    }

    /// Exchanges this process's part and returns all parts; empty if the step failed.
    pub(super) fn share(&self, step: &Step<E>, own: Share<E>) -> Vec<Share<E>> {
        let Some(peers) = &self.peers else { return vec![own] };
        if step.failure.is_raised() {
            return Vec::new();
        }
        peers.share(own).unwrap_or_else(|error| {
            step.fail(StepError::Peer(error));
            Vec::new()
        })
    }
}
