//! Groups of processes that move tensors between each other.

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

/// A process group on Gloo: tensors of the CPU over TCP. What it moves goes through the ends that
/// it gives out: an [`Outbox`] or [`Inbox`] for each peer and tag, and [`Sums`] over all processes.
///
/// Why no bare `send` and `receive`: Gloo writes into a tensor for as long as it likes, and ends a
/// process whose receive is smaller than what comes. The ends own what they receive into, and know
/// sizes beforehand.
#[derive(Clone)]
pub struct Group(Arc<Raw>);

/// Gloo's group, and which ends of it are in use.
pub(super) struct Raw {
    group: UniquePtr<bridged::ProcessGroup>,
    rank: usize,
    size: usize,
    taken: Mutex<HashSet<End>>,
}

/// One end of the messages with a tag.
pub(super) type End = (Direction, usize, usize);

// SAFETY: Gloo's sends and receives are made for several threads. What is not, the numbering of its
// collectives, is for one thread: that of `Sums`, of which a group has one.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Group {
    /// Joins a group of `size` processes as number `rank`: all of them meet in `store`. Peers
    /// connect to `address` (a host's name or IP address), where this process listens at a port
    /// that the system chooses. A sum fails after `timeout`.
    ///
    /// # Errors
    /// The address is not this machine's; a process did not come within `timeout`.
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

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// The sending end of the messages with `tag` to process `to`.
    ///
    /// # Errors
    /// There is one already; there is no such process.
    pub fn outbox(&self, to: usize, tag: usize) -> Result<Outbox> {
        self.0.take((Direction::Out, to, tag))?;
        Ok(Outbox::new(Arc::clone(&self.0), to, tag))
    }

    /// The receiving end of the messages with `tag` from process `from`.
    ///
    /// # Errors
    /// There is one already, or one was dropped in the middle of a message; there is no such
    /// process.
    pub fn inbox(&self, from: usize, tag: usize) -> Result<Inbox> {
        self.0.take((Direction::In, from, tag))?;
        Ok(Inbox::new(Arc::clone(&self.0), from, tag))
    }

    /// Sums over all processes of the group, which all of them make.
    ///
    /// # Errors
    /// They were made already; the system has no thread for them.
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

    /// An end is whole again: another may take its place.
    pub(super) fn give_back(&self, end: End) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&end);
    }

    pub(super) fn send(&self, tensor: &Tensor, to: usize, tag: usize) -> Result<Work> {
        let what = "sending";
        let (rank, tag) = (number(to, what)?, number(tag, what)?);
        // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a
        // reference of its own.
        let work = unsafe { self.group.send(address(tensor), rank, tag) };
        work.map(|work| Work::new(work, what, Some(to))).map_err(failed(what, Some(to)))
    }

    /// The tensor must be as large as what comes, and nobody else may have it.
    pub(super) fn receive(&self, into: &Tensor, from: usize, tag: usize) -> Result<Work> {
        let what = "receiving";
        let (rank, tag) = (number(from, what)?, number(tag, what)?);
        // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a
        // reference of its own.
        let work = unsafe { self.group.receive(address(into), rank, tag) };
        work.map(|work| Work::new(work, what, Some(from))).map_err(failed(what, Some(from)))
    }

    /// The sum, or the largest of each element, of as large a tensor in every process, in place.
    /// From one thread.
    pub(super) fn all_reduce(&self, tensor: &Tensor, largest: bool) -> Result<Work> {
        let what = "the sum over all processes";
        // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a
        // reference of its own.
        let work = unsafe { self.group.all_reduce(address(tensor), largest) };
        work.map(|work| Work::new(work, what, None)).map_err(failed(what, None))
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.0.rank, self.0.size)
    }
}

/// c10d's numbers.
fn number(number: usize, operation: &str) -> Result<i32> {
    i32::try_from(number).map_err(|error| Error {
        operation: operation.to_owned(),
        peer: None,
        message: format!("{number}: {error}"),
    })
}
