//! Exceptions of Python's code on their way through the engine, and the engine's errors as
//! exceptions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpipe::{Error, LayerError};
use pyo3::{prelude::*, types::PyType};

/// The exceptions of modules and losses in the current call. The engine carries errors of its own;
/// this keeps what Python raised. Several stages may fail at once, and the engine reports one.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Vec<Kept>>>);

/// An exception, and by what the engine's error for it is known.
struct Kept {
    from: Raised,
    /// The text of the engine's error.
    text: String,
    exception: PyErr,
}

/// What raised an exception.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Raised {
    /// The layer of that name.
    Layer(String),
    /// The loss, in a step.
    Loss,
    /// The loss, as it counts a mini-batch before anything runs.
    Count,
}

impl Failure {
    /// A number that no other pipeline has while this one lives.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Keeps `exception`. Returns it as an error of the engine.
    pub(crate) fn keep(&self, py: Python<'_>, from: Raised, exception: PyErr) -> LayerError {
        if let Some(refusal) = gpipe_bridge::memory::take_refusal() {
            // PyTorch's own exception knows neither the stage nor the cap.
            return LayerError::OutOfMemory(refusal);
        }
        let text = exception.value(py).to_string();
        let kind = exception.get_type(py).name().map_or_else(|_| String::new(), |n| n.to_string());
        let text = format!("{kind}: {text}");
        self.all().push(Kept { from, text: text.clone(), exception });
        LayerError::Value(text)
    }

    /// Keeps the exception that a backward left on this thread, if there is one. `error` is the
    /// engine's.
    pub(crate) fn keep_pending(&self, py: Python<'_>, from: Raised, error: &LayerError) {
        let is_memory = matches!(error, LayerError::OutOfMemory(_) | LayerError::GpuOutOfMemory(_));
        if let Some(exception) = PyErr::take(py).filter(|_| !is_memory) {
            self.all().push(Kept { from, text: error.to_string(), exception });
        }
    }

    /// Forgets the exceptions of an earlier call.
    pub(crate) fn clear(&self) {
        self.all().clear();
    }

    /// Takes the exception behind the engine's `error`, if there is one, and forgets the others.
    fn take(&self, error: &Error) -> Option<Kept> {
        let mut all = std::mem::take(&mut *self.all());
        let (layer, text) = (error.layer(), error.to_string());
        let of_layer =
            |own: &Kept| matches!(&own.from, Raised::Layer(name) if Some(&**name) == layer);
        let of_text = |own: &Kept| text.contains(&own.text);
        let of_the_engine = error.is_out_of_memory() || error.is_not_finite() || error.is_timeout();
        let found = all.iter().position(|own| of_layer(own) && of_text(own));
        let found = found.or_else(|| all.iter().position(of_text));
        // The text of an error that came a long way may be another one.
        let any = || (!of_the_engine && !all.is_empty()).then_some(0);
        let found = found.or_else(any)?;
        Some(all.swap_remove(found))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The exception for an error of the engine: what the module raised, with a note of where, or one
/// of `gpipe.errors`.
pub(crate) fn exception(py: Python<'_>, error: &Error, failure: &Failure) -> PyErr {
    let text = error.to_string();
    let Some(Kept { from, exception: own, .. }) = failure.take(error) else {
        return raised(py, class(error), &text);
    };
    let told = own.value(py).to_string();
    let note = match (place(error), from) {
        (Some(place), _) => format!("gpipe: {place}; nothing was updated"),
        (None, Raised::Count) => "gpipe: the loss, counting the targets; nothing has run".into(),
        (None, _) => match text.strip_suffix(&told).filter(|_| !told.is_empty()) {
            Some(before) => format!("gpipe: {before}see above"),
            None => format!("gpipe: {text}"),
        },
    };
    let add = |note: &str| drop(own.value(py).call_method1("add_note", (note,)));
    add(&note);
    if told.contains("leaf Variable that requires grad is being used in an in-place") {
        add("gpipe: the layer's forward changes its input or a parameter in place: use the form \
             that makes a new tensor");
    }
    if told.contains("must have the same dtype") {
        add("gpipe: inputs are converted to bfloat16 and float16 only: for float64, convert them \
             with .double()");
    }
    own
}

/// Layer, stage, micro-batch and pass of a failed step.
fn place(error: &Error) -> Option<String> {
    let layer = error.layer().map(|layer| format!("layer '{layer}'"));
    let action = error.action();
    let at = action.map(|action| match action.op.computes() {
        Some(m) => format!("stage {}, micro-batch {m} ({action})", action.stage),
        None => format!("stage {} ({action})", action.stage),
    });
    match (layer, at) {
        (None, None) => None,
        (layer, at) => Some([layer, at].into_iter().flatten().collect::<Vec<_>>().join(", ")),
    }
}

/// The class in `gpipe.errors`.
fn class(error: &Error) -> &'static str {
    match error {
        _ if error.is_out_of_memory() => "OutOfMemoryError",
        _ if error.is_not_finite() => "NotFiniteError",
        _ if error.is_timeout() => "TimedOutError",
        _ if error.is_of_a_peer() => "PeerError",
        Error::Step { .. } | Error::Torch(_) => "StepError",
        Error::State(_) => "CheckpointError",
        Error::Model { .. } => "ModelError",
        _ => "SettingError",
    }
}

/// An exception of `gpipe.errors`.
pub(crate) fn raised(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let found = py.import("gpipe.errors").and_then(|errors| errors.getattr(class));
    match found.and_then(|class| Ok(class.downcast_into::<PyType>()?)) {
        Ok(class) => PyErr::from_type(class, text.to_owned()),
        Err(error) => error,
    }
}
