//! Pipelines that span several processes: the interface that a transport implements.
//!
//! Every process builds the same pipeline and makes the same calls in the same order. Each stage
//! runs in one process. Values between stages of different processes go through the transport;
//! `gpipe-distributed` implements one on c10d.
//!
//! - [`dtype`]: dtypes as numbers
//! - [`links`]: how values pass between GPUs of different processes
//! - [`replicas`]: the interface to other replicas of the pipeline
//! - here: the interface to the transport

pub mod dtype;
pub mod links;
pub mod replicas;

use std::time::Duration;

use gpipe_core::{Bytes, Nanos};
pub use gpipe_runtime::{
    PeerError, Verdict, Vote,
    link::Message,
    peers::{Alarm, Envelope, Exchange, Inbound, Outbound, RemoteEdge, Run},
    pulse::Pulses,
};
pub use links::Links;
pub use replicas::{Replicas, Summing};

use crate::value::Value;

/// Bytes per layer in a vote: the layer's number and its sum of squares.
pub const SQUARE_BYTES: usize = 4 + 8;
/// Bytes of a verdict: whether to apply the update, the norm, and the scale.
pub const VERDICT_BYTES: usize = 1 + 8 + 8;

/// The most bytes of a message on a link.
pub type MostBytes = Box<dyn Fn(RemoteEdge) -> Bytes + Send>;

/// The transport between the processes of one pipeline, as one of them sees it. Ranks count from 0.
pub trait Transport: Send + Sync + 'static {
    /// The rank of this process.
    fn rank(&self) -> usize;

    /// The number of processes.
    fn size(&self) -> usize;

    /// The rank of `process` among the processes of all replicas, which error messages name.
    fn rank_of(&self, process: usize) -> usize {
        process
    }

    /// Compares named facts with those of the other processes. Every process calls it with its own
    /// facts.
    ///
    /// # Errors
    /// If a fact differs (the error names the first one, with both values), or if a process does
    /// not join.
    fn agree(&self, facts: &[(String, String)]) -> std::result::Result<(), PeerError>;

    /// Begins a run; see [`gpipe_runtime::Peers::begin`].
    ///
    /// # Errors
    /// If another process is gone.
    fn begin(&self, run: Run) -> std::result::Result<(), PeerError>;

    /// Opens the sending end of an edge; see [`gpipe_runtime::Peers::outbound`]. Tensors are on the
    /// CPU.
    ///
    /// # Errors
    /// If the connection is lost.
    fn outbound(
        &self,
        crossing: RemoteEdge,
    ) -> std::result::Result<Box<dyn Outbound<Value>>, PeerError>;

    /// Opens the receiving end of an edge; see [`gpipe_runtime::Peers::inbound`].
    ///
    /// Tensors arrive as they were sent, with their strides, and are allocated in the calling
    /// thread. A message that announces more than `most` bytes is refused before memory is
    /// allocated.
    ///
    /// # Errors
    /// If the connection is lost.
    fn inbound(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> std::result::Result<Box<dyn Inbound<Value>>, PeerError>;

    /// Connects GPU number `gpu` of this process with those of the pipeline's other processes.
    /// Every process calls it before the first [`Transport::exchange`].
    ///
    /// # Errors
    /// The transport or this build cannot; a process does not come.
    fn connect_gpus(&self, _gpu: usize) -> std::result::Result<(), PeerError> {
        let reason = "its transport does not connect GPUs".to_owned();
        Err(PeerError { process: Some(self.rank()), reason })
    }

    /// Opens the end of all links between the connected GPUs; see
    /// [`gpipe_runtime::Peers::exchange`]. The calling thread is the one that uses it. A message on
    /// a link that announces more bytes than `most` says is refused before memory is allocated.
    ///
    /// # Errors
    /// GPUs are not connected.
    fn exchange(
        &self,
        _most: MostBytes,
    ) -> std::result::Result<Box<dyn Exchange<Value>>, PeerError> {
        let reason = "its GPUs are not connected".to_owned();
        Err(PeerError { process: Some(self.rank()), reason })
    }

    /// Reports the failure of a run; see [`gpipe_runtime::Peers::fail`].
    fn fail(&self, why: &PeerError);

    /// Sends `own` to every process and waits for theirs. Returns all of them by rank.
    ///
    /// # Errors
    /// If another process failed or is gone.
    fn gather(&self, own: Vec<u8>) -> std::result::Result<Vec<Vec<u8>>, PeerError>;

    /// As [`Transport::gather`], for a second thread of each process beside the one that trains.
    /// The two gathers are independent. It waits at most `longest` for each process, because a slow
    /// disk may delay them.
    ///
    /// # Errors
    /// If another process failed or is gone.
    fn gather_beside(
        &self,
        own: Vec<u8>,
        longest: Duration,
    ) -> std::result::Result<Vec<Vec<u8>>, PeerError>;

    /// The current time on a clock that all processes share.
    fn now(&self) -> Nanos;
}

/// The process that runs a device. Each process runs a contiguous block of devices, in blocks as
/// equal as possible.
pub fn process_of(device: usize, devices: usize, processes: usize) -> usize {
    device * processes / devices.max(1)
}
