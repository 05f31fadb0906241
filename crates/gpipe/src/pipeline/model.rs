//! What a pipeline computes: layers, loss, metrics and dtypes.

use std::{collections::HashMap, sync::Arc};

use gpipe_core::StageId;
use tch::Tensor;

use super::Padding;
use crate::{
    arguments::{Arguments, IntoTensors, if_defined},
    error::{Error, LayerError, Result},
    guard::catching,
    loss::{InputsAndTargets, LossTerm, Losses},
    metric::{Measured, Metric},
    precision::Precision,
    sequence::Sequence,
    spec::TensorSpec,
    stage::feed::Outcome,
};

/// A parameter of the model; a tied weight is listed under its first use.
#[derive(Debug, Clone)]
pub(super) struct OwnedParameter {
    /// `layer.parameter`
    pub(super) name: String,
    /// The layer's position in the sequence, and the parameter's position in the layer.
    pub(super) layer: usize,
    pub(super) slot: usize,
    /// Every use, in layer order: its stage, and its place there (layer within the stage, parameter
    /// within the layer). The first use owns the parameter.
    pub(super) uses: Vec<(StageId, (usize, usize))>,
}

/// What a pipeline computes. It never changes after the build.
pub(super) struct Model {
    pub(super) sequence: Sequence,
    /// Layers per stage.
    pub(super) balance: Vec<usize>,
    /// In layer order.
    pub(super) parameters: Vec<OwnedParameter>,
    /// The positions in `parameters`, by name.
    pub(super) by_name: HashMap<String, usize>,
    /// Number of inputs by position.
    pub(super) inputs: usize,
    pub(super) padding: Option<Padding>,
    /// What is declared of the targets.
    pub(super) targets: Arguments,
    pub(super) precision: Precision,
    pub(super) losses: Losses,
    pub(super) metrics: Vec<Arc<dyn Metric>>,
    /// Whether metrics are computed in training, too.
    pub(super) training_metrics: bool,
    pub(super) seed: u64,
}

impl Model {
    /// The parameter with this full name.
    pub(super) fn parameter(&self, name: &str) -> Option<&OwnedParameter> {
        self.by_name.get(name).and_then(|at| self.parameters.get(*at))
    }

    /// The parameters that the layer with this index owns.
    pub(super) fn owned_by(&self, layer: usize) -> &[OwnedParameter] {
        let from = self.parameters.partition_point(|own| own.layer < layer);
        let to = self.parameters.partition_point(|own| own.layer <= layer);
        &self.parameters[from..to]
    }

    /// The counts that the metrics' sums are divided by. Computed before the run, because it may
    /// fail.
    pub(super) fn metric_counts(&self, targets: &[Tensor]) -> Result<Vec<f64>> {
        let targets = self.targets.split(targets).positional;
        let count = |metric: &Arc<dyn Metric>| catching(|| metric.count(targets));
        let counts = self.metrics.iter().map(count).collect::<std::result::Result<_, _>>();
        counts.map_err(Error::Torch)
    }

    /// The metrics over all micro-batches, added in micro-batch order.
    pub(super) fn measured(&self, outcomes: &[Outcome], counts: &[f64]) -> Vec<Measured> {
        let sums = outcomes.last().map_or(&[][..], |outcome| &outcome.metric_sums);
        if sums.iter().all(Vec::is_empty) {
            return Vec::new();
        }
        let measured = |(index, (metric, &count)): (usize, (&Arc<dyn Metric>, &f64))| {
            let sum = sums.iter().filter_map(|sums| sums.get(index)).sum();
            Measured { name: metric.name().to_owned(), sum, count }
        };
        self.metrics.iter().zip(counts).enumerate().map(measured).collect()
    }

    /// Converts an output for the user: to the CPU, and to float32 from smaller dtypes.
    pub(super) fn returned(&self, output: &Tensor) -> Result<Tensor> {
        let Precision { compute, master } = self.precision;
        if_defined(output, |output| {
            let output = output.f_to(tch::Device::Cpu)?;
            Ok(if output.kind() == compute { output.f_to_kind(master)? } else { output })
        })
    }

    pub(super) fn check_shapes(&self, inputs: &[TensorSpec], targets: &[TensorSpec]) -> Result<()> {
        let inferred = self.sequence.infer(&self.precision.fed(inputs), self.precision.compute)?;
        let outputs = inferred.specs.last().map_or(&[][..], Vec::as_slice);
        let outputs = self.precision.seen_by_losses(outputs);
        match targets.is_empty() {
            true => Ok(()),
            false => {
                let mut asked = self.losses.check(outputs, self.given(inputs, targets))?;
                asked.extend(inferred.asked);
                self.check_asked(&asked)
            }
        }
    }

    /// Checks that every name is asked for.
    fn check_asked(&self, asked: &[String]) -> Result<()> {
        for (what, own) in [("input", &self.sequence.inputs), ("target", &self.targets)] {
            if let Some(name) = own.unasked(asked) {
                return Err(Error::Input(format!(
                    "nothing asks for the {what} '{name}': a loss that uses it asks in its check, \
                    too"
                )));
            }
        }
        Ok(())
    }

    /// The count of each loss over a mini-batch: the numbers that the sums are divided by.
    ///
    /// One of several losses may count nothing.
    ///
    /// # Errors
    /// If no loss counts anything, or an error of a loss.
    pub(super) fn counts(&self, inputs: &[Tensor], targets: &[Tensor]) -> Result<Vec<f64>> {
        let none = Default::default();
        let here = |tensor: &Tensor| if_defined(tensor, |own| Ok(own.f_to(tch::Device::Cpu)?));
        let here = |tensors: &[Tensor]| tensors.iter().map(here).collect::<Result<Vec<_>>>();
        let (inputs, targets) = (here(inputs)?, here(targets)?);
        let given = self.given(&inputs, &targets);
        let counts = self.losses.each(&none, given, |term, ctx| {
            let count = catching(|| term.loss.count(ctx, given.1.positional))?;
            match count.is_finite() && count >= 0.0 {
                true => Ok(count),
                false => Err(LayerError::Value(format!("its count is {count}"))),
            }
        });
        let counts = counts.map_err(|(term, error)| term.input_error(&error))?;
        match counts.is_empty() || counts.iter().any(|count| *count > 0.0) {
            true => Ok(counts),
            false => {
                Err(Error::Input("no target counts in this mini-batch: all are ignored".into()))
            }
        }
    }

    /// Whether every process reads the inputs.
    pub(super) fn needs_inputs_everywhere(&self) -> bool {
        self.padding.is_some() || self.losses.take_inputs() || self.has_named_inputs()
    }

    pub(super) fn has_named_inputs(&self) -> bool {
        !self.sequence.inputs.named.is_empty()
    }

    /// The inputs of a call in one list.
    ///
    /// # Errors
    /// If names do not fit.
    pub(super) fn listed_inputs(&self, inputs: impl IntoTensors) -> Result<Vec<Tensor>> {
        self.sequence.inputs.listed("input", inputs.into_tensors())
    }

    /// As [`Model::listed_inputs`], for targets.
    pub(super) fn listed_targets(&self, targets: impl IntoTensors) -> Result<Vec<Tensor>> {
        self.targets.listed("target", targets.into_tensors())
    }

    fn given<'a, T>(&'a self, inputs: &'a [T], targets: &'a [T]) -> InputsAndTargets<'a, T> {
        (self.sequence.inputs.split(inputs), self.targets.split(targets))
    }

    /// The losses over a mini-batch, whose micro-batches have these outcomes.
    pub(super) fn losses_of(&self, outcomes: &[Outcome], counts: &[f64]) -> Vec<LossTerm> {
        let sums = outcomes.last().map_or(&[][..], |outcome| &outcome.loss_sums);
        self.losses.terms(sums, counts)
    }
}
