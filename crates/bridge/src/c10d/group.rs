//! Groups of processes that move tensors between each other.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cxx::UniquePtr;
use tch::Tensor;

use super::{Error, Result, TcpStore, failed, milliseconds};
use crate::{address, addresses, ffi::bridged};

/// A process group on Gloo: tensors of the CPU over TCP.
///
/// Sends and receives may come from any thread, with tags that tell them apart; those of one tag and pair are
/// matched in their order. Collectives must come in the same order in every process.
pub struct Group {
    group: UniquePtr<bridged::ProcessGroup>,
    rank: usize,
    size: usize,
    /// Collectives are numbered as they are begun.
    collectives: Mutex<()>,
}

// SAFETY: Gloo's sends and receives are made for several threads; what is not, the numbering of collectives, is behind the lock.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Group {
    /// Joins a group of `size` processes as number `rank`: all of them meet in `store`. Peers connect to `address` (a host's name or IP
    /// address), where this process listens at a port that the system chooses. A collective fails after `timeout`.
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
        Ok(Self { group, rank, size, collectives: Mutex::new(()) })
    }

    /// The number of this process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Begins to send a contiguous tensor, which must not change until the work is done.
    ///
    /// # Errors
    /// The tensor is not contiguous or not on the CPU; the connection is lost.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: usize) -> Result<Work> {
        let what = "sending";
        let (rank, tag) = (number(to, what)?, number(tag, what)?);
        // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a reference of its own.
        let work = unsafe { self.group.send(address(tensor), rank, tag) };
        work.map(|work| Work::new(work, what, Some(to))).map_err(failed(what, Some(to)))
    }

    /// Begins to receive into a contiguous tensor.
    ///
    /// The tensor must be as large as what the peer sends: Gloo ends a process whose receive is too small.
    ///
    /// # Errors
    /// The tensor is not contiguous or not on the CPU; the connection is lost.
    pub fn receive(&self, tensor: &Tensor, from: usize, tag: usize) -> Result<Work> {
        let what = "receiving";
        let (rank, tag) = (number(from, what)?, number(tag, what)?);
        // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a reference of its own.
        let work = unsafe { self.group.receive(address(tensor), rank, tag) };
        work.map(|work| Work::new(work, what, Some(from))).map_err(failed(what, Some(from)))
    }

    /// Begins to sum a tensor over all processes, in place. The order of the sum depends on the number of processes only.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn all_reduce(&self, tensor: &Tensor) -> Result<Work> {
        self.collective("the sum over all processes", |group| {
            // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a reference of its own.
            unsafe { group.all_reduce(address(tensor)) }
        })
    }

    /// Begins to give everyone the tensor of `root`, in place.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        let rank = number(root, "a broadcast")?;
        self.collective("a broadcast", |group| {
            // SAFETY: the address is of a tensor borrowed for the whole call; the work holds a reference of its own.
            unsafe { group.broadcast(address(tensor), rank) }
        })
    }

    /// Begins to gather the `input` of every process, by rank, in the `outputs` of every process. All are of one size.
    ///
    /// # Errors
    /// The connection is lost; there are not as many outputs as processes.
    pub fn all_gather(&self, outputs: &[Tensor], input: &Tensor) -> Result<Work> {
        let outputs = addresses(outputs);
        self.collective("gathering from all processes", |group| {
            // SAFETY: the addresses are of tensors borrowed for the whole call; the work holds references of its own.
            unsafe { group.all_gather(&outputs, address(input)) }
        })
    }

    /// Begins to wait until every process has come here.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn barrier(&self) -> Result<Work> {
        self.collective("a barrier", bridged::ProcessGroup::barrier)
    }

    fn collective(
        &self,
        what: &'static str,
        begin: impl FnOnce(
            &bridged::ProcessGroup,
        )
            -> std::result::Result<UniquePtr<bridged::GroupWork>, cxx::Exception>,
    ) -> Result<Work> {
        let _one = self.collectives.lock().unwrap_or_else(PoisonError::into_inner);
        begin(&self.group).map(|work| Work::new(work, what, None)).map_err(failed(what, None))
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank, self.size)
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

/// Something that a group does meanwhile. It goes on when this is dropped.
pub struct Work {
    work: UniquePtr<bridged::GroupWork>,
    operation: &'static str,
    peer: Option<usize>,
}

// SAFETY: c10d's works are waited for in one thread and aborted from another.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

impl Work {
    fn new(
        work: UniquePtr<bridged::GroupWork>,
        operation: &'static str,
        peer: Option<usize>,
    ) -> Self {
        Self { work, operation, peer }
    }

    /// Waits until it is done.
    ///
    /// A send or receive that is not done within `timeout` leaves its two processes without a connection. To give one up and keep it,
    /// [`Work::abort`] it.
    ///
    /// # Errors
    /// The peer is gone; it was aborted; the time is over.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let done = self.work.wait(milliseconds(timeout));
        if done.map_err(failed(self.operation, self.peer))? {
            return Ok(());
        }
        let message = "it was aborted".to_owned();
        Err(Error { operation: self.operation.to_owned(), peer: self.peer, message })
    }

    /// Ends a wait for a send or receive in another thread; the connection stays. Collectives cannot be aborted: they end at their group's
    /// timeout.
    ///
    /// # Errors
    /// It is a collective.
    pub fn abort(&self) -> Result<()> {
        self.work.abort().map_err(failed(self.operation, self.peer))
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Work({}, {:?})", self.operation, self.peer)
    }
}
