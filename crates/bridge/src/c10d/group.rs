//! Process groups, which move tensors between processes.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cxx::UniquePtr;
use tch::Tensor;

use super::{
    Error, Inbox, Outbox, Result, Sums, TcpStore, Work, failed, mail::Direction, milliseconds,
};
use crate::{address, ffi::bridged};

/// A process group on Gloo, for CPU tensors over TCP. Tensors move through its ends: an [`Outbox`]
/// or [`Inbox`] for each peer and tag, and [`Sums`] over all processes.
///
/// Why there is no bare `send` or `receive`: Gloo may write into a tensor at any later time, and
/// ends a process whose receive is smaller than what arrives. The ends own the tensors that they
/// receive into, and know their sizes beforehand.
#[derive(Clone)]
pub struct Group(Arc<Raw>);

/// Gloo's group, and which of its ends are in use.
pub(super) struct Raw {
    group: UniquePtr<bridged::ProcessGroup>,
    pub(super) rank: usize,
    pub(super) size: usize,
    taken: Mutex<HashSet<End>>,
}

/// Identifies one end: its direction, its peer and its tag.
pub(super) type End = (Direction, usize, usize);

// SAFETY: Gloo's sends and receives are thread-safe. The numbering of its collectives is not, but
// only one thread uses it: that of `Sums`, of which a group has one.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Group {
    /// Joins a group of `size` processes as number `rank`; all of them meet in `store`. Peers
    /// connect to `address` (a host name or IP address), where this process listens on a port that
    /// the system chooses. A sum fails after `timeout`.
    ///
    /// # Errors
    /// `address` is not an address of this machine; a process did not come within `timeout`.
    pub fn gloo(
        store: &TcpStore,
        rank: usize,
        size: usize,
        address: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let what = || format!("joining a group of {size} processes as rank {rank} at {address}");
        let (own, all) = (number(rank, &what())?, number(size, &what())?);
        let group = bridged::gloo_group(store.bridged(), own, all, address, milliseconds(timeout));
        let group = group.map_err(failed(what(), None))?;
        Ok(Self(Arc::new(Raw { group, rank, size, taken: Mutex::default() })))
    }

    /// The number of this process.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Opens the sending end of the messages with `tag` to process `to`.
    ///
    /// # Errors
    /// This end is already in use; there is no such process.
    pub fn outbox(&self, to: usize, tag: usize) -> Result<Outbox> {
        self.0.take((Direction::Out, to, tag))?;
        Ok(Outbox::new(Arc::clone(&self.0), to, tag))
    }

    /// Opens the receiving end of the messages with `tag` from process `from`.
    ///
    /// # Errors
    /// This end is already in use, or was dropped in the middle of a message; there is no such
    /// process.
    pub fn inbox(&self, from: usize, tag: usize) -> Result<Inbox> {
        self.0.take((Direction::In, from, tag))?;
        Ok(Inbox::new(Arc::clone(&self.0), from, tag))
    }

    /// Starts the sums and broadcasts over all processes of the group. Every process must call
    /// this.
    ///
    /// # Errors
    /// It was already called; the system has no thread for it.
    pub fn sums(&self) -> Result<Sums> {
        self.0.take((Direction::All, 0, 0))?;
        Sums::start(Arc::clone(&self.0))
    }
}

impl Raw {
    fn take(&self, end: End) -> Result<()> {
        let (direction, peer, tag) = end;
        let refuse = |message: String| {
            let operation = format!("the {direction} end of tag {tag}");
            Err(Error { operation, peer: Some(peer), message })
        };
        if peer >= self.size || (peer == self.rank && direction != Direction::All) {
            return refuse(format!("it is not another one of the {} processes", self.size));
        }
        number(tag, "a tag")?;
        if self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(end) {
            return Ok(());
        }
        refuse("it is in use, or was given up in the middle of a message".into())
    }

    /// Marks an end as free, so that another one may take its place.
    pub(super) fn give_back(&self, end: End) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&end);
    }

    pub(super) fn send(&self, tensor: &Tensor, to: usize, tag: usize) -> Result<Work> {
        let what = "sending";
        let (rank, tag) = (number(to, what)?, number(tag, what)?);
        // SAFETY: the tensor at this address is borrowed for the whole call; the work holds its own
        // reference.
        let work = unsafe { self.group.send(address(tensor), rank, tag) };
        work.map(|work| Work::new(work, what, Some(to))).map_err(failed(what, Some(to)))
    }

    /// Starts a receive. The tensor must have the size of what arrives, and nothing else may use
    /// it.
    pub(super) fn receive(&self, into: &Tensor, from: usize, tag: usize) -> Result<Work> {
        let what = "receiving";
        let (rank, tag) = (number(from, what)?, number(tag, what)?);
        // SAFETY: the tensor at this address is borrowed for the whole call; the work holds its own
        // reference.
        let work = unsafe { self.group.receive(address(into), rank, tag) };
        work.map(|work| Work::new(work, what, Some(from))).map_err(failed(what, Some(from)))
    }

    /// Starts an in-place all-reduce: the elementwise sum or maximum of tensors that have the same
    /// size in every process. Call it from one thread only.
    pub(super) fn all_reduce(&self, tensor: &Tensor, largest: bool) -> Result<Work> {
        let what = "the sum over all processes";
        // SAFETY: the tensor at this address is borrowed for the whole call; the work holds its own
        // reference.
        let work = unsafe { self.group.all_reduce(address(tensor), largest) };
        work.map(|work| Work::new(work, what, None)).map_err(failed(what, None))
    }

    /// Starts to copy the tensor of process `from` into those of all others. All have the same
    /// size, and nothing else may use them.
    pub(super) fn broadcast(&self, tensor: &Tensor, from: usize) -> Result<Work> {
        let what = "the broadcast to all processes";
        let rank = number(from, what)?;
        // SAFETY: the tensor at this address is borrowed for the whole call; the work holds its own
        // reference.
        let work = unsafe { self.group.broadcast(address(tensor), rank) };
        work.map(|work| Work::new(work, what, Some(from))).map_err(failed(what, Some(from)))
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.0.rank, self.0.size)
    }
}

/// Converts a rank or tag to c10d's integer type.
fn number(number: usize, operation: &str) -> Result<i32> {
    i32::try_from(number).map_err(|error| Error {
        operation: operation.to_owned(),
        peer: None,
        message: format!("{number}: {error}"),
    })
}
