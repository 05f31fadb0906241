//! An operation of a group that goes on in the background.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cxx::UniquePtr;

use super::{Error, Result, failed, milliseconds};
use crate::ffi::bridged;

/// An operation that goes on in the background: to wait for it, and to end it from another thread.
/// The memory that it reads or writes lives at least as long as every clone of this.
#[derive(Clone)]
pub struct Work(Arc<Inner>);

struct Inner {
    work: UniquePtr<bridged::GroupWork>,
    operation: &'static str,
    peer: Option<usize>,
    /// How it ended. c10d's own wait would wait for the next operation the second time.
    ended: Mutex<Option<Result<()>>>,
}

// SAFETY: c10d's works are waited for in one thread, which `ended` sees to, and aborted from
// another.
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

    /// Waits until it is done; any later wait gives the same result at once.
    ///
    /// A send or receive that is not done within `timeout` leaves its two processes without a
    /// connection. To give one up and keep it, [`Work::abort`] it.
    ///
    /// # Errors
    /// The peer is gone; it was aborted; the time is over.
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

    /// Whether a wait has found it done.
    pub(super) fn is_done(&self) -> bool {
        let ended = self.0.ended.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*ended, Some(Ok(())))
    }

    /// Ends a wait for a send or receive in another thread; the connection stays. Sums cannot be
    /// aborted: they end at their group's timeout.
    ///
    /// # Errors
    /// It is a sum.
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
