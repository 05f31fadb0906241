//! The seam to a pool's other processes.
//!
//! Each process runs the workers of its own devices. A link between two processes has a carrier on
//! each side, which uses the traits here. The transport implements them.

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
    /// The number of the receiving process.
    pub to: usize,
}

/// A message on its way between processes.
#[derive(Debug)]
pub struct Envelope<V> {
    /// The message's micro-batch, if it has one; the receiver checks it.
    pub micro_batch: Option<MicroBatch>,
    /// The message.
    pub message: Message<V>,
}

/// A failure of another process, or of the communication with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", process.map(|rank| format!("rank {rank}: ")).unwrap_or_default())]
pub struct PeerError {
    /// The process, if known.
    pub process: Option<usize>,
    /// The reason, as text.
    pub reason: String,
}

/// The sending end of a remote edge, for one run.
pub trait Outbound<V>: Send {
    /// Starts to send a message; returns once another one may be sent. The number of unsent
    /// messages is bounded.
    ///
    /// # Errors
    /// The connection is lost, or the run was interrupted.
    fn send(&mut self, envelope: Envelope<V>) -> Result<(), PeerError>;

    /// Waits until every message has been sent.
    ///
    /// # Errors
    /// As for [`Outbound::send`].
    fn flush(&mut self) -> Result<(), PeerError>;
}

/// The receiving end of a remote edge, for one run.
pub trait Inbound<V>: Send {
    /// Waits for the next message.
    ///
    /// # Errors
    /// The connection is lost, or the run was interrupted.
    fn receive(&mut self) -> Result<Envelope<V>, PeerError>;
}

/// The end of all links without a buffer between this process's device and those of other
/// processes, for one run.
pub trait Exchange<V>: Send {
    /// Sends and receives at the same time, in the given orders, and returns what arrived. All of
    /// it may still be under way, if the values know when they are ready. Between two processes,
    /// values are received in the order in which they are sent.
    ///
    /// # Errors
    /// The connection is lost, or the run was interrupted.
    fn exchange(
        &mut self,
        sends: Vec<(RemoteEdge, Envelope<V>)>,
        receives: &[RemoteEdge],
    ) -> Result<Vec<Envelope<V>>, PeerError>;

    /// Waits until nothing is under way.
    ///
    /// # Errors
    /// As for [`Exchange::exchange`].
    fn flush(&mut self) -> Result<(), PeerError>;
}

/// A callback, from any thread, for the failure of another process.
pub type Alarm = Arc<dyn Fn(PeerError) + Send + Sync>;

/// What the transport needs to know about a run.
pub struct Run {
    /// The lists of all devices.
    pub program: Arc<Program>,
    /// Signs of life. This process's devices beat here; the transport passes their beats to the
    /// other processes, and records the beats of the others' devices here.
    pub pulses: Arc<Pulses>,
    /// Called when another process fails.
    pub alarm: Alarm,
}

/// One process's part of a run.
pub struct Share<E: StageExecutor> {
    /// When this part began, on the clock that all processes share.
    pub origin: Nanos,
    /// The reports of this process's devices.
    pub reports: Vec<(DeviceId, Report<E>)>,
}

/// The other processes, as seen from this one. Every process executes the same runs in the same
/// order.
pub trait Peers<E: StageExecutor>: Send + Sync + 'static {
    /// The number of this process.
    fn here(&self) -> usize;

    /// The process of a device.
    fn process_of(&self, device: DeviceId) -> usize;

    /// The rank that messages print for a process. It differs from `process` where there are other
    /// processes besides these.
    fn rank_of(&self, process: usize) -> usize {
        process
    }

    /// Starts a run.
    ///
    /// # Errors
    /// Another process is gone.
    fn begin(&self, run: Run) -> Result<(), PeerError>;

    /// Whether values pass between processes without a buffer: through [`Peers::exchange`]. Each
    /// process then has one device. Votes and verdicts take the ends of links.
    fn is_unbuffered(&self) -> bool {
        false
    }

    /// Opens the end of all links without a buffer.
    ///
    /// # Errors
    /// The connection is lost, or there are no such links.
    fn exchange(&self) -> Result<Box<dyn Exchange<E::Value>>, PeerError> {
        let reason = "its links have buffers".to_owned();
        Err(PeerError { process: Some(self.here()), reason })
    }

    /// Opens the sending end of `crossing`, which leaves this process.
    ///
    /// # Errors
    /// The connection is lost.
    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<E::Value>>, PeerError>;

    /// Opens the receiving end of `crossing`, which enters this process.
    ///
    /// # Errors
    /// The connection is lost.
    fn inbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Inbound<E::Value>>, PeerError>;

    /// Fails the run: ends every wait in it, and tells the other processes if they do not know yet.
    fn fail(&self, why: &PeerError);

    /// Sends this process's part to the others, waits for theirs, and returns all parts in any
    /// order.
    ///
    /// # Errors
    /// Another process failed or is gone.
    fn share(&self, own: Share<E>) -> Result<Vec<Share<E>>, PeerError>;

    /// The time now on the clock that all processes share.
    fn now(&self) -> Nanos;
}
