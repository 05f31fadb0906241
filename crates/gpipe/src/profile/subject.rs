//! The subject of a profile: what was measured.

use serde::{Deserialize, Serialize};

use crate::{estimate::Rate, optim::ParameterInfo, pipeline::PipelineBuilder, spec::TensorSpec};

/// Everything that costs depend on, except the settings that a planner chooses: cuts, M, schedule
/// and re-materialization.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// The layers, in order.
    pub layers: Vec<LayerSubject>,
    /// Specs of the inputs, for one sample.
    pub inputs: Vec<String>,
    /// The last size of the network's first output: the number of tokens or classes.
    pub classes: i64,
    /// The dtype of computation.
    pub dtype: String,
    /// Kinds of devices that the stages run on, each once.
    pub devices: String,
    /// The machine, in words.
    pub machine: String,
    /// CPU threads per stage.
    pub threads_per_stage: usize,
    /// The choice of kernels.
    pub kernels: String,
    /// The optimizer, and how many numbers it keeps per parameter.
    pub optimizer: String,
    /// Estimated bytes that the loss saves for its backward, per sample.
    pub loss_kept: u64,
    /// Whether averages of the parameters are kept.
    pub averages: bool,
    /// How many rows of the last layer and the losses are computed at a time; 0 for all.
    #[serde(default)]
    pub loss_rows: usize,
}

/// A layer of the measured model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSubject {
    /// The layer's name.
    pub name: String,
    /// The kind of layer, in one word.
    pub kind: String,
    /// The parameters: names and shapes, and which are not trained.
    pub parameters: Vec<String>,
    /// Specs of the outputs, for one sample.
    pub outputs: Vec<String>,
    /// Estimated floating-point operations of the forward, per sample.
    pub flops: u64,
    /// Estimated bytes that the layer saves for its backward, per sample. They reveal dropout, for
    /// example.
    pub kept: u64,
}

impl Subject {
    /// The subject as far as it matters for estimated costs ([`crate::estimate`]): without devices,
    /// machine, kernels and threads.
    #[must_use]
    pub fn of_shapes(self) -> Self {
        let none = String::new;
        Self { devices: none(), machine: none(), kernels: none(), threads_per_stage: 0, ..self }
    }

    /// Checks that this subject equals `other`.
    ///
    /// # Errors
    /// Names the first difference, both values, and the remedy. `origin` names the profile in the
    /// error.
    pub fn check(&self, other: &Self, origin: &str) -> crate::Result<()> {
        match self.difference(other) {
            None => Ok(()),
            Some(difference) => Err(crate::Error::Setting(format!(
                "{origin} is of something else: {difference}; measure again"
            ))),
        }
    }

    /// Describes the first difference between this subject and `other`.
    fn difference(&self, other: &Self) -> Option<String> {
        let text = |value: &dyn std::fmt::Display| value.to_string();
        let settings = |own: &Self| {
            [
                ("number of layers", text(&own.layers.len())),
                ("number of tokens or classes", text(&own.classes)),
                ("dtype", dtype(&own.dtype)),
                ("input", specs(&own.inputs)),
                ("device", text(&own.devices)),
                ("machine", text(&own.machine)),
                ("choice of kernels", text(&own.kernels)),
                ("optimizer", text(&own.optimizer)),
                ("number of threads per stage", text(&own.threads_per_stage)),
                ("keeping of averages", text(&own.averages)),
                ("number of rows of the loss at a time", text(&own.loss_rows)),
                ("loss's bytes", text(&own.loss_kept)),
            ]
        };
        let layers = self.layers.iter().zip(&other.layers).enumerate();
        let layers = layers.filter(|(_, (own, other))| own != other);
        let layers = layers.map(|(number, (own, other))| {
            format!("its layer {number} is {own}, here it is {other}")
        });
        let settings = settings(self).into_iter().zip(settings(other));
        let settings = settings
            .filter(|(own, other)| own.1 != other.1)
            .map(|(own, other)| format!("its {} is '{}', here it is '{}'", own.0, own.1, other.1));
        settings.chain(layers).next()
    }
}

/// The name of a stored dtype in a message.
fn dtype(stored: &str) -> String {
    let name = match stored {
        "Half" => "float16",
        "Float" => "float32",
        "Double" => "float64",
        "Int" => "int32",
        other => return other.to_lowercase(),
    };
    name.to_owned()
}

/// Stored specs in a message.
fn specs(stored: &[String]) -> String {
    let shown = |stored: &String| match stored.split_once(' ') {
        Some((kind, shape)) => format!("{} {shape}", dtype(kind)),
        None => stored.clone(),
    };
    stored.iter().map(shown).collect::<Vec<_>>().join(", ")
}

impl std::fmt::Display for LayerSubject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, kind, parameters, outputs, flops, kept } = self;
        let (parameters, outputs) = (parameters.join(", "), specs(outputs));
        write!(f, "'{name}' ({kind}: {parameters} -> {outputs}, {flops} FLOP, {kept} bytes kept)")
    }
}

impl PipelineBuilder {
    /// The subject that a profile of this pipeline would have. `machine` describes the machine.
    ///
    /// # Errors
    /// Settings or shapes that do not fit, as in [`PipelineBuilder::build`].
    pub fn subject(&mut self, machine: &str) -> crate::Result<Subject> {
        let estimated = self.estimate(&[1], &Rate::default())?;
        let kept: Vec<u64> = estimated.sizes.values().flatten().map(|cost| cost.kept.0).collect();
        let seen = self.seen()?;
        let inputs = seen.sequence.inputs.with_samples(seen.inputs, 1);
        let inferred = seen.sequence.infer(&inputs, seen.kind)?;
        // Dtypes are stored by these names, whatever messages call them.
        let text = |spec: &TensorSpec| format!("{:?} {:?}", spec.kind, spec.shape);
        let texts = |specs: &[TensorSpec]| specs.iter().map(text).collect();
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
            kept: kept.get(index).copied().unwrap_or(0),
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
            classes: inferred
                .specs
                .last()
                .and_then(|outputs| outputs.first())
                .map_or(0, TensorSpec::last),
            dtype: format!("{:?}", seen.kind),
            devices: devices.join(", "),
            machine: machine.to_owned(),
            threads_per_stage: seen.threads,
            kernels: format!("{:?}", seen.kernels),
            optimizer: seen.optimizer.map_or("none".to_owned(), |optimizer| {
                let one = ParameterInfo { name: "", shape: &[1], kind: seen.kind };
                let states = optimizer.state(&one);
                let kinds = states.iter().filter_map(|state| state.kind);
                let kinds = kinds.map(|kind| format!(" {kind:?}")).collect::<String>();
                format!("{}, {} numbers a parameter{kinds}", optimizer.name(), states.len())
            }),
            loss_kept: kept.last().copied().unwrap_or(0),
            averages: seen.average,
            loss_rows: seen.loss_rows.unwrap_or(0),
        })
    }
}
