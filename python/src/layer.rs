//! A module of Python as a layer.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

use gpipe::{Forward, Infer, Init, Layer, LayerError, ParameterSpec, TensorSpec};
use gpipe_bridge::hollow::is_filled;
use pyo3::{prelude::*, types::PyTuple};
use pyo3_tch::PyTensor;
use tch::Tensor;

use crate::{
    convert::{PySpec, py_spec, spec, tensors, tuple},
    failure::{Failure, Raised},
    gil, running,
};

/// One parameter or buffer of a module, as Python describes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Given {
    name: String,
    value: PyTensor,
    trainable: bool,
    /// Whether it is a running statistic of a batch norm.
    buffer: bool,
    /// What all uses of one tensor have in common, if it has several.
    tie: Option<String>,
    /// Whether the module's own tensor is the parameter's storage.
    shared: bool,
}

/// A layer, as Python describes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Described {
    pub name: String,
    /// `call(parameters, inputs)`: runs the module.
    call: Py<PyAny>,
    /// `infer(specs, skips)`: the specs of outputs and of stashed skips.
    infer: Py<PyAny>,
    parameters: Vec<Given>,
    stashes: Vec<String>,
    pops: Vec<String>,
    /// Measured nanoseconds of a forward and backward, for the cuts.
    cost: Option<f64>,
}

/// Values of parameters, by their full names.
pub(crate) type Values = Vec<(String, Tensor)>;

impl Described {
    /// The layer, the values of parameters that stay the module's, and those that are copied. A
    /// tied value is in none of them if `ties` has its tie already.
    pub(crate) fn into_layer(
        self,
        failure: &Failure,
        ties: &mut HashSet<String>,
    ) -> (String, PyLayer, Values, Values) {
        let (mut specs, mut shared, mut copied) = (Vec::new(), Vec::new(), Vec::new());
        for given in self.parameters {
            let Given { name, value: PyTensor(value), trainable, buffer, tie, shared: shares } =
                given;
            let mut spec = match buffer {
                true => ParameterSpec::buffer(&name, value.size(), Init::Zeros),
                false => ParameterSpec::new(&name, value.size(), Init::Zeros),
            };
            spec.trainable = trainable && !buffer;
            specs.push(spec.tied(tie.as_deref()));
            if tie.is_none_or(|tie| ties.insert(tie)) {
                let values = if shares { &mut shared } else { &mut copied };
                values.push((format!("{}.{name}", self.name), value));
            }
        }
        let layer = PyLayer {
            name: self.name.clone(),
            call: self.call,
            infer: self.infer,
            parameters: specs,
            stashes: self.stashes,
            pops: self.pops,
            cost: self.cost,
            known: Mutex::default(),
            failure: failure.clone(),
        };
        (self.name, layer, shared, copied)
    }
}

/// The specs that a layer's outputs and stashed skips depend on.
type Key = (Vec<TensorSpec>, Vec<TensorSpec>);
/// Specs of outputs, and of stashed skips.
type Inferred = (Vec<TensorSpec>, Vec<TensorSpec>);

/// A module of Python.
pub(crate) struct PyLayer {
    name: String,
    call: Py<PyAny>,
    infer: Py<PyAny>,
    parameters: Vec<ParameterSpec>,
    stashes: Vec<String>,
    pops: Vec<String>,
    cost: Option<f64>,
    /// What `infer` found, because the engine asks in every forward: by the specs of inputs and
    /// popped skips. There are few, so that a list is faster than a map.
    known: Mutex<Vec<(Key, Inferred)>>,
    failure: Failure,
}

/// Most shapes that a layer remembers.
const KNOWN_MAX: usize = 64;

impl PyLayer {
    fn from(&self) -> Raised {
        Raised::Layer(self.name.clone())
    }

    fn inferred(
        &self,
        inputs: &[TensorSpec],
        popped: &[TensorSpec],
    ) -> Result<Inferred, LayerError> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_of = |(own, _): &&(Key, Inferred)| own.0 == inputs && own.1 == popped;
        if let Some((_, found)) = known().iter().find(is_of) {
            return Ok(found.clone());
        }
        let found = gil::with(&self.failure, |py| {
            let ask = || -> PyResult<Inferred> {
                let of = |specs: &[TensorSpec]| -> PyResult<Vec<_>> {
                    specs.iter().map(py_spec).collect()
                };
                let answer = self.infer.call1(py, (of(inputs)?, of(popped)?))?;
                let (outputs, stashed): (Vec<PySpec>, Vec<PySpec>) = answer.extract(py)?;
                let specs = |all: Vec<PySpec>| all.into_iter().map(spec).collect::<PyResult<_>>();
                Ok((specs(outputs)?, specs(stashed)?))
            };
            ask().map_err(|exception| self.failure.keep(py, self.from(), exception))
        })?;
        let mut known = known();
        if known.len() >= KNOWN_MAX {
            known.remove(0);
        }
        known.push(((inputs.to_vec(), popped.to_vec()), found.clone()));
        Ok(found)
    }
}

impl Layer for PyLayer {
    fn kind(&self) -> &'static str {
        "module"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters.clone()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let popped: Vec<TensorSpec> =
            self.pops.iter().map(|name| ctx.pop(name)).collect::<Result<_, _>>()?;
        let (outputs, stashed) = self.inferred(inputs, &popped)?;
        if stashed.len() != self.stashes.len() {
            return Err(LayerError::Shape(format!(
                "its forward stashed {} skips of {:?}",
                stashed.len(),
                self.stashes
            )));
        }
        for (name, spec) in self.stashes.iter().zip(stashed) {
            ctx.stash(name, spec)?;
        }
        Ok(outputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let parameters = (0..self.parameters.len())
            .map(|index| Ok(ctx.parameter(index)?.shallow_clone()))
            .collect::<Result<Vec<_>, LayerError>>()?;
        gil::with(&self.failure, |py| {
            drop(PyErr::take(py)); // an exception of a backward that nobody took
            let run = || -> PyResult<Vec<Tensor>> {
                let parameters: Bound<'_, PyTuple> = tuple(py, parameters)?;
                let inputs = tuple(py, inputs.iter().map(Tensor::shallow_clone))?;
                tensors(&self.call.bind(py).call1((parameters, inputs))?)
            };
            running::within(ctx, run).map_err(|exception| match is_filled() {
                true => LayerError::Value(exception.to_string()),
                false => self.failure.keep(py, self.from(), exception),
            })
        })
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn failed(&self, error: &LayerError) {
        // PyTorch leaves the exception of a backward on the thread that ran it.
        gil::with(&self.failure, |py| self.failure.keep_pending(py, self.from(), error));
    }

    /// Nanoseconds. Cuts only compare layers, so any unit serves.
    fn flops(&self, _: &[TensorSpec]) -> Option<f64> {
        self.cost
    }
}
