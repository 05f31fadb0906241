//! The loss and the metrics of a micro-batch, on the last stage.

use std::sync::Arc;

use gpipe_core::{MicroBatch, lower::Part};
use tch::Tensor;

use super::{
    StageResult,
    feed::Mode,
    feeding::Fed,
    held::HeldLoss,
    island::{self, Island},
    recorder::ProfiledOp,
    step::ActiveStage,
};
use crate::{
    arguments::if_defined,
    error::{LayerError, StageError},
    guard::{self, Untouched},
    loss::not_finite,
    metric::Metric,
    observer::LOSS,
    precision::Precision,
};

/// The losses and the metrics of some outputs.
pub(super) struct LossRun {
    /// The outputs as leaves of the graph, if there is one.
    pub leaves: Vec<Tensor>,
    /// The sum of each loss.
    pub sums: Vec<Tensor>,
    /// The sum of each metric, if they are measured.
    pub metrics: Vec<f64>,
}

impl ActiveStage<'_> {
    /// Computes the losses of `micro_batch` from the stage's outputs and records their sums. The
    /// last stage does so, in training and evaluation. With `graph`, returns an island for the
    /// backward. `keeps` says whether the forward keeps activations.
    pub(super) fn run_loss(
        &mut self,
        micro_batch: MicroBatch,
        outputs: &[Tensor],
        graph: bool,
        keeps: bool,
    ) -> StageResult<Option<HeldLoss>> {
        if !self.config.last || self.loss_is_callers() {
            return Ok(None);
        }
        if self.is_in_rows(self.config.named.len() - 1) {
            return self.run_loss_in_rows(micro_batch, outputs, graph, keeps);
        }
        let position = self.config.named.len();
        let shown = outputs.iter().map(Some);
        // It is computed once: a forward that discards leaves it to the re-materialization.
        let work = if keeps { ProfiledOp::ForwardKept } else { ProfiledOp::Forward };
        let since = self.before_layer(position, micro_batch, work, shown)?;
        let island = self.compute_loss(micro_batch, outputs, graph)?;
        self.after_layer(since, position, micro_batch, work, [])?;
        Ok(island.map(HeldLoss::Island))
    }

    /// Whether the caller computes the loss: where forwards and backwards run alone.
    pub(super) fn loss_is_callers(&self) -> bool {
        matches!(self.step.feed.part, Part::Forward | Part::Backward)
    }

    fn compute_loss(
        &mut self,
        micro_batch: MicroBatch,
        outputs: &[Tensor],
        graph: bool,
    ) -> StageResult<Option<Island>> {
        let losses = &self.config.losses;
        if losses.is_empty() || self.step.feed.targets(micro_batch).is_none() {
            return Ok(None);
        }
        let in_loss = |source| StageError::Layer { layer: LOSS.into(), source };
        let targets = self.fed_tensors(Fed::Targets, micro_batch).map_err(in_loss)?;
        let LossRun { leaves, sums, metrics } =
            self.losses_of(micro_batch, outputs, &targets, graph)?;
        self.record_losses(micro_batch, &sums)?;
        self.step.metric_sums.push((micro_batch, metrics));
        Ok(graph.then(|| Island::of_loss(leaves, sums)))
    }

    /// The losses and metrics of `outputs`, which are those of the last layer, or some of their
    /// rows. `targets` belong to them.
    pub(super) fn losses_of(
        &self,
        micro_batch: MicroBatch,
        outputs: &[Tensor],
        targets: &[Tensor],
        graph: bool,
    ) -> StageResult<LossRun> {
        let losses = &self.config.losses;
        let _no_grad = (!graph).then(tch::no_grad_guard);
        let in_loss = |source| StageError::Layer { layer: LOSS.into(), source };
        let leaves = island::leaves(outputs, graph && self.parameters.trains_up_to_here());
        let leaves = leaves.map_err(in_loss)?;
        // Losses and metrics see the outputs in float32 if the arithmetic is in a smaller dtype.
        let Precision { compute, master } = self.config.precision;
        let widen = |tensor: &Tensor| {
            if_defined(tensor, |tensor| match tensor.kind() == compute {
                true => Ok(tensor.f_to_kind(master)?),
                false => Ok(tensor.shallow_clone()),
            })
        };
        let seen: Vec<Tensor> =
            leaves.iter().map(widen).collect::<Result<_, LayerError>>().map_err(in_loss)?;
        let inputs = self.step.feed.inputs(micro_batch).iter().filter(|_| losses.take_inputs());
        let inputs = inputs.map(|tensor| if_defined(tensor, |own| self.device.own(own)));
        let inputs: Vec<Tensor> = inputs.collect::<Result<_, _>>().map_err(in_loss)?;
        let given = Untouched::new(seen.iter().chain(targets).chain(&inputs)).map_err(in_loss)?;
        let (feed, slice) = (&self.step.feed, self.step.feed.slice(micro_batch));
        let random = island::random(self.config.seed, island::LOSS, feed.step, slice);
        let _scope = random.enter().map_err(in_loss)?;
        let handed = losses.split(seen.iter().map(Tensor::shallow_clone).collect());
        let (inputs, targets) =
            (self.config.inputs.split(&inputs), self.config.targets.split(targets));
        let mut inspections = Vec::new();
        let sums = losses.each(&handed, (inputs, targets), |term, ctx| {
            let sum = guard::catching(|| {
                let _no_grad = (!term.trains()).then(tch::no_grad_guard);
                term.loss.sum(ctx, &handed.0, targets.positional)
            })?;
            if let Some(at) = given.changed()? {
                return Err(self.changed_by_loss(at, handed.2.len(), seen.len()));
            }
            if sum.numel() != 1 {
                let shape = sum.size();
                return Err(LayerError::Shape(format!(
                    "the loss must be one number, got {shape:?}: sum it over the samples"
                )));
            }
            if graph && term.trains() {
                check_learns(&leaves, &sum)?;
            }
            inspections.extend(ctx.inspections.take());
            Ok(sum)
        });
        let sums = sums.map_err(|(term, source)| match source {
            LayerError::NotFinite(value) => {
                StageError::NotFinite { layer: LOSS.into(), what: not_finite(&term.name, &value) }
            }
            source => StageError::Layer { layer: term.layer(), source },
        })?;
        self.inspect(micro_batch, self.config.named.len(), inspections)?;
        let metrics = self.measure(&handed.0, targets.positional)?;
        Ok(LossRun { leaves, sums, metrics })
    }

    /// The error of a loss that changes tensor `at` of `seen` tensors from the last layer, targets
    /// and inputs. The last `parameters` of those from the layer are the losses' own.
    fn changed_by_loss(&self, at: usize, parameters: usize, seen: usize) -> LayerError {
        let layer = self.config.named.last().map_or(&[][..], |last| &last.parameters);
        match at.checked_sub(seen - parameters).and_then(|own| layer.get(own)) {
            Some(spec) if at < seen => LayerError::ParameterChanged(spec.name.clone()),
            _ => changed(),
        }
    }

    /// Checks the losses' sums over a micro-batch. Returns whether one that trains is not finite.
    ///
    /// # Errors
    /// [`StageError::NotFinite`] with the value, but not across processes, where a failing stage
    /// would end the run. There the stage votes against the update, and the driver reports the
    /// loss, because only it sees every process's result.
    pub(super) fn check_losses(&self, sums: &[f64]) -> StageResult<bool> {
        let mut terms = self.config.losses.0.iter().zip(sums).filter(|(term, _)| term.trains());
        match terms.find(|(_, sum)| !sum.is_finite()) {
            None => Ok(false),
            Some(_) if !self.config.alone => Ok(true),
            Some((term, sum)) => Err(StageError::NotFinite {
                layer: LOSS.into(),
                what: not_finite(&term.name, &sum.to_string()),
            }),
        }
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

/// Checks that the sum of a loss depends on the outputs, if anything before it is trained.
fn check_learns(outputs: &[Tensor], sum: &Tensor) -> Result<(), LayerError> {
    let trains = outputs.iter().any(Tensor::requires_grad);
    // A loss that counts no target may be a constant 0.
    if !trains || sum.requires_grad() || sum.f_double_value(&[])? == 0.0 {
        return Ok(());
    }
    Err(LayerError::Value(
        "its sum has no gradient, so nothing would learn: compute it from the outputs, without \
        detaching them"
            .into(),
    ))
}

/// Checks that the outputs and targets are unchanged: the backward, other metrics and the user
/// share them.
fn check_untouched(given: &Untouched) -> Result<(), LayerError> {
    given.changed()?.map_or(Ok(()), |_| Err(changed()))
}

fn changed() -> LayerError {
    LayerError::Value(
        "it changes outputs, targets or inputs in place: use the form that makes a new tensor"
            .into(),
    )
}
