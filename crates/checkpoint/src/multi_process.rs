//! Coordinates the ranks of a run that save together. Each rank writes the state of its stages into
//! a shared folder, and rank 0 writes everything else.

use std::{path::Path, sync::Arc, time::Duration};

use gpipe::processes::{PeerError, Transport};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{CheckpointError, Result};

/// The ranks that save together, or a single process.
#[derive(Clone, Default)]
pub(crate) struct Together(Option<Arc<dyn Transport>>);

impl std::fmt::Debug for Together {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = self.0.as_ref().map(|transport| (transport.rank(), transport.size()));
        f.debug_tuple("Together").field(&rank).finish()
    }
}

/// The thread that gathers. Threads of one process gather at the same time, so each needs a
/// separate lane to keep their messages apart.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lane {
    /// The training thread.
    Training,
    /// A writer thread. It waits at most this long for the writers of other ranks.
    Writing(Duration),
}

impl Together {
    pub(crate) fn with(transport: &Arc<dyn Transport>) -> Self {
        Self(Some(Arc::clone(transport)))
    }

    /// Whether this is rank 0, which writes everything that belongs to no stage.
    pub(crate) fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|transport| transport.rank() == 0)
    }

    /// Gathers the results of all ranks, in rank order. An error on one rank is an error on all.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        lane: Lane,
        own: Result<T>,
    ) -> Result<Vec<T>> {
        let Some(transport) = &self.0 else { return Ok(vec![own?]) };
        let unreadable = |rank: usize| PeerError {
            process: Some(rank),
            reason: "what it says of its part of a checkpoint cannot be read".into(),
        };
        let (told, own_error) = match own {
            Ok(value) => (Ok(value), None),
            Err(error) => (Err(error.to_string()), Some(error)),
        };
        let told = serde_json::to_vec(&told).map_err(|_| unreadable(transport.rank()))?;
        let all = match lane {
            Lane::Training => transport.gather(told),
            Lane::Writing(longest) => transport.gather_beside(told, longest),
        };
        let all = match (own_error, all) {
            // This rank's error is the cause of any failure to gather.
            (Some(own), _) => return Err(own),
            (None, all) => all?,
        };
        let value = |(rank, bytes): (usize, Vec<u8>)| {
            let told: std::result::Result<T, String> =
                serde_json::from_slice(&bytes).map_err(|_| unreadable(rank))?;
            told.map_err(|reason| PeerError { process: Some(rank), reason }.into())
        };
        all.into_iter().enumerate().map(value).collect()
    }

    /// Waits until all ranks get here, then returns `own`, or the error of any rank.
    pub(crate) fn all<T>(&self, lane: Lane, own: Result<T>) -> Result<T> {
        let mut value = None;
        self.exchange(lane, own.map(|own| value = Some(own)))?;
        value.ok_or_else(|| CheckpointError::Content {
            what: "a checkpoint".into(),
            reason: "an error of its own got lost".into(),
        })
    }

    /// The rank of this process.
    pub(crate) fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, |transport| transport.rank())
    }

    /// Returns an error unless this process sees the folder that rank 0 made.
    pub(crate) fn see(&self, folder: &Path) -> Result<()> {
        if self.is_first() || folder.is_dir() {
            return Ok(());
        }
        Err(CheckpointError::NotFound {
            path: folder.to_owned(),
            reason: "rank 0 made it, and this process does not see it: all of them need the same \
                folder, on a file system that they share"
                .into(),
        })
    }
}
