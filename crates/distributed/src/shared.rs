//! What everything that communicates has of a cluster: the connections, the deadlines, and the one
//! failure that all know.

use std::{sync::Arc, time::Duration};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, Group};

use crate::{interrupt::Interrupt, watch::Watch};

/// What the ends of links share.
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) group: Group,
    pub(crate) interrupt: Arc<Interrupt>,
    /// The runtime's deadlines end waits; this is for the case that they do not.
    pub(crate) longest_wait: Duration,
    pub(crate) deadline: Duration,
    /// Where this process is reached.
    pub(crate) address: String,
    pub(crate) watch: Arc<Watch>,
}

impl Shared {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The failure that all processes know, if there is one.
    pub(crate) fn failed(&self) -> Option<PeerError> {
        self.watch.failed()
    }

    /// An error of this process.
    pub(crate) fn own(&self, reason: String) -> PeerError {
        PeerError { process: Some(self.rank), reason }
    }

    /// The connection to a process failed: tells the others, and returns what all of them know.
    pub(crate) fn lost(&self, rank: usize, error: &c10d::Error) -> PeerError {
        match self.watch.failed() {
            Some(known) => known,
            None => self.watch.fail(&self.watch.lost(rank, &error.to_string())),
        }
    }
}
