//! What all parts of a cluster share: the connections, the deadlines, and the failure that all
//! processes agree on.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, Group};
use gpipe_core::StageId;

use crate::{
    interrupt::{Interrupt, Longest},
    watch::Watch,
};

/// Number of timeouts that a replica waits for the others while no device comes on. The runtime
/// ends a standstill a little later, and could not name the replica.
const SUM_STANDSTILL: u32 = 2;
/// Longest wait for another replica that does come on, but not to where it is waited for.
const SUM_MAX: Duration = Duration::from_secs(24 * 3600);

/// State that the ends of links share.
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) group: Group,
    pub(crate) interrupt: Arc<Interrupt>,
    pub(crate) deadline: Duration,
    /// The address at which other processes reach this one.
    pub(crate) address: String,
    pub(crate) watch: Arc<Watch>,
    /// Held while a thread probes which process is lost.
    pub(crate) probing: Mutex<()>,
}

impl Shared {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The longest wait for another process within a step, or for one to begin a step. The
    /// runtime's deadlines normally end a wait earlier; this is the fallback.
    pub(crate) fn longest(&self) -> Longest {
        Longest::Standstill(self.deadline.saturating_mul(4))
    }

    /// The failure that all processes agree on, if any.
    pub(crate) fn failed(&self) -> Option<PeerError> {
        self.watch.failed()
    }

    /// Creates an error of this process.
    pub(crate) fn own(&self, reason: String) -> PeerError {
        PeerError { process: Some(self.rank), reason }
    }

    /// Handles a lost connection: reports it to the other processes, and returns the failure that
    /// all agree on.
    pub(crate) fn lost(&self, rank: usize, error: &c10d::Error) -> PeerError {
        match self.watch.failed() {
            Some(known) => known,
            None => self.watch.fail(&self.watch.lost(rank, &error.to_string())),
        }
    }
}

/// A stage's wait for other replicas.
pub(crate) struct ReplicaWait<'s> {
    shared: &'s Shared,
    stage: StageId,
    begun: Instant,
}

impl<'s> ReplicaWait<'s> {
    /// Begins to wait.
    pub(crate) fn new(shared: &'s Shared, stage: StageId) -> Self {
        Self { shared, stage, begun: Instant::now() }
    }

    /// Gives a sign of life, and returns how long the wait has lasted if that is too long.
    pub(crate) fn too_long(&self) -> Option<Duration> {
        let Shared { watch, deadline, .. } = self.shared;
        watch.beat(self.stage);
        let waited = self.begun.elapsed();
        let stands = waited.min(watch.standstill()) >= SUM_STANDSTILL * *deadline;
        (stands || waited >= SUM_MAX).then_some(waited)
    }
}
