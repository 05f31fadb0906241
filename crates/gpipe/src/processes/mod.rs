//! A pipeline in several processes: what it asks of a transport.
//!
//! Every process builds the same pipeline and makes the same calls in the same order. A stage is in
//! one process; values between stages of two processes go through the transport, which is c10d's in
//! `gpipe-distributed`.
//!
//! - [`dtype`]: dtypes as numbers; [`replicas`]: the seam to other replicas of the pipeline
//! - here: the seam to the transport

pub mod dtype;
pub mod replicas;

use std::time::Duration;

use gpipe_core::{Bytes, Nanos};
pub use gpipe_runtime::{
    PeerError, Verdict, Vote,
    link::Message,
    peers::{Alarm, Envelope, Inbound, Outbound, RemoteEdge, Run},
    pulse::Pulses,
};
pub use replicas::{Replicas, Summing};

use crate::value::Value;

/// Bytes of a layer's part of a vote: its number, and its sum of squares.
pub const SQUARE_BYTES: usize = 4 + 8;
/// Bytes of a verdict: whether to apply the update, the norm, the scale.
pub const VERDICT_BYTES: usize = 1 + 8 + 8;

/// The other processes of a pipeline, as one of them sees them. Ranks count from 0.
pub trait Transport: Send + Sync + 'static {
    /// The number of this process.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// The number that messages call a process by, where there are others besides these.
    fn rank_of(&self, process: usize) -> usize {
        process
    }

    /// Compares facts, by name, with those of the other processes; every process calls it with its
    /// own.
    ///
    /// # Errors
    /// The first fact that is another elsewhere, with both sides; a process that does not come.
    fn agree(&self, facts: &[(String, String)]) -> std::result::Result<(), PeerError>;

    /// As [`gpipe_runtime::Peers::begin`].
    ///
    /// # Errors
    /// Another process is gone.
    fn begin(&self, run: Run) -> std::result::Result<(), PeerError>;

    /// As [`gpipe_runtime::Peers::outbound`]. Tensors are on the CPU.
    ///
    /// # Errors
    /// The connection is lost.
    fn outbound(
        &self,
        crossing: RemoteEdge,
    ) -> std::result::Result<Box<dyn Outbound<Value>>, PeerError>;

    /// As [`gpipe_runtime::Peers::inbound`]. Tensors come as they were sent, with their strides,
    /// and are allocated in the calling thread. What says that it brings more than the `most` bytes
    /// of a message is refused before memory is asked for.
    ///
    /// # Errors
    /// The connection is lost.
    fn inbound(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> std::result::Result<Box<dyn Inbound<Value>>, PeerError>;

    /// As [`gpipe_runtime::Peers::fail`].
    fn fail(&self, why: &PeerError);

    /// Gives `own` to every process, and waits for theirs; by rank.
    ///
    /// # Errors
    /// Another process failed or is gone.
    fn gather(&self, own: Vec<u8>) -> std::result::Result<Vec<Vec<u8>>, PeerError>;

    /// As [`Transport::gather`], for a thread of each process beside the one that trains:
    /// independent of what that one gathers. It waits no longer than `longest` for each process,
    /// which a disk may be slow for.
    ///
    /// # Errors
    /// As there.
    fn gather_beside(
        &self,
        own: Vec<u8>,
        longest: Duration,
    ) -> std::result::Result<Vec<Vec<u8>>, PeerError>;

    /// The time now on a clock that all processes share.
    fn now(&self) -> Nanos;
}

/// The process of a device: contiguous blocks, as equal as can be.
pub fn process_of(device: usize, devices: usize, processes: usize) -> usize {
    device * processes / devices.max(1)
}
