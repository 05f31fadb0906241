//! The seam between runtime and stages. The runtime handles order, threads, waits and failures; the
//! stage behind the seam handles tensors.

use std::time::Instant;

use gpipe_core::{Action, Bytes, EdgeId, LayerId, MicroBatch, Nanos, StageId, Transfer};

/// A value that moves between stages. The runtime knows only its size.
pub trait Payload: Send + 'static {
    /// The size of the value.
    fn bytes(&self) -> Bytes;
}

/// Values with the edges on which they arrive or leave, in edge order.
pub type OnEdges<V> = Vec<(EdgeId, V)>;

/// What a forward must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: no backward follows.
    Nothing,
    /// The stage's inputs: a re-materialization precedes the backward.
    Inputs,
    /// The activations: the backward follows without a re-materialization.
    Activations,
}

/// A stage's part of the global gradient norm: squared norms by layer, in layer order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Vote {
    /// Each layer's sum of squares, in float64 whatever the gradients' dtype.
    pub squares: Vec<(LayerId, f64)>,
}

/// The decision on the update, applied by all stages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Whether to apply the update; otherwise everything stays unchanged.
    pub apply: bool,
    /// The global gradient norm, before clipping.
    pub norm: f64,
    /// Factor for every gradient: 1, or less when the norm is clipped.
    pub scale: f64,
}

/// How far a device is with the actions that have returned. A CPU has done them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Actions that have returned and that the device has not done.
    pub open: usize,
    /// Whether the oldest of them waits for a value of another stage.
    pub waits: bool,
}

/// When a device began and ended an action.
pub type Span = (Instant, Instant);

/// One stage. The runtime calls its methods from one thread, in this order:
///
/// 1. `begin`
/// 2. per micro-batch, in the program's order: `forward`, `rematerialize` and `backward`, or the
///    two halves `backward_input` and, later, `backward_weight`
/// 3. `tied`, `reduce`, `accept`, `norm`, `decide` and `update`, once
/// 4. `finish`
///
/// A program may be a part of a step ([`gpipe_core::lower::Part`]). It has `begin`, the calls of
/// its phases, and `finish`; the stage keeps what later parts need.
///
/// An action may return before its work is done. The device then does the work in the order of the
/// calls, and the runtime asks for its [`progress`](StageExecutor::progress). All stages of a device
/// answer for the device.
///
/// After any error the runtime calls `abort`, which discards everything that the program made.
pub trait StageExecutor: 'static {
    /// The values that move on edges.
    type Value: Payload;
    /// What the driver passes to each stage for a step: inputs, targets, sizes, the loss
    /// denominator, the mode.
    type Feed: Send + 'static;
    /// What a stage returns after a step: losses, outputs, measurements.
    type Outcome: Send + 'static;
    /// The stage's errors.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The stage's position in the pipeline.
    fn stage(&self) -> StageId;

    /// Called before every action of this stage, to switch to the stage's resources, and for fault
    /// injection in tests.
    fn before(&mut self, action: Action) -> Result<(), Self::Error> {
        let _ = action;
        Ok(())
    }

    /// Called after every action of this stage, with the time that it took.
    fn after(&mut self, action: Action, time: Nanos) -> Result<(), Self::Error> {
        let _ = (action, time);
        Ok(())
    }

    /// Starts a step.
    fn begin(&mut self, feed: Self::Feed) -> Result<(), Self::Error>;

    /// Computes the outputs of `micro_batch` for every edge that leaves the stage.
    fn forward(
        &mut self,
        micro_batch: MicroBatch,
        inputs: OnEdges<Self::Value>,
        keep: Keep,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// Recomputes what the forward of `micro_batch` discarded.
    fn rematerialize(&mut self, micro_batch: MicroBatch) -> Result<(), Self::Error>;

    /// Computes the input gradients from the output gradients, adds the parameter gradients to the
    /// step's accumulators, and releases what `micro_batch` held.
    fn backward(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// The first half of a backward: computes the input gradients from the output gradients, and
    /// keeps what the second half needs.
    fn backward_input(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// The second half of a backward: adds the parameter gradients to the step's accumulators, and
    /// releases what `micro_batch` held.
    fn backward_weight(&mut self, micro_batch: MicroBatch) -> Result<(), Self::Error>;

    /// This stage's gradients of tied weights that the stage at the other end of `edge` owns.
    fn tied(&mut self, edge: EdgeId) -> Result<Self::Value, Self::Error>;

    /// Sums the gradients of the tied weights that this stage owns: its own gradients and those in
    /// `arrived`, in layer order. Returns the sums for every edge on which gradients arrived.
    fn reduce(
        &mut self,
        arrived: OnEdges<Self::Value>,
    ) -> Result<OnEdges<Self::Value>, Self::Error>;

    /// Receives the sums of this stage's gradients of the tied weights that the stage at the other
    /// end of `edge` owns.
    fn accept(&mut self, edge: EdgeId, sums: Self::Value) -> Result<(), Self::Error>;

    /// Prepares the update (everything that can fail), and returns this stage's part of the norm.
    fn norm(&mut self) -> Result<Vote, Self::Error>;

    /// Decides on the update for all stages. Called on stage 0 only, with every stage's part of the
    /// norm, in stage order.
    fn decide(&mut self, votes: &[Vote]) -> Result<Verdict, Self::Error>;

    /// Applies or drops the update that `norm` prepared.
    fn update(&mut self, verdict: Verdict) -> Result<(), Self::Error>;

    /// The action that the last error belongs to, if the stage found it later, in another one.
    fn failed(&self) -> Option<Action> {
        None
    }

    /// Whether `action` waits for the device before it returns. The runtime then waits for the
    /// earlier ones before it calls, so that a wait for another stage is not taken for work.
    fn waits(&self, action: Action) -> bool {
        let _ = action;
        false
    }

    /// How far the device is. It does not wait.
    fn progress(&mut self) -> Result<Progress, Self::Error> {
        Ok(Progress::default())
    }

    /// Whether the stage may be called with `value`, which has arrived by `transfer`. It does not
    /// wait.
    fn is_ready(&mut self, transfer: Transfer, value: &Self::Value) -> Result<bool, Self::Error> {
        let _ = (transfer, value);
        Ok(true)
    }

    /// Called once for each device when nothing is open any more, before `finish`. Returns when the
    /// device began and ended each action, sends and receives left out. Empty if every action
    /// did its work before it returned.
    fn spans(&mut self) -> Result<Vec<Span>, Self::Error> {
        Ok(Vec::new())
    }

    /// Completes the step, or its part.
    fn finish(&mut self) -> Result<Self::Outcome, Self::Error>;

    /// Discards a failed step. Parameters and optimizer state stay as before the step.
    fn abort(&mut self);
}
