//! Replicas of a pipeline: copies of its stages that train on different samples of a mini-batch.
//! Their gradients are summed, so that all replicas make the same update.
//!
//! This is the interface between a pipeline and the processes of its replicas.

use gpipe_core::StageId;
use tch::Tensor;

use super::PeerError;

/// The replicas of a pipeline, as a process of one replica sees them.
pub trait Replicas: Send + Sync + 'static {
    /// The index of this replica, from 0.
    fn index(&self) -> usize;

    /// The number of replicas.
    fn count(&self) -> usize;

    /// Connects a stage with the same stage of the other replicas. Every replica must call it for
    /// the stage.
    ///
    /// # Errors
    /// If another process does not join.
    fn stage(&self, stage: StageId) -> Result<Box<dyn Summing>, PeerError>;

    /// Sends `own` to the process of each replica that has the same stages, and waits for theirs.
    /// Returns all of them by replica.
    ///
    /// # Errors
    /// If another process failed or is gone.
    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError>;
}

/// All-reduces and broadcasts of one stage's tensors over the replicas. All replicas begin the same
/// operations in the same order.
pub trait Summing: Send {
    /// Begins to sum `tensor` with those of the other replicas. `tensor` is contiguous and on the
    /// CPU.
    ///
    /// # Errors
    /// If the connection is lost.
    fn begin(&mut self, tensor: Tensor) -> Result<(), PeerError>;

    /// Begins to broadcast the tensor of replica `from` into `tensor` of the other replicas.
    ///
    /// `tensor` is contiguous, on the CPU, and of the same size and dtype in all replicas.
    ///
    /// # Errors
    /// The connection is lost.
    fn begin_broadcast(&mut self, tensor: Tensor, from: usize) -> Result<(), PeerError>;

    /// Waits for the oldest all-reduce or broadcast in flight, and returns its tensor.
    ///
    /// # Errors
    /// If another replica failed, is gone, or does not join.
    fn end(&mut self) -> Result<Tensor, PeerError>;
}
