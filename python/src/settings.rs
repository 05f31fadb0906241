//! What a pipeline is built from, as Python describes it.

use std::{collections::HashSet, time::Duration};

use gpipe::{
    Adafactor, Adam, Balance, Bytes, Device, Group, Interrupt, Kernels, Moments, NormsFollow,
    Pipeline, PipelineBuilder, RematPolicies, RmsForm, RmsProp, Schedule, Sequence, Sgd,
    TensorSpec,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    convert::{PySpec, kind, spec},
    failure::{Failure, raised},
    layer::{Described, Values},
    loss::PyLoss,
};

/// Settings by name. Python has checked their types.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    layers: Vec<Described>,
    inputs: Vec<PySpec>,
    shared_inputs: Vec<usize>,
    devices: Vec<String>,
    micro_batches: usize,
    schedule: String,
    remat: Option<String>,
    balance: Option<Vec<usize>>,
    threads: usize,
    seed: u64,
    dtype: String,
    timeout: f64,
    clip_norm: Option<f64>,
    memory_cap: Option<Vec<u64>>,
    optimizer: Option<Rule>,
    groups: Vec<(Vec<String>, f64, f64)>,
    average: Option<f64>,
    keep_gradients: bool,
    input_gradients: bool,
    open_forwards: usize,
    norms_follow_micro_batches: bool,
    loss: Option<(Py<PyAny>, Py<PyAny>)>,
}

/// A rule for updates, with PyTorch's settings.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Rule {
    name: String,
    lr: f64,
    weight_decay: f64,
    /// The rule's other numbers, in the order of [`Rule::apply`].
    numbers: Vec<f64>,
}

impl Rule {
    /// Gives the builder the rule of that name.
    fn apply(&self, builder: PipelineBuilder) -> PyResult<PipelineBuilder> {
        let Self { lr, weight_decay, .. } = *self;
        Ok(match (self.name.as_str(), &self.numbers[..]) {
            ("sgd", &[momentum, nesterov]) => {
                let nesterov = nesterov != 0.0;
                builder.optimizer(Sgd { lr, momentum, nesterov, weight_decay })
            }
            ("adam", &[beta1, beta2, eps, decoupled]) => {
                let decoupled = decoupled != 0.0;
                let moments = Moments::Full; // what PyTorch's rule keeps
                builder.optimizer(Adam { lr, beta1, beta2, eps, weight_decay, decoupled, moments })
            }
            ("rmsprop", &[decay, momentum, eps]) => {
                let form = RmsForm::PyTorch;
                builder.optimizer(RmsProp { lr, decay, momentum, eps, weight_decay, form })
            }
            ("adafactor", &[beta2_decay, eps, clip_threshold]) => {
                builder.optimizer(Adafactor { lr, beta2_decay, eps, clip_threshold, weight_decay })
            }
            (name, numbers) => {
                return Err(PyValueError::new_err(format!("no rule '{name}' of {numbers:?}")));
            }
        })
    }
}

fn wrong(error: impl std::fmt::Display) -> PyErr {
    Python::with_gil(|py| raised(py, "SettingError", &error.to_string()))
}

/// A builder, and the values that its pipeline starts with.
pub(crate) struct Prepared {
    pub builder: PipelineBuilder,
    pub shared: Values,
    pub copied: Values,
    pub timeout: Duration,
}

impl Prepared {
    /// Builds the pipeline with its values.
    pub(crate) fn build(self) -> gpipe::Result<Pipeline> {
        let mut pipeline = self.builder.given_parameters().build()?;
        pipeline.share_parameters(&self.shared)?;
        pipeline.set_parameters(&self.copied)?;
        Ok(pipeline)
    }
}

impl Settings {
    /// The builder that these settings describe.
    pub(crate) fn prepare(self, interrupt: &Interrupt, failure: &Failure) -> PyResult<Prepared> {
        let (mut shared, mut copied, mut ties) = (Vec::new(), Vec::new(), HashSet::new());
        let mut sequence = Sequence::new();
        for described in self.layers {
            let (name, layer, own, copies) = described.into_layer(failure, &mut ties);
            sequence = sequence.push(name, layer);
            shared.extend(own);
            copied.extend(copies);
        }
        let inputs: Vec<TensorSpec> = self.inputs.into_iter().map(spec).collect::<PyResult<_>>()?;
        let devices: Vec<Device> =
            self.devices.iter().map(|text| text.parse().map_err(wrong)).collect::<PyResult<_>>()?;
        let timeout = Duration::try_from_secs_f64(self.timeout).map_err(wrong)?;
        let mut builder = Pipeline::builder(sequence, inputs)
            .devices(devices)
            .shared_inputs(self.shared_inputs)
            .micro_batches(self.micro_batches)
            .schedule(self.schedule.parse::<Schedule>().map_err(wrong)?)
            .threads_per_stage(self.threads)
            .seed(self.seed)
            .kind(kind(&self.dtype)?)
            // Modules expect the layout that PyTorch gives them.
            .kernels(Kernels::Aten)
            .open_forwards(self.open_forwards)
            .timeout(timeout)
            .interrupt(interrupt);
        if let Some(remat) = &self.remat {
            builder = builder.remat(remat.parse::<RematPolicies>().map_err(wrong)?);
        }
        if let Some(balance) = self.balance {
            builder = builder.balance(Balance::Layers(balance));
        }
        if let Some(norm) = self.clip_norm {
            builder = builder.clip_norm(norm);
        }
        if let Some(caps) = self.memory_cap {
            builder = builder.memory_cap(caps.into_iter().map(Bytes).collect::<Vec<_>>());
        }
        if let Some(rule) = &self.optimizer {
            builder = rule.apply(builder)?;
        }
        for (names, lr_scale, weight_decay) in self.groups {
            let group = Group::matching(names).lr_scale(lr_scale).weight_decay(weight_decay);
            builder = builder.group(group);
        }
        if let Some(decay) = self.average {
            builder = builder.average(decay);
        }
        if self.norms_follow_micro_batches {
            builder = builder.norms_follow(NormsFollow::MicroBatches);
        }
        if self.input_gradients {
            builder = builder.input_gradients();
        }
        if self.keep_gradients {
            builder = builder.keep_gradients();
        }
        if let Some((sum, count)) = self.loss {
            builder = builder.loss(PyLoss { sum, count, failure: failure.clone() });
        }
        Ok(Prepared { builder, shared, copied, timeout })
    }
}
