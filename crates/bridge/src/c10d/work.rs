//! A process group's operation in the background.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cxx::UniquePtr;

use super::{Error, Result, failed, milliseconds};
use crate::ffi::bridged;

/// An operation in the background. Another thread can abort a wait for it. The memory that it reads
/// or writes lives at least as long as every clone.
#[derive(Clone)]
pub struct Work(Arc<Inner>);

struct Inner {
    work: UniquePtr<bridged::GroupWork>,
    operation: &'static str,
    peer: Option<usize>,
    /// The result of the first wait. A second wait by c10d would wait for the next operation.
    ended: Mutex<Option<Result<()>>>,
}

// SAFETY: only one thread waits for c10d's work, which `ended` ensures; another may abort it.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Work {
    pub(super) fn new(
        work: UniquePtr<bridged::GroupWork>,
        operation: &'static str,
        peer: Option<usize>,
    ) -> Self {
        Self(Arc::new(Inner { work, operation, peer, ended: Mutex::new(None) }))
    }

    /// Waits until the operation is done. A later wait returns the same result at once.
    ///
    /// A send or receive that times out breaks the connection between its two processes. To give up
    /// and keep the connection, call [`Work::abort`].
    ///
    /// # Errors
    /// The peer is gone; the operation was aborted; the time is over.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let Inner { work, operation, peer, ended } = &*self.0;
        let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ended) = &*ended {
            return ended.clone();
        }
        let done = work.wait(milliseconds(timeout)).map_err(failed(*operation, *peer));
        let done = done.and_then(|done| match done {
            true => Ok(()),
            false => Err(self.error("it was aborted")),
        });
        *ended = Some(done.clone());
        done
    }

    /// Whether a wait has returned success.
    pub(super) fn is_done(&self) -> bool {
        let ended = self.0.ended.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*ended, Some(Ok(())))
    }

    /// Ends another thread's wait for a send or receive; the connection stays. A sum cannot be
    /// aborted, but ends at its group's timeout.
    ///
    /// # Errors
    /// The operation is a sum.
    pub fn abort(&self) -> Result<()> {
        self.0.work.abort().map_err(failed(self.0.operation, self.0.peer))
    }

    fn error(&self, message: &str) -> Error {
        let (operation, peer) = (self.0.operation.to_owned(), self.0.peer);
        Error { operation, peer, message: message.to_owned() }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Work({}, {:?})", self.0.operation, self.0.peer)
    }
}
