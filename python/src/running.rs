//! What a module's code can ask of the layer that runs it, on that layer's thread.

use gpipe::{Forward, LayerError, Random, layers::BatchNorm};
use gpipe_bridge::random::Scope;
use pyo3::{exceptions::PyRuntimeError, prelude::*};
use pyo3_tch::PyTensor;
use tch::Tensor;

use crate::failure::raised;

/// A layer's context. `Forward` without its lifetime.
trait Context {
    fn batch_norm(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
    ) -> Result<Tensor, LayerError>;
    fn random(&mut self) -> &mut Random;
    fn stash(&mut self, name: &str, x: &Tensor);
    fn pop(&mut self, name: &str) -> Result<Tensor, LayerError>;
}

impl Context for Forward<'_> {
    fn batch_norm(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        Forward::batch_norm(self, first, norm, x)
    }

    fn random(&mut self) -> &mut Random {
        Forward::random(self)
    }

    fn stash(&mut self, name: &str, x: &Tensor) {
        Forward::stash(self, name, x);
    }

    fn pop(&mut self, name: &str) -> Result<Tensor, LayerError> {
        Forward::pop(self, name)
    }
}

environmental::environmental!(context: trait Context);

/// Calls `work` while this thread's code can reach `forward`.
pub(crate) fn within<T>(forward: &mut Forward<'_>, work: impl FnOnce() -> T) -> T {
    context::using(forward, work)
}

/// Calls `ask` with the layer that runs on this thread.
fn ask<T>(
    py: Python<'_>,
    ask: impl FnOnce(&mut dyn Context) -> Result<T, LayerError>,
) -> PyResult<T> {
    let answer = context::with(|context| ask(context))
        .ok_or_else(|| PyRuntimeError::new_err("no layer of a pipeline runs on this thread"))?;
    // A hook of Python that ran inside the operation may have raised: torch.utils.checkpoint ends
    // its recomputation so.
    answer.map_err(|error| {
        let text = error.to_string();
        PyErr::take(py).unwrap_or_else(|| match error {
            LayerError::OutOfMemory(_) | LayerError::GpuOutOfMemory(_) => {
                raised(py, "OutOfMemoryError", &text)
            }
            _ => PyRuntimeError::new_err(text),
        })
    })
}

/// Whether a layer runs on this thread.
#[pyfunction]
pub(crate) fn in_layer() -> bool {
    context::with(|_| ()).is_some()
}

/// Whether dropout of a tensor whose first size is `first` can be keyed by sample.
#[pyfunction]
pub(crate) fn keeps_samples(first: i64) -> bool {
    context::with(|context| {
        let samples = context.random().samples();
        samples > 0 && first > 0 && first % samples == 0
    })
    .unwrap_or(false)
}

/// Dropout keyed by sample, of the layer that runs on this thread.
#[pyfunction]
pub(crate) fn dropout(py: Python<'_>, x: PyTensor, p: f64) -> PyResult<PyTensor> {
    ask(py, |context| context.random().dropout(&x, p)).map(PyTensor)
}

/// Batch norm whose running statistics are updated once per mini-batch, with the layer's five
/// parameters from number `first` on.
#[pyfunction]
pub(crate) fn batch_norm(
    py: Python<'_>,
    x: PyTensor,
    first: usize,
    channels: i64,
    eps: f64,
    momentum: Option<f64>,
) -> PyResult<PyTensor> {
    let norm = BatchNorm { channels, eps, momentum };
    ask(py, |context| context.batch_norm(first, &norm, &x)).map(PyTensor)
}

/// Sends `x` to the layer that pops `name`.
#[pyfunction]
pub(crate) fn stash(py: Python<'_>, name: &str, x: PyTensor) -> PyResult<()> {
    ask(py, |context| {
        context.stash(name, &x);
        Ok(())
    })
}

/// What an earlier layer stashed under `name`.
#[pyfunction]
pub(crate) fn pop(py: Python<'_>, name: &str) -> PyResult<PyTensor> {
    ask(py, |context| context.pop(name)).map(PyTensor)
}

/// What the random numbers of a part of a layer depend on, to compute that part again later.
#[pyclass(frozen)]
pub(crate) struct RandomKey(Random);

#[pymethods]
impl RandomKey {
    /// Calls `function`, in which random operators and dropout draw from this key.
    fn call<'py>(&self, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let scope: Scope =
            self.0.enter().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let mut replay = Replay(self.0);
        let result = context::using(&mut replay, || function.call0());
        drop(scope);
        result
    }
}

/// A part of a layer that is computed again in the layer's backward, or apart from the rest of it.
struct Replay(Random);

impl Replay {
    fn refuse<T>(what: &str) -> Result<T, LayerError> {
        Err(LayerError::Value(format!(
            "{what} inside torch.utils.checkpoint: gpipe would see it twice; leave out the \
            checkpoint and set the pipeline's remat"
        )))
    }
}

impl Context for Replay {
    fn batch_norm(&mut self, _: usize, _: &BatchNorm, _: &Tensor) -> Result<Tensor, LayerError> {
        Self::refuse("a batch norm in training")
    }

    fn random(&mut self) -> &mut Random {
        &mut self.0
    }

    fn stash(&mut self, _: &str, _: &Tensor) {}

    fn pop(&mut self, _: &str) -> Result<Tensor, LayerError> {
        Self::refuse("a skip's pop")
    }
}

/// A key for a part of the layer that runs on this thread. Each call gives another one.
#[pyfunction]
pub(crate) fn random_key(py: Python<'_>) -> PyResult<RandomKey> {
    ask(py, |context| Ok(RandomKey(context.random().fork())))
}
