//! The seam: a stage as something that reacts to actions. Order, threads, waiting and failing are
//! in front of it; tensors are behind it.

use gpipe_core::{Action, Bytes, EdgeId, LayerId, MicroBatch, StageId};

/// A value that moves between stages; opaque but for its size.
pub trait Payload: Send + 'static {
    /// Its size.
    fn bytes(&self) -> Bytes;
}

/// Values with the edges they arrived on or leave by, in the edges' order.
pub type OnEdges<V> = Vec<(EdgeId, V)>;

/// What a forward must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: no backward will follow.
    Nothing,
    /// Its inputs: a re-materialization comes before the backward.
    Inputs,
    /// Its activations: the backward follows without a re-materialization.
    Activations,
}

/// A stage's part of the global gradient norm: squared norms by layer, in layer order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Vote {
    /// Each layer's sum of squares. Float64, whatever the gradients are.
    pub squares: Vec<(LayerId, f64)>,
}

/// What all stages do with the update that they made ready.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Apply it, or leave everything as it was.
    pub apply: bool,
    /// The global gradient norm, before clipping.
    pub norm: f64,
    /// What every gradient is multiplied by: 1, or less when the norm is clipped.
    pub scale: f64,
}

/// One stage. The runtime calls, in one thread: `begin`; then, as its program says, `forward`,
/// `rematerialize` and `backward` (or its halves `backward_input` and, later, `backward_weight`)
/// per micro-batch; then `tied`, `reduce`, `norm`, `decide` and `update` once; then `finish`. After
/// any error, `abort`.
///
/// All gradients that a step adds up belong to the step: `begin` and `abort` forget them.
pub trait StageExecutor: 'static {
    /// What moves on the edges.
    type Value: Payload;
    /// What the driver gives each stage for a step: inputs, targets, sizes, the loss denominator,
    /// the mode.
    type Feed: Send + 'static;
    /// What a stage gives back after a step: losses, outputs, measurements.
    type Outcome: Send + 'static;
    /// Its errors.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Its position in the pipeline.
    fn stage(&self) -> StageId;

    /// Called before every action of this stage. For switching to the stage's resources, and for
    /// faults in tests.
    fn before(&mut self, action: Action) -> Result<(), Self::Error> {
        let _ = action;
        Ok(())
    }

    /// A step starts.
    fn begin(&mut self, feed: Self::Feed) -> Result<(), Self::Error>;

    /// Computes the outputs of `micro_batch` for every edge out of the stage.
    fn forward(
        &mut self,
        micro_batch: MicroBatch,
        inputs: OnEdges<Self::Value>,
        keep: Keep,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// Recomputes what the forward of `micro_batch` discarded.
    fn rematerialize(&mut self, micro_batch: MicroBatch) -> Result<(), Self::Error>;

    /// From the gradients of its outputs, computes those of its inputs, adds those of its
    /// parameters to the step's, and releases what `micro_batch` held.
    fn backward(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// The first half of a backward: from the gradients of its outputs, computes those of its
    /// inputs, and keeps what the second half needs.
    fn backward_input(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// The second half: adds the gradients of its parameters to the step's, and releases what
    /// `micro_batch` held.
    fn backward_weight(&mut self, micro_batch: MicroBatch) -> Result<(), Self::Error>;

    /// This stage's gradients of the tied weights that the stage at the other end of `edge` owns.
    fn tied(&mut self, edge: EdgeId) -> Result<Self::Value, Self::Error>;

    /// Sums the gradients of the tied weights that this stage owns, its own and those that arrived,
    /// in layer order; returns the sums for every edge they came on.
    fn reduce(
        &mut self,
        arrived: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// Takes the sums of tied gradients, makes the update ready (all that can fail), and returns
    /// this stage's part of the norm.
    fn norm(&mut self, sums: OnEdges<Self::Value>) -> Result<Vote, Self::Error>;

    /// On stage 0: decides for all, from every stage's part, in stage order (its own first).
    fn decide(&mut self, votes: &[Vote]) -> Result<Verdict, Self::Error>;

    /// Applies the update that `norm` made ready, or drops it.
    fn update(&mut self, verdict: Verdict) -> Result<(), Self::Error>;

    /// The step is complete.
    fn finish(&mut self) -> Result<Self::Outcome, Self::Error>;

    /// The step failed: forget all of it. Parameters and optimizer state are as before the step.
    fn abort(&mut self);
}
