//! The last layer and the losses on some rows at a time, so that outputs of a whole micro-batch
//! never exist.
//!
//! With a large vocabulary, logits and what their loss saves are by far the largest tensors of a
//! pipeline. A loss that sums over rows needs no more than some of them:
//!
//! ```text
//! forward    keeps the input x [rows, features] of the last layer, and computes nothing
//! backward   for each chunk c of the rows:
//!              logits = layer(x_c)      [chunk, vocabulary]
//!              sum   += loss(logits)
//!              dx_c, dW += the VJP      the logits are gone
//! ```
//!
//! The loss is then known only after the backward, which is early enough: the update needs it, and
//! the denominators of its gradients are known before the step. So no product is computed twice,
//! as it is where logits are made again for the backward. Liger Kernel (Hsu et al. 2024) takes
//! gradients in the forward instead, where they would have to be kept up to the backward.
//!
//! Chunks do not depend on the cut, the schedule or re-materialization, so neither do sums.

use gpipe_core::MicroBatch;
use tch::Tensor;

use super::{
    StageResult, feed::Mode, feeding::Fed, held::HeldLoss, in_operation, island::Island,
    later::WeightGradients, loss::LossRun, recorder::ProfiledOp, step::ActiveStage,
};
use crate::error::LayerError;

/// Inputs and targets of a micro-batch by rows.
struct ByRows {
    /// The shape of the layer's input, `[..., features]`.
    shape: Vec<i64>,
    /// The input, `[rows, features]`.
    x: Tensor,
    /// `[rows]`
    targets: Vec<Tensor>,
    rows: i64,
    /// How many rows are computed at a time.
    chunk: i64,
}

impl ByRows {
    fn new(inputs: &[Tensor], targets: &[Tensor], chunk: usize) -> Result<Self, LayerError> {
        let Some(x) = inputs.first() else {
            return Err(LayerError::Shape("the last layer has no input".into()));
        };
        let shape = x.size();
        let features = shape.last().copied().unwrap_or(1);
        let x = x.f_reshape([-1, features])?;
        let rows = x.size().first().copied().unwrap_or(0);
        let flat = |target: &Tensor| Ok(target.f_reshape([rows])?);
        let targets = targets.iter().map(flat).collect::<Result<_, LayerError>>()?;
        Ok(Self { shape, x, targets, rows, chunk: i64::try_from(chunk).unwrap_or(i64::MAX) })
    }

    /// The first row, the inputs and the targets of each chunk.
    fn chunks(&self) -> impl Iterator<Item = Result<(i64, Tensor, Vec<Tensor>), LayerError>> + '_ {
        let starts = (0..self.rows).step_by(usize::try_from(self.chunk).unwrap_or(1).max(1));
        starts.map(|start| {
            let count = self.chunk.min(self.rows - start);
            let part = |tensor: &Tensor| Ok(tensor.f_narrow(0, start, count)?);
            let targets = self.targets.iter().map(part).collect::<Result<_, LayerError>>()?;
            Ok((start, part(&self.x)?, targets))
        })
    }

    /// Writes the gradient of some rows, from `start` on, into that of all rows.
    fn fill(&self, all: &mut Option<Tensor>, start: i64, rows: &Tensor) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let all = match all {
            Some(all) => all,
            None => {
                let options = (rows.kind(), rows.device());
                // A chunk whose loss is a constant has no gradient.
                all.insert(Tensor::f_zeros(self.x.size(), options)?)
            }
        };
        all.f_narrow(0, start, rows.size2()?.0)?.f_copy_(rows)?;
        Ok(())
    }
}

/// Sums over the chunks.
#[derive(Default)]
struct Sums {
    losses: Vec<Tensor>,
    metrics: Vec<f64>,
}

impl Sums {
    fn add(&mut self, run: &LossRun) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        if self.losses.is_empty() {
            self.losses = run.sums.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
            self.metrics.clone_from(&run.metrics);
            return Ok(());
        }
        for (all, own) in self.losses.iter_mut().zip(&run.sums) {
            *all = all.f_add(&own.f_detach()?)?;
        }
        self.metrics.iter_mut().zip(&run.metrics).for_each(|(all, own)| *all += own);
        Ok(())
    }
}

impl ActiveStage<'_> {
    /// Whether the layer at `position` is computed with the losses.
    pub(super) fn is_in_rows(&self, position: usize) -> bool {
        self.config.loss_rows.is_some()
            && self.config.last
            && position + 1 == self.config.named.len()
            && matches!(self.step.feed.mode, Mode::Train | Mode::Evaluate)
            && !self.loss_is_callers()
            && !self.config.losses.is_empty()
    }

    /// Keeps the inputs of the last layer for the backward. Without `graph` there is none, so the
    /// losses and metrics are computed now.
    pub(super) fn run_loss_in_rows(
        &mut self,
        micro_batch: MicroBatch,
        inputs: &[Tensor],
        graph: bool,
        keeps: bool,
    ) -> StageResult<Option<HeldLoss>> {
        let position = self.config.named.len();
        let work = if keeps { ProfiledOp::ForwardKept } else { ProfiledOp::Forward };
        let since = self.before_layer(position, micro_batch, work, [])?;
        let held =
            graph.then(|| HeldLoss::Rows(inputs.iter().map(Tensor::shallow_clone).collect()));
        if !graph {
            let _no_grad = tch::no_grad_guard();
            let mut sums = Sums::default();
            let by_rows = self.by_rows(micro_batch, inputs)?;
            let named = self.named_inputs(micro_batch)?;
            for chunk in by_rows.chunks() {
                let (_, x, targets) = chunk.map_err(in_operation("rows of the loss"))?;
                let (outputs, _) = self.last_layer(micro_batch, x, &named, false)?;
                let run = self.losses_of(micro_batch, &outputs, &targets, false)?;
                sums.add(&run).map_err(in_operation("the losses"))?;
            }
            self.record(micro_batch, sums)?;
        }
        self.after_layer(since, position, micro_batch, work, [])?;
        Ok(held)
    }

    /// Computes the last layer, the losses and their gradients from the layer's inputs. Adds the
    /// gradients of its weights, and returns those of its inputs.
    ///
    /// The first half of a split backward does all of it, since the second would have to make the
    /// outputs again.
    pub(super) fn back_in_rows(
        &mut self,
        micro_batch: MicroBatch,
        inputs: &[Tensor],
        work: ProfiledOp,
    ) -> StageResult<Vec<Option<Tensor>>> {
        let position = self.config.named.len() - 1;
        let since = self.before_layer(position, micro_batch, work, [])?;
        let mut sums = Sums::default();
        // One tensor, which the chunks fill: the gradient is needed whole, but not twice.
        let mut grad: Option<Tensor> = None;
        let by_rows = self.by_rows(micro_batch, inputs)?;
        let named = self.named_inputs(micro_batch)?;
        for chunk in by_rows.chunks() {
            let (start, x, targets) = chunk.map_err(in_operation("rows of the loss"))?;
            let (outputs, island) = self.last_layer(micro_batch, x, &named, true)?;
            let run = self.losses_of(micro_batch, &outputs, &targets, true)?;
            drop(outputs);
            sums.add(&run).map_err(in_operation("the losses"))?;
            let output_grads = self.back_through_loss(Island::of_loss(run.leaves, run.sums))?;
            if let Some(island) = island {
                let accumulators = self.step.gradients.accumulators(position);
                let back = island.backward(output_grads, Vec::new(), accumulators);
                let (own, _) = back.map_err(|source| self.in_layer(position, source))?;
                for own in own.into_iter().flatten() {
                    let filled = by_rows.fill(&mut grad, start, &own);
                    filled.map_err(in_operation("the gradients of the rows"))?;
                }
            }
        }
        self.record(micro_batch, sums)?;
        let shaped = |grad: Tensor| Ok(grad.f_view(by_rows.shape.as_slice())?);
        let grad = grad.map(shaped).transpose();
        let grad = grad.map_err(in_operation("the gradients of the rows"))?;
        self.after_layer(since, position, micro_batch, work, [grad.as_ref()])?;
        match work {
            ProfiledOp::BackwardInput { .. } => {
                if let Some(recorder) = &self.step.recorder {
                    recorder.whole(position);
                }
                let id = gpipe_core::LayerId::from_index(self.config.layers.start + position);
                let later = WeightGradients::none(id);
                self.step.split.entry(micro_batch).or_default().push(later);
            }
            _ => self.summed(micro_batch, position)?,
        }
        Ok(vec![grad])
    }

    fn by_rows(&self, micro_batch: MicroBatch, inputs: &[Tensor]) -> StageResult<ByRows> {
        let of = || {
            let targets = self.fed_tensors(Fed::Targets, micro_batch)?;
            ByRows::new(inputs, &targets, self.config.loss_rows.unwrap_or(usize::MAX))
        };
        of().map_err(in_operation("rows of the loss"))
    }

    /// Runs the last layer on some rows. `named` are the pipeline's inputs by name.
    fn last_layer(
        &self,
        micro_batch: MicroBatch,
        x: Tensor,
        named: &[(String, Tensor)],
        graph: bool,
    ) -> StageResult<(Vec<Tensor>, Option<Island>)> {
        let position = self.config.named.len() - 1;
        let run = self.layer_run(position, micro_batch, named);
        let ran = run.forward(vec![x], Vec::new(), None, graph)?;
        self.inspect(micro_batch, position, ran.inspections)?;
        Ok((ran.outputs, ran.island))
    }

    fn record(&mut self, micro_batch: MicroBatch, sums: Sums) -> StageResult<()> {
        let Sums { losses, metrics } = sums;
        self.step.metric_sums.push((micro_batch, metrics));
        match losses.is_empty() {
            true => Ok(()), // no rows
            false => self.record_losses(micro_batch, &losses),
        }
    }
}
