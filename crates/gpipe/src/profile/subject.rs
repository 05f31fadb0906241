//! What a profile was measured on.

use serde::{Deserialize, Serialize};

use crate::{pipeline::PipelineBuilder, spec::TensorSpec};

/// What costs depend on. Settings that a planner chooses (cuts, M, schedule, re-materialization) are not in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// The layers, in order.
    pub layers: Vec<LayerSubject>,
    /// One sample's inputs.
    pub inputs: Vec<String>,
    /// Dtype of the arithmetic.
    pub dtype: String,
    /// Where the stages run: each kind of device once.
    pub devices: String,
    /// The machine, in words.
    pub machine: String,
    /// CPU threads of a stage.
    pub threads_per_stage: usize,
    /// Whose kernels.
    pub kernels: String,
    /// The optimizer.
    pub optimizer: String,
    /// Whether averages of the parameters are kept.
    pub averages: bool,
}

/// A layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSubject {
    /// Its name.
    pub name: String,
    /// What it is, in one word.
    pub kind: String,
    /// Its parameters: names and shapes, and which are not trained.
    pub parameters: Vec<String>,
    /// What it gives for one sample.
    pub outputs: Vec<String>,
    /// Floating-point operations of its forward of one sample, as estimated.
    pub flops: u64,
}

impl Subject {
    /// What differs first between the profile's subject and `other`, in words.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        let differs = |what: &str, own: &dyn std::fmt::Debug, other: &dyn std::fmt::Debug| {
            Some(format!("its {what} is {own:?}, here it is {other:?}"))
        };
        if self.layers.len() != other.layers.len() {
            return differs("number of layers", &self.layers.len(), &other.layers.len());
        }
        for (number, (own, other)) in self.layers.iter().zip(&other.layers).enumerate() {
            if own != other {
                return differs(&format!("layer {number}"), own, other);
            }
        }
        let texts = [
            ("dtype", &self.dtype, &other.dtype),
            ("device", &self.devices, &other.devices),
            ("machine", &self.machine, &other.machine),
            ("choice of kernels", &self.kernels, &other.kernels),
            ("optimizer", &self.optimizer, &other.optimizer),
        ];
        if self.inputs != other.inputs {
            return differs("input", &self.inputs, &other.inputs);
        }
        if let Some((what, own, other)) = texts.into_iter().find(|(_, own, other)| own != other) {
            return differs(what, own, other);
        }
        if self.threads_per_stage != other.threads_per_stage {
            let (own, other) = (self.threads_per_stage, other.threads_per_stage);
            return differs("number of threads per stage", &own, &other);
        }
        if self.averages != other.averages {
            return differs("keeping of averages", &self.averages, &other.averages);
        }
        None
    }
}

impl PipelineBuilder {
    /// What a profile of this pipeline would be measured on; `machine` in words.
    ///
    /// # Errors
    /// Settings and shapes that do not fit, as [`PipelineBuilder::build`].
    pub fn subject(&mut self, machine: &str) -> crate::Result<Subject> {
        let seen = self.seen()?;
        let one_sample = |spec: &TensorSpec| match spec.shape.first() {
            Some(_) => TensorSpec { shape: [&[1], &spec.shape[1..]].concat(), ..spec.clone() },
            None => spec.clone(),
        };
        let inputs: Vec<TensorSpec> = seen.inputs.iter().map(one_sample).collect();
        let inferred = seen.sequence.infer(&inputs, seen.kind)?;
        let texts = |specs: &[TensorSpec]| specs.iter().map(ToString::to_string).collect();
        let layers = seen.sequence.layers.iter().enumerate().map(|(index, layer)| LayerSubject {
            name: layer.name.clone(),
            kind: layer.layer.kind().to_owned(),
            parameters: layer
                .parameters
                .iter()
                .map(|parameter| {
                    let frozen = if parameter.trainable { "" } else { ", not trained" };
                    format!("{} {:?}{frozen}", parameter.name, parameter.shape)
                })
                .collect(),
            outputs: texts(&inferred.specs[index + 1]),
            flops: layer.layer.flops(&inferred.specs[index]).unwrap_or(0.0) as u64,
        });
        let mut devices: Vec<String> = seen
            .devices
            .iter()
            .map(|device| if device.gpu().is_some() { "cuda" } else { "cpu" }.to_owned())
            .collect();
        devices.sort_unstable();
        devices.dedup();
        Ok(Subject {
            layers: layers.collect(),
            inputs: texts(&inputs),
            dtype: format!("{:?}", seen.kind),
            devices: devices.join(", "),
            machine: machine.to_owned(),
            threads_per_stage: seen.threads,
            kernels: format!("{:?}", seen.kernels),
            optimizer: seen.optimizer.map_or("none", |optimizer| optimizer.name()).to_owned(),
            averages: seen.average,
        })
    }
}
