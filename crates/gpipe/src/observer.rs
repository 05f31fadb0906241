//! Observers: code that is called as stages work, on their threads.
//!
//! ```
//! use gpipe::{LayerError, LayerEvent, Observer, Pass, When};
//!
//! /// Fails the step if an output of a layer is too large.
//! struct Bound(f64);
//!
//! impl Observer for Bound {
//!     fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
//!         if (event.pass, event.when) != (Pass::Forward, When::Before) {
//!             for output in event.tensors.iter().flatten() {
//!                 if output.f_abs()?.f_max()?.f_double_value(&[])? > self.0 {
//!                     return Err(LayerError::Value("a value is too large".into()));
//!                 }
//!             }
//!         }
//!         Ok(())
//!     }
//! }
//! ```

use std::ops::Range;

use gpipe_core::{Action, Bytes, Nanos, lower::Part};
use tch::Tensor;

use crate::{error::LayerError, spec::is_float};

/// Code that is called as stages work, on the threads of the stages.
///
/// - It may fail the step. Its error is that of the action, with the name of the layer, and nothing
///   is updated. At the end of the action UPDATE and of the step it is too late for that: the
///   update is then reported as torn.
/// - It must not change the tensors that it is shown. A change is an error.
/// - Without observers nothing of this costs time. With them, on a GPU each layer waits for its
///   kernels, so that times and bytes are true.
/// - It is called in every kind of run: training, evaluation, prediction and decoding. A pipeline
///   in a single process runs a step again after a NaN, to find its layer: that is observed, too.
/// - With several processes, each observes its own stages.
/// - The memory that it allocates counts as the stage's. So does its time, in the times of actions.
/// - It must not wait for another stage's thread: the step may then exceed its deadline and fail.
pub trait Observer: Send + Sync + 'static {
    /// A stage begins or ends a step, or a part of one.
    ///
    /// # Errors
    /// Fails the step.
    fn step(&self, event: &StepEvent) -> Result<(), LayerError> {
        let _ = event;
        Ok(())
    }

    /// A stage begins or ends an action.
    ///
    /// # Errors
    /// Fails the step.
    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        let _ = event;
        Ok(())
    }

    /// A layer begins or ends a pass. The losses count as a layer named `loss`, after the last one:
    /// its [`LayerEvent::index`] is the number of layers. A loss with parameters or skips also adds
    /// a layer of that name.
    ///
    /// # Errors
    /// Fails the step.
    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let _ = event;
        Ok(())
    }
}

/// When an observer is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Before the work.
    Before,
    /// After the work, which took this long.
    After(Nanos),
}

/// A stage begins or ends a step.
#[derive(Debug, Clone, Copy)]
pub struct StepEvent {
    /// The stage.
    pub stage: usize,
    /// Number of updates before this step.
    pub step: u64,
    /// The part of a training step that runs, or [`Part::Inference`].
    pub part: Part,
    /// Before or after.
    pub when: When,
}

/// A stage begins or ends an action.
#[derive(Debug, Clone, Copy)]
pub struct ActionEvent {
    /// The action. It names its stage.
    pub action: Action,
    /// Before or after. The time of a receive or a send includes the wait.
    pub when: When,
    /// Memory of the stage's device.
    pub memory: DeviceMemory,
}

/// Memory of a stage's device, at an event. 0 where it is not counted: on CPUs without the feature
/// `allocator`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceMemory {
    /// Bytes of tensors that it holds now.
    pub live: Bytes,
    /// The most bytes that it has held since the action event or layer event before this one; since
    /// the step began, where several devices of a pipeline are the same GPU.
    pub peak: Bytes,
}

/// What a layer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The first forward.
    Forward,
    /// A forward that recomputes discarded activations.
    Recompute,
    /// A whole backward.
    Backward,
    /// The first half of a split backward.
    BackwardInput,
    /// The second half of a split backward.
    BackwardWeight,
}

/// A layer begins or ends a pass.
#[derive(Debug)]
pub struct LayerEvent<'a> {
    /// The stage.
    pub stage: usize,
    /// The layer's name.
    pub layer: &'a str,
    /// The layer's position in the sequence. That of the loss is the number of layers.
    pub index: usize,
    /// Number of updates before this step.
    pub step: u64,
    /// The micro-batch.
    pub micro_batch: usize,
    /// The samples of the micro-batch, counted within the mini-batch.
    pub samples: Range<usize>,
    /// What the layer does.
    pub pass: Pass,
    /// Whether the forward keeps its activations for the backward, so that nothing is recomputed.
    /// True or false in `Forward`, `Backward` and `BackwardInput`; always false in `Recompute` and
    /// `BackwardWeight`.
    pub keeps: bool,
    /// Before or after.
    pub when: When,
    /// Memory of the stage's device.
    pub memory: DeviceMemory,
    /// Before a forward the inputs, after it the outputs. Before a backward the gradients of the
    /// outputs, after it those of the inputs; `None` where there is none. They are in the layer's
    /// dtype, and in float16 scaled with the loss. Empty in a second half.
    pub tensors: Vec<Option<&'a Tensor>>,
    /// After a backward: the layer's parameters by name, with the sums of their gradients over the
    /// micro-batches so far. A first half has summed only some of them.
    pub parameter_gradients: Vec<(&'a str, &'a Tensor)>,
    /// Whether this is the loss, and no layer of its name.
    pub(crate) is_loss: bool,
}

/// Names the first layer with a value that is not finite. Used for the second run after a failure.
pub(crate) struct FiniteCheck;

impl Observer for FiniteCheck {
    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let forward = matches!(event.pass, Pass::Forward | Pass::Recompute);
        let what = match (forward, event.when) {
            (true, When::Before) => "its input",
            (true, When::After(_)) => "its output",
            // The layer above has been checked.
            (false, When::Before) => return Ok(()),
            (false, When::After(_)) => "the gradient of its input",
        };
        // The stage checks the value of the loss itself, and says it.
        if !(forward && event.is_loss) {
            check_finite(what, event.tensors.iter().flatten().copied())?;
        }
        let sums = event.parameter_gradients.iter().map(|(_, sum)| *sum);
        check_finite("the gradient of its parameters", sums)
    }
}

/// The name of the loss among layers.
pub(crate) const LOSS: &str = "loss";

fn check_finite<'t>(
    what: &str,
    tensors: impl IntoIterator<Item = &'t Tensor>,
) -> Result<(), LayerError> {
    for tensor in tensors.into_iter().filter(|tensor| is_float(tensor.kind())) {
        if tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Err(LayerError::NotFinite(what.to_owned()));
        }
    }
    Ok(())
}
