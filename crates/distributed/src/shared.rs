//! What all parts of a cluster share: the connections, the deadlines, and the failure that all
//! processes agree on.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, Group};

use crate::{
    interrupt::{Interrupt, Longest},
    watch::Watch,
};

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
