//! Error types. Each error says what is wrong, where, and the remedy.

use gpipe_bridge::memory::Refusal;
use gpipe_core::{Action, Bytes, lower::LowerError, partition::PartitionError, validate::Invalid};
use gpipe_runtime::StepError;

/// The result of a pipeline's calls. It takes another error, too, so that `use gpipe::*` does not
/// hide the standard one.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a layer or a loss. The stage adds the names of the layer and the stage, and the
/// micro-batch.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// Shapes or dtypes do not fit; the message names both sides.
    #[error("{0}")]
    Shape(String),
    /// The layer cannot take these values.
    #[error("{0}")]
    Value(String),
    /// The layer's forward changed this parameter in place.
    #[error(
        "its forward changed its parameter '{0}' in place: use the form that makes a new tensor; \
        the change cannot be undone, restore a checkpoint"
    )]
    ParameterChanged(String),
    /// The layer's code panicked.
    #[error("its code panicked: {}", without_callers(.0))]
    Panic(String),
    /// A value is NaN or infinite; the text says which.
    #[error("{0} is not finite (NaN or infinite)")]
    NotFinite(String),
    /// The caller interrupted the step ([`Interrupt`](crate::Interrupt)).
    #[error("the step was interrupted; nothing was updated")]
    Interrupted,
    /// libtorch failed.
    #[error("libtorch: {}", first_line(.0))]
    Torch(String),
    /// The GPU has no memory left.
    #[error("out of memory on the GPU: re-materialize more, or use more stages or micro-batches \
        ({})", first_line(.0))]
    GpuOutOfMemory(String),
    /// An allocation exceeds the cap, or the memory of the system.
    #[error(
        "out of memory: {} asked for, {} held{}",
        Bytes(.0.requested), Bytes(.0.live), cap_and_remedy(.0)
    )]
    OutOfMemory(Refusal),
    /// The parameters of a layer exceed the cap, or the memory of the system, while a stage is
    /// built.
    #[error(
        "out of memory for its parameters: {} asked for, {} held{}",
        Bytes(.0.requested), Bytes(.0.live), cap_and_remedy_of_parameters(.0)
    )]
    ParametersOutOfMemory(Refusal),
}

/// Neither re-materialization nor micro-batches make parameters smaller.
fn cap_and_remedy_of_parameters(refusal: &Refusal) -> String {
    match refusal.cap {
        Some(cap) => format!(", cap {}: raise the cap, or use more stages", Bytes(cap)),
        None => " and the system has no more: use more stages".into(),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("unknown error")
}

/// The text of a panic without libtorch's list of callers.
fn without_callers(text: &str) -> &str {
    // Of a panic of tch, the list is inside a quoted text.
    let end = ["\\nException raised from", "\nException raised from"];
    end.iter().filter_map(|end| text.split_once(end)).map(|(text, _)| text).next().unwrap_or(text)
}

fn cap_and_remedy(refusal: &Refusal) -> String {
    match refusal.cap {
        Some(cap) => format!(
            ", cap {}: raise the cap, re-materialize more, or use more stages or micro-batches",
            Bytes(cap)
        ),
        None => " and the system has no more: use more stages or micro-batches".into(),
    }
}

impl LayerError {
    /// An out-of-memory error if an allocation was refused, else an error of libtorch.
    fn torch(text: String) -> Self {
        match gpipe_bridge::memory::take_refusal() {
            Some(refusal) => Self::OutOfMemory(refusal),
            None if text.contains("CUDA out of memory") => Self::GpuOutOfMemory(text),
            None => Self::Torch(text),
        }
    }
}

impl From<tch::TchError> for LayerError {
    fn from(error: tch::TchError) -> Self {
        match error {
            tch::TchError::Torch(text) => Self::torch(text),
            other => Self::torch(other.to_string()),
        }
    }
}

impl From<gpipe_bridge::Error> for LayerError {
    fn from(error: gpipe_bridge::Error) -> Self {
        let own = gpipe_bridge::custom::failure(&error).map(|reason| Self::Value(reason.into()));
        match (own, gpipe_bridge::memory::take_refusal()) {
            (_, Some(refusal)) => Self::OutOfMemory(refusal),
            (Some(own), None) => own,
            (None, None) => Self::torch(error.0),
        }
    }
}

/// An error of a stage: a [`LayerError`] and where it occurred.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// A layer failed.
    #[error("layer '{layer}': {source}")]
    Layer {
        /// The layer's name.
        layer: String,
        /// The cause.
        source: LayerError,
    },
    /// The stage itself failed, outside its layers: gradients, tied weights, the update.
    #[error("{what}: {source}")]
    Own {
        /// The operation that failed.
        what: &'static str,
        /// The cause.
        source: LayerError,
    },
    /// A value is NaN or infinite.
    #[error(
        "layer '{layer}': {what} is not finite (NaN or infinite): look at the data and the \
        learning rate; nothing was updated"
    )]
    NotFinite {
        /// The layer's name.
        layer: String,
        /// Which value: the layer's input, its output, or a gradient.
        what: String,
    },
}

/// An error from building or using a pipeline.
///
/// `Debug` prints what `Display` does: it is what a program prints whose `main` returns the error.
#[derive(thiserror::Error)]
pub enum Error {
    /// The model does not fit together. Found when the pipeline is built, or before a step whose
    /// shapes are new.
    #[error("layer '{layer}' ({kind}): {reason}")]
    Model {
        /// The layer's name.
        layer: String,
        /// The layer's kind.
        kind: String,
        /// What does not fit.
        reason: String,
    },
    /// A setting is invalid; the message names the remedy.
    #[error("{0}")]
    Setting(String),
    /// The cuts do not fit the model.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The schedule cannot be lowered.
    #[error("schedule: {0}")]
    Lower(#[from] LowerError),
    /// The schedule would be incorrect or would deadlock.
    #[error("schedule: {0}")]
    Schedule(#[from] Invalid),
    /// The pipeline cannot take this mini-batch.
    #[error("input: {0}")]
    Input(String),
    /// The state does not fit this pipeline.
    #[error("state: {0}")]
    State(String),
    /// libtorch failed outside any stage.
    #[error("{0}")]
    Torch(#[from] LayerError),
    /// Another process of the pipeline, or of another replica, failed or is gone.
    #[error(transparent)]
    Peer(#[from] gpipe_runtime::PeerError),
    /// The loss or the gradient norm of the whole mini-batch is not finite, although no stage
    /// failed.
    #[error(
        "{what} is not finite (NaN or infinite): look at the data and the learning rate; nothing \
        was updated"
    )]
    NotFinite {
        /// The loss or the norm, with its value.
        what: String,
    },
    /// A step failed. Parameters and optimizer state are unchanged, except after a torn update or
    /// an in-place change: see
    /// [`Pipeline::accept_torn_update`](crate::Pipeline::accept_torn_update).
    #[error("{}{error}", place(error))]
    Step {
        /// The cause, and the action that failed.
        #[source]
        error: StepError<StageError>,
    },
}

/// The prefix "stage 1, micro-batch 3: ", for failures in a compute action.
fn place(error: &StepError<StageError>) -> String {
    let (StepError::Stage { action, .. } | StepError::Panic { action, .. }) = error else {
        return String::new();
    };
    place_of(*action)
}

fn place_of(action: Action) -> String {
    match action.op.computes() {
        Some(m) => format!("stage {}, micro-batch {m}: ", action.stage),
        None => format!("stage {}: ", action.stage),
    }
}

impl Error {
    /// Whether a stage exceeded its memory cap, or its device ran out of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.layer_error().is_some_and(|error| {
            matches!(
                error,
                LayerError::OutOfMemory(_)
                    | LayerError::ParametersOutOfMemory(_)
                    | LayerError::GpuOutOfMemory(_)
            )
        })
    }

    /// Whether a stage gave no sign of life, or made no progress, within the timeout.
    pub fn is_timeout(&self) -> bool {
        let Self::Step { error } = self else { return false };
        matches!(
            error,
            StepError::Deadline { .. } | StepError::Stuck { .. } | StepError::Standstill { .. }
        )
    }

    /// Whether another process of the pipeline failed, or does not answer.
    pub fn is_of_a_peer(&self) -> bool {
        matches!(self, Self::Peer(_) | Self::Step { error: StepError::Peer(_) })
    }

    /// Whether the caller interrupted the step ([`Interrupt`](crate::Interrupt)).
    pub fn is_interrupted(&self) -> bool {
        self.layer_error().is_some_and(|error| matches!(error, LayerError::Interrupted))
    }

    /// Whether a forward changed its layer's parameters. The change cannot be undone.
    pub(crate) fn has_changed_parameters(&self) -> bool {
        self.layer_error().is_some_and(|error| matches!(error, LayerError::ParameterChanged(_)))
    }

    /// The name of the layer that failed, in a step or while its stage was built.
    pub fn layer(&self) -> Option<&str> {
        match self {
            Self::Model { layer, .. } => Some(layer),
            Self::Step {
                error: StepError::Stage { source, .. } | StepError::Build { source, .. },
            } => match source {
                StageError::Layer { layer, .. } | StageError::NotFinite { layer, .. } => {
                    Some(layer)
                }
                StageError::Own { .. } => None,
            },
            _ => None,
        }
    }

    /// The action that failed, such as the backward of micro-batch 3 on stage 1.
    pub fn action(&self) -> Option<Action> {
        match self {
            Self::Step {
                error: StepError::Stage { action, .. } | StepError::Panic { action, .. },
            } => Some(*action),
            _ => None,
        }
    }

    /// The error of a stage, in a step or while it was built.
    fn layer_error(&self) -> Option<&LayerError> {
        let Self::Step { error } = self else { return None };
        let (StepError::Stage { source, .. } | StepError::Build { source, .. }) = error else {
            return None;
        };
        match source {
            StageError::Layer { source, .. } | StageError::Own { source, .. } => Some(source),
            StageError::NotFinite { .. } => None,
        }
    }

    /// Whether a value was NaN or infinite. The data or the learning rate is to blame, not the
    /// machine, so the next mini-batch may succeed.
    pub fn is_not_finite(&self) -> bool {
        match self {
            Self::NotFinite { .. } => true,
            Self::Step { error: StepError::Stage { source, .. } } => {
                matches!(source, StageError::NotFinite { .. })
            }
            _ => false,
        }
    }
}

impl From<StepError<StageError>> for Error {
    fn from(error: StepError<StageError>) -> Self {
        Error::Step { error }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Error::Torch(error.into())
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
