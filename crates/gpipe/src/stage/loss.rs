//! The loss and the metrics of a micro-batch, on the last stage.

use std::sync::Arc;

use gpipe_core::{MicroBatch, lower::Part};
use tch::Tensor;

use super::{
    StageResult,
    feed::Mode,
    guard::{self, Untouched},
    island::{self, Island},
    recorder::ProfiledOp,
    step::ActiveStage,
};
use crate::{
    error::{LayerError, StageError},
    metric::Metric,
    observer::Pass,
    precision::Precision,
};

impl ActiveStage<'_> {
    /// The position of the loss in profiles: after the last layer.
    pub(super) fn loss_position(&self) -> usize {
        self.config.layers.end
    }

    /// Computes the loss of `micro_batch` from the stage's outputs and records its sum. It runs on
    /// the last stage, in training and evaluation. With `graph`, returns an island for the
    /// backward.
    pub(super) fn run_loss(
        &mut self,
        micro_batch: MicroBatch,
        outputs: &[Tensor],
        graph: bool,
        work: ProfiledOp,
    ) -> StageResult<Option<Island>> {
        // Where forwards and backwards run alone, the loss is the caller's.
        let is_callers = matches!(self.step.feed.part, Part::Forward | Part::Backward);
        if !self.config.last || is_callers {
            return Ok(None);
        }
        let position = self.config.named.len();
        let shown = outputs.iter().map(Some);
        // It is computed once: a forward that discards leaves it to the re-materialization.
        let pass = Pass::Forward;
        let since = self.before_layer(position, micro_batch, pass, shown)?;
        let begun = self.begin_sample()?;
        let island = self.compute_loss(micro_batch, outputs, graph)?;
        self.end_sample(begun, self.loss_position(), work, micro_batch)?;
        self.after_layer(since, position, micro_batch, pass, [])?;
        Ok(island)
    }

    fn compute_loss(
        &mut self,
        micro_batch: MicroBatch,
        outputs: &[Tensor],
        graph: bool,
    ) -> StageResult<Option<Island>> {
        let (Some(loss), Some(targets)) = (&self.config.loss, self.step.feed.targets(micro_batch))
        else {
            return Ok(None);
        };
        let _no_grad = (!graph).then(tch::no_grad_guard);
        let in_loss = |source| StageError::Layer { layer: "loss".into(), source };
        let leaves = island::leaves(outputs, graph && self.parameters.trains_up_to_here());
        let leaves = leaves.map_err(in_loss)?;
        // Losses and metrics see the outputs in float32 if the arithmetic is in a smaller dtype.
        let Precision { compute, master } = self.config.precision;
        let widen = |tensor: &Tensor| match tensor.kind() == compute {
            true => Ok(tensor.f_to_kind(master)?),
            false => Ok(tensor.shallow_clone()),
        };
        let seen: Vec<Tensor> =
            leaves.iter().map(widen).collect::<Result<_, LayerError>>().map_err(in_loss)?;
        let targets = targets.iter().map(|target| self.device.own(target));
        let targets: Vec<Tensor> = targets.collect::<Result<_, _>>().map_err(in_loss)?;
        let given = Untouched::new(seen.iter().chain(&targets)).map_err(in_loss)?;
        let sum = guard::catching(|| loss.sum(&seen, &targets)).map_err(in_loss)?;
        check_untouched(&given).map_err(in_loss)?;
        if sum.numel() != 1 {
            let shape = sum.size();
            return Err(in_loss(LayerError::Shape(format!(
                "the loss must be one number, got {shape:?}: sum it over the samples"
            ))));
        }
        let value = sum.f_double_value(&[]).map_err(|error| in_loss(error.into()))?;
        // A loss that counts no target may be a constant 0.
        if graph && value != 0.0 && !sum.requires_grad() && leaves.iter().any(Tensor::requires_grad)
        {
            return Err(in_loss(LayerError::Value(
                "its sum has no gradient, so nothing would learn: compute it from the outputs, \
                 without detaching them"
                    .into(),
            )));
        }
        // Across processes a failing stage would end the run. There the driver checks the loss
        // instead, because only it sees every process's result.
        if !value.is_finite() && self.config.alone {
            let what = format!("the loss ({value})");
            return Err(StageError::NotFinite { layer: "loss".into(), what });
        }
        let sums = self.measure(&seen, &targets)?;
        self.step.metric_sums.push((micro_batch, sums));
        self.step.loss_sums.push((micro_batch, value));
        Ok(graph.then(|| Island::of_loss(leaves, sum)))
    }

    /// Computes the sums of the metrics.
    fn measure(&self, outputs: &[Tensor], targets: &[Tensor]) -> StageResult<Vec<f64>> {
        if self.step.feed.mode == Mode::Train && !self.config.training_metrics {
            return Ok(Vec::new());
        }
        let _no_grad = tch::no_grad_guard();
        let measure = |metric: &Arc<dyn Metric>| {
            let measure = || -> Result<f64, LayerError> {
                let given = Untouched::new(outputs.iter().chain(targets))?;
                let sum = guard::catching(|| metric.sum(outputs, targets))?;
                check_untouched(&given)?;
                Ok(sum)
            };
            let named = |source| StageError::Layer { layer: metric.name().to_owned(), source };
            measure().map_err(named)
        };
        self.config.metrics.iter().map(measure).collect()
    }
}

/// Checks that the outputs and targets are unchanged: the backward, other metrics and the user
/// share them.
fn check_untouched(given: &Untouched) -> Result<(), LayerError> {
    match given.changed()? {
        None => Ok(()),
        Some(_) => Err(LayerError::Value(
            "it changes outputs or targets in place: use the form that makes a new tensor".into(),
        )),
    }
}
