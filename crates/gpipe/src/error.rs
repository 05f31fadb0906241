//! Errors as values: what, where, and the remedy.

use gpipe_bridge::memory::Refusal;
use gpipe_core::{Action, Bytes, lower::LowerError, partition::PartitionError, validate::Invalid};
use gpipe_runtime::StepError;

/// The result of a pipeline's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// What a layer or a loss may fail with. The stage adds the layer's name, its own and the
/// micro-batch.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// Shapes or dtypes that do not fit, with both sides.
    #[error("{0}")]
    Shape(String),
    /// Values that the layer cannot take.
    #[error("{0}")]
    Value(String),
    /// A forward that changed this parameter of its layer in place.
    #[error(
        "its forward changed its parameter '{0}' in place: use the form that makes a new tensor; \
        the change cannot be undone, restore a checkpoint"
    )]
    ParameterChanged(String),
    /// The layer's code panicked.
    #[error("its code panicked: {0}")]
    Panic(String),
    /// An error of libtorch.
    #[error("libtorch: {}", first_line(.0))]
    Torch(String),
    /// A GPU without enough memory left.
    #[error("out of memory on the GPU: re-materialize more, or use more stages or micro-batches \
        ({})", first_line(.0))]
    GpuOutOfMemory(String),
    /// An allocation over the cap, or over what the system has.
    #[error("out of memory: {} asked for, {} held{}", Bytes(.0.requested), Bytes(.0.live), cap_and_remedy(.0))]
    OutOfMemory(Refusal),
}

fn first_line(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("unknown error")
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
    /// An error of libtorch, or the refused allocation behind it.
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
        Self::torch(error.0)
    }
}

/// What a stage fails with: a [`LayerError`] and where it was.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// In a layer.
    #[error("layer '{layer}': {source}")]
    Layer {
        /// Its name.
        layer: String,
        /// What happened.
        source: LayerError,
    },
    /// In the stage's own work: gradients, tied weights, the update.
    #[error("{what}: {source}")]
    Own {
        /// Which work.
        what: &'static str,
        /// What happened.
        source: LayerError,
    },
    /// A value that is not a finite number.
    #[error(
        "layer '{layer}': {what} is not finite (NaN or infinite): look at the data and the \
        learning rate; nothing was updated"
    )]
    NotFinite {
        /// The layer's name.
        layer: String,
        /// Its input, its output, its gradient.
        what: String,
    },
}

/// What goes wrong when building or using a pipeline.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model that does not fit together; found when it is built, or before a step with other
    /// shapes.
    #[error("layer '{layer}' ({kind}): {reason}")]
    Model {
        /// The layer's name.
        layer: String,
        /// The layer's kind.
        kind: String,
        /// What does not fit.
        reason: String,
    },
    /// A setting, with the remedy.
    #[error("{0}")]
    Setting(String),
    /// Cuts that do not fit the model.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// A schedule that cannot be lowered.
    #[error("schedule: {0}")]
    Lower(#[from] LowerError),
    /// A schedule that would be incorrect or would deadlock.
    #[error("schedule: {0}")]
    Schedule(#[from] Invalid),
    /// A mini-batch that the pipeline cannot take.
    #[error("input: {0}")]
    Input(String),
    /// A state that does not fit the pipeline that it was to be put into.
    #[error("state: {0}")]
    State(String),
    /// An error of libtorch outside any stage.
    #[error("{0}")]
    Torch(#[from] LayerError),
    /// Another process of the pipeline, or of another replica of it, failed or is gone.
    #[error(transparent)]
    Peer(#[from] gpipe_runtime::PeerError),
    /// The loss or the gradient norm of the whole mini-batch is not finite, though no stage said
    /// so.
    #[error(
        "{what} is not finite (NaN or infinite): look at the data and the learning rate; nothing \
        was updated"
    )]
    NotFinite {
        /// The loss or the norm, with its value.
        what: String,
    },
    /// A step that failed. Parameters and optimizer state are as before it.
    #[error("{}{error}", place(error))]
    Step {
        /// What happened, and in which action.
        #[source]
        error: StepError<StageError>,
    },
}

/// "stage 1, micro-batch 3: " where the failure happened in a compute action.
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
    /// Whether a stage went over its memory cap, or its device had no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        self.layer_error().is_some_and(|error| {
            matches!(error, LayerError::OutOfMemory(_) | LayerError::GpuOutOfMemory(_))
        })
    }

    /// Whether a forward changed its layer's parameters for good.
    pub(crate) fn has_changed_parameters(&self) -> bool {
        self.layer_error().is_some_and(|error| matches!(error, LayerError::ParameterChanged(_)))
    }

    /// What a stage failed with, in a step or while it was built.
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

    /// Whether a value was not a finite number: the data or the learning rate, and not the machine,
    /// is to blame, and the next mini-batch may pass.
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
