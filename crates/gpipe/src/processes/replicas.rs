//! Replicas of a pipeline: the same stages, each time on other samples of the mini-batch. Their
//! gradients are summed, so that all of them make the same update.
//!
//! This is the seam: what a pipeline asks of the processes that have its replicas.

use gpipe_core::StageId;
use tch::Tensor;

use super::PeerError;

/// The replicas of a pipeline, as a process of one of them sees them.
pub trait Replicas: Send + Sync + 'static {
    /// The number of this replica, from 0.
    fn index(&self) -> usize;

    /// How many there are.
    fn count(&self) -> usize;

    /// Connects a stage with the same stage of the other replicas, for which each of them calls
    /// this.
    ///
    /// # Errors
    /// Another process does not come.
    fn stage(&self, stage: StageId) -> Result<Box<dyn Summing>, PeerError>;

    /// Gives `own` to the process of each replica that has the same stages, and waits for theirs;
    /// by replica.
    ///
    /// # Errors
    /// Another process failed or is gone.
    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError>;
}

/// Sums of one stage over all replicas. All of them begin the same sums in the same order.
pub trait Summing: Send {
    /// Begins to sum `tensor`, which is contiguous and on the CPU, with those of the other
    /// replicas.
    ///
    /// # Errors
    /// The connection is lost.
    fn begin(&mut self, tensor: Tensor) -> Result<(), PeerError>;

    /// The oldest sum that has begun and not ended, once it is there.
    ///
    /// # Errors
    /// Another replica failed, is gone, or does not come.
    fn end(&mut self) -> Result<Tensor, PeerError>;
}
