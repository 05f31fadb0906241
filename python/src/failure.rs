//! Exceptions of Python's code on their way through the engine, and the engine's errors as
//! exceptions.

use std::sync::{Arc, Mutex, PoisonError};

use gpipe::{Error, LayerError};
use pyo3::{prelude::*, types::PyType};

/// The first exception of a module or loss in the current call. The engine carries errors of its
/// own; this keeps the exception that Python raised.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<PyErr>>>);

impl Failure {
    /// Keeps `exception` if it is the first. Returns it as an error of the engine.
    pub(crate) fn keep(&self, py: Python<'_>, exception: PyErr) -> LayerError {
        if let Some(refusal) = gpipe_bridge::memory::take_refusal() {
            // PyTorch's own exception knows neither the stage nor the cap.
            return LayerError::OutOfMemory(refusal);
        }
        let text = exception.value(py).to_string();
        let kind = exception.get_type(py).name().map_or_else(|_| String::new(), |n| n.to_string());
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_none() {
            *first = Some(exception);
        }
        LayerError::Value(format!("{kind}: {text}"))
    }

    /// Keeps the exception that a backward left on this thread, if there is one.
    pub(crate) fn keep_pending(&self, py: Python<'_>) {
        if let Some(exception) = PyErr::take(py) {
            self.keep(py, exception);
        }
    }

    /// Takes the exception, if there is one.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The exception for an error of the engine: what the module raised, with a note of where, or one
/// of `gpipe.errors`.
pub(crate) fn exception(py: Python<'_>, error: &Error, failure: &Failure) -> PyErr {
    let text = error.to_string();
    match failure.take() {
        Some(own) => {
            let note = match place(error) {
                Some(place) => format!("gpipe: {place}; nothing was updated"),
                None => format!("gpipe: {text}"),
            };
            let told = own.value(py).to_string();
            let note = note.replace(&told, "see above");
            let _ = own.value(py).call_method1("add_note", (note,));
            if told.contains("leaf Variable that requires grad is being used in an in-place") {
                let remedy = "gpipe: the layer's forward changes its input in place: use the form \
                              that makes a new tensor";
                let _ = own.value(py).call_method1("add_note", (remedy,));
            }
            own
        }
        None => raised(py, class(error), &text),
    }
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
        _ if error.is_deadline() => "DeadlineError",
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
