//! What several processes do together: each writes the state of its own stages into one folder that
//! all of them see, and the first one everything else.

use std::{path::Path, sync::Arc, time::Duration};

use gpipe::processes::{PeerError, Transport};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{CheckpointError, Result};

/// The processes that save together; or this one, alone.
#[derive(Clone, Default)]
pub(crate) struct Together(Option<Arc<dyn Transport>>);

impl std::fmt::Debug for Together {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = self.0.as_ref().map(|transport| (transport.rank(), transport.size()));
        f.debug_tuple("Together").field(&rank).finish()
    }
}

/// Who gathers: threads of each process that do so at the same time must not take each other's.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lane {
    /// The thread that trains.
    Training,
    /// One that writes, which waits so long for those of other processes.
    Writing(Duration),
}

impl Together {
    pub(crate) fn with(transport: &Arc<dyn Transport>) -> Self {
        Self(Some(Arc::clone(transport)))
    }

    /// Whether this process writes what is of the whole.
    pub(crate) fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|transport| transport.rank() == 0)
    }

    /// What each process came to, by rank, once all of them have. An error of one is an error of
    /// all.
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
            // It is the first cause of whatever else happened.
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

    /// `own`, once all processes have come as far; the error of any of them otherwise.
    pub(crate) fn all<T>(&self, lane: Lane, own: Result<T>) -> Result<T> {
        let mut value = None;
        self.exchange(lane, own.map(|own| value = Some(own)))?;
        value.ok_or_else(|| CheckpointError::Content {
            what: "a checkpoint".into(),
            reason: "an error of its own got lost".into(),
        })
    }

    /// An error unless this process sees the folder that the first one made.
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
