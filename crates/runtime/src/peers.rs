//! A pool's other processes. Each process runs the workers of its own devices; a link between two
//! of them is carried by a carrier on either side, through what this seam gives. Behind it is the
//! transport.

use std::sync::Arc;

use gpipe_core::{DeviceId, Direction, EdgeId, MicroBatch, Nanos, lower::Program};

use crate::{link::Message, pulse::Pulses, report::Report, stage::StageExecutor};

/// A link from one process to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteEdge {
    /// The edge.
    pub edge: EdgeId,
    /// Its direction.
    pub direction: Direction,
    /// The number of the sending process.
    pub from: usize,
    /// And of the receiving one.
    pub to: usize,
}

/// A message on its way between processes.
#[derive(Debug)]
pub struct Envelope<V> {
    /// Of which micro-batch; checked by the receiver.
    pub micro_batch: Option<MicroBatch>,
    /// The message.
    pub message: Message<V>,
}

/// Something that went wrong between processes, or in another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", process.map(|rank| format!("rank {rank}: ")).unwrap_or_default())]
pub struct PeerError {
    /// Which process, if it is known.
    pub process: Option<usize>,
    /// What is known of it.
    pub reason: String,
}

/// The sending end of a crossing, for one run.
pub trait Outbound<V>: Send {
    /// Takes a message that is to be sent; returns once it may take another one. What it holds
    /// meanwhile is bounded.
    ///
    /// # Errors
    /// The connection is lost, or the run was interrupted.
    fn send(&mut self, envelope: Envelope<V>) -> Result<(), PeerError>;

    /// Waits until everything has left.
    ///
    /// # Errors
    /// As [`Outbound::send`].
    fn flush(&mut self) -> Result<(), PeerError>;
}

/// The receiving end of a crossing, for one run.
pub trait Inbound<V>: Send {
    /// Waits for the next message.
    ///
    /// # Errors
    /// The connection is lost, or the run was interrupted.
    fn receive(&mut self) -> Result<Envelope<V>, PeerError>;
}

/// Called, from any thread, when another process has failed.
pub type Alarm = Arc<dyn Fn(PeerError) + Send + Sync>;

/// What the transport is told of a run.
pub struct Run {
    /// The lists of all devices.
    pub program: Arc<Program>,
    /// Signs of life: this process's devices beat here; the transport tells the others, and beats
    /// for theirs.
    pub pulses: Arc<Pulses>,
    /// What to call when another process fails.
    pub alarm: Alarm,
}

/// One process's part of a run.
pub struct Share<E: StageExecutor> {
    /// When it began, on a clock that all processes share.
    pub origin: Nanos,
    /// What its devices did.
    pub reports: Vec<(DeviceId, Report<E>)>,
}

/// The other processes, as this one sees them. Every process makes the same runs in the same order.
pub trait Peers<E: StageExecutor>: Send + Sync + 'static {
    /// The number of this process.
    fn here(&self) -> usize;

    /// The process of a device.
    fn process_of(&self, device: DeviceId) -> usize;

    /// The number that messages call a process by, where there are others besides these.
    fn rank_of(&self, process: usize) -> usize {
        process
    }

    /// A run begins.
    ///
    /// # Errors
    /// Another process is gone.
    fn begin(&self, run: Run) -> Result<(), PeerError>;

    /// The sending end of `crossing`, which goes out of this process.
    ///
    /// # Errors
    /// The connection is lost.
    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<E::Value>>, PeerError>;

    /// The receiving end of `crossing`, which comes into this process.
    ///
    /// # Errors
    /// The connection is lost.
    fn inbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Inbound<E::Value>>, PeerError>;

    /// The run has failed: every wait in it ends, and the others are told why if they do not know.
    fn fail(&self, why: &PeerError);

    /// This process's part is done: gives it to the others, and waits for theirs; all of them, in
    /// any order.
    ///
    /// # Errors
    /// Another process failed or is gone.
    fn share(&self, own: Share<E>) -> Result<Vec<Share<E>>, PeerError>;

    /// The time now on the clock that all processes share.
    fn now(&self) -> Nanos;
}
