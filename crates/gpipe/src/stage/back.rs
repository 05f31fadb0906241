//! The backward of a stage, layer by layer from the last: in one piece, or split into input
//! gradients now and weight gradients later.

use std::{collections::HashMap, sync::Arc};

use gpipe_bridge::layout::settled;
use gpipe_core::{EdgeId, MicroBatch};
use gpipe_runtime::stage::OnEdges;
use tch::Tensor;

use super::{
    StageResult,
    held::{HeldLoss, SavedActivations},
    in_operation,
    island::Island,
    not_held,
    parameters::copy_to_cpu,
    recorder::ProfiledOp,
    step::ActiveStage,
};
use crate::{
    error::{LayerError, StageError},
    loss::Term,
    observer::LOSS,
    value::{Value, tensor_bytes},
};

/// When a backward computes the gradients of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// In this action.
    Now,
    /// In the second half of the backward.
    Later,
}

/// Arrived values: the boundary's tensors, and the skips' tensors by index.
pub(super) type Arrivals = (Option<Vec<Option<Tensor>>>, HashMap<usize, Tensor>);

/// Splits arrived values into the boundary's tensors and the skips' tensors.
pub(super) fn arrivals(
    values: OnEdges<Vec<Option<Tensor>>>,
    boundary: Option<EdgeId>,
    skips: &[(EdgeId, usize)],
) -> Arrivals {
    let mut main = None;
    let mut by_index = HashMap::new();
    for (edge, tensors) in values {
        if Some(edge) == boundary {
            main = Some(tensors);
        } else if let Some((_, index)) = skips.iter().find(|(own, _)| *own == edge) {
            by_index.extend(tensors.into_iter().flatten().map(|tensor| (*index, tensor)));
        }
    }
    (main, by_index)
}

impl ActiveStage<'_> {
    /// Computes the gradients of the stage's inputs from those of its outputs.
    pub(super) fn go_back(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Value>,
        weights: Weights,
    ) -> StageResult<OnEdges<Value>> {
        if !self.parameters.trains_up_to_here() {
            return Ok(Vec::new());
        }
        let edges = Arc::clone(&self.config.edges);
        let output_grads = self.receive(output_grads)?;
        let (arrived, mut skip_grads) =
            arrivals(output_grads, edges.boundary_out, &edges.skips_out);
        let Some(mut held) = self.step.held.remove(&micro_batch) else {
            return Err(not_held(micro_batch));
        };
        let mut grads = arrived.unwrap_or_default();
        let kept = held.is_whole();
        let work = match weights {
            Weights::Now => ProfiledOp::Backward { kept },
            Weights::Later => ProfiledOp::BackwardInput { kept },
        };
        if let Some(loss) = held.loss.take() {
            grads = match loss {
                HeldLoss::Rows(inputs) => self.back_in_rows(micro_batch, &inputs, work)?,
                HeldLoss::Island(loss) => {
                    let position = self.config.named.len();
                    let since = self.before_layer(position, micro_batch, work, [])?;
                    let grads = self.back_through_loss(loss)?;
                    let shown = grads.iter().map(Option::as_ref);
                    self.after_layer(since, position, micro_batch, work, shown)?;
                    grads
                }
            };
        } else if let Some(given) = self.step.feed.output_grads(micro_batch) {
            grads =
                self.given_grads(given).map_err(in_operation("the gradients of the outputs"))?;
        }
        loop {
            grads = self.through_islands(&mut held, grads, &mut skip_grads, micro_batch, work)?;
            if !held.has_segments() {
                break;
            }
            self.step.held.insert(micro_batch, held);
            self.recompute(micro_batch)?;
            held = self.step.held.remove(&micro_batch).ok_or_else(|| not_held(micro_batch))?;
        }
        if self.step.feed.input_grads && edges.boundary_in.is_none() {
            let copies = self.device.for_driver(|| self.input_grads(&grads));
            let copies = copies.map_err(in_operation("the gradients of the inputs"))?;
            self.step.input_grads.push((micro_batch, copies));
        }
        let mut back = self.outgoing(edges.boundary_in, grads, &edges.skips_in, &mut skip_grads);
        back.retain(|(edge, _)| edges.gradient.get(edge).copied().unwrap_or(false));
        self.finished(back)
    }

    /// The gradients of the outputs from the loss.
    pub(super) fn back_through_loss(&self, loss: Island) -> StageResult<Vec<Option<Tensor>>> {
        let (losses, scale) = (&self.config.losses.0, self.step.feed.loss_scale);
        let factors = losses.iter().zip(&self.step.feed.denominators);
        // A loss that counts nothing, or is only reported, has no gradient.
        let factors = factors.map(|(term, &denominator)| {
            let has_gradient = term.trains() && denominator != 0.0;
            if has_gradient { scale * term.weight / denominator } else { 0.0 }
        });
        // Across processes a stage does not fail on a loss that is not finite, and on a GPU not
        // yet. NaN gradients then make the norm NaN, so the update is not applied.
        let seeds = loss.seeds(factors, losses.iter().map(Term::trains));
        let back = seeds.and_then(|seeds| loss.backward(seeds, vec![], &mut []));
        let in_loss = |source| StageError::Layer { layer: LOSS.into(), source };
        Ok(back.map_err(in_loss)?.0)
    }

    /// The gradients of the outputs that the caller gave: on the stage's device, scaled as the loss
    /// would be, in the compute dtype.
    fn given_grads(&self, given: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let scale = self.step.feed.loss_scale;
        let own = |grad: &Tensor| {
            // Not the caller's tensor itself, which may become the sum of a parameter's gradients.
            let grad = self.device.own(grad)?.f_mul_scalar(scale)?;
            Ok(settled(grad.f_to_kind(self.config.precision.compute)?)?)
        };
        given.iter().map(|grad| grad.as_ref().map(own).transpose()).collect()
    }

    /// Copies of the gradients of the inputs, for the caller: unscaled, in the dtype of parameters.
    fn input_grads(&self, grads: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let scale = 1.0 / self.step.feed.loss_scale;
        let own = |grad: &Tensor| {
            let grad = grad.f_to_kind(self.config.precision.master)?.f_mul_scalar(scale)?;
            copy_to_cpu(&grad)
        };
        grads.iter().map(|grad| grad.as_ref().map(own).transpose()).collect()
    }

    /// Runs the backward through the islands in `held`. `grads` are the gradients of the last
    /// island's outputs.
    fn through_islands(
        &mut self,
        held: &mut SavedActivations,
        mut grads: Vec<Option<Tensor>>,
        skip_grads: &mut HashMap<usize, Tensor>,
        micro_batch: MicroBatch,
        work: ProfiledOp,
    ) -> StageResult<Vec<Option<Tensor>>> {
        while let Some(island) = held.pop_island() {
            let position = island.position(self.config.layers.start);
            let shown = grads.iter().map(Option::as_ref);
            let since = self.before_layer(position, micro_batch, work, shown)?;
            let stashes: Vec<Option<Tensor>> = island
                .stashed_names()
                .map(|name| self.skip_stashed_by(position, name))
                .map(|index| index.and_then(|index| skip_grads.remove(&index)))
                .collect();
            let whole = matches!(work, ProfiledOp::Backward { .. });
            let back = if whole {
                island.backward(grads, stashes, self.step.gradients.accumulators(position))
            } else {
                let turn = self.step.gradients.turn(position, micro_batch);
                island.backward_input(grads, stashes, turn).map(|(back, weights)| {
                    if let Some(recorder) =
                        self.step.recorder.as_ref().filter(|_| weights.is_whole())
                    {
                        recorder.whole(position);
                    }
                    self.step.split.entry(micro_batch).or_default().push(weights);
                    back
                })
            };
            let (inputs, pops) = back.map_err(|source| self.in_layer(position, source))?;
            if let Some(recorder) =
                self.step.recorder.as_ref().filter(|_| micro_batch.0 == 0 && !whole)
            {
                let sums = self.step.gradients.accumulators(position).iter().flatten();
                recorder.early(position, sums.map(tensor_bytes).sum());
            }
            let shown = inputs.iter().chain(pops.iter().map(|(_, grad)| grad));
            let shown = shown.map(Option::as_ref);
            self.after_layer(since, position, micro_batch, work, shown)?;
            if whole {
                self.summed(micro_batch, position)?;
            }
            grads = inputs;
            skip_grads.extend(pops.into_iter().filter_map(|(index, grad)| Some((index, grad?))));
        }
        Ok(grads)
    }

    /// Computes what the first half left and adds it to the step's gradients, in the order of whole
    /// backwards.
    pub(super) fn finish_weights(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        for weights in self.step.split.remove(&micro_batch).unwrap_or_default() {
            let position = weights.position(self.config.layers.start);
            let work = ProfiledOp::BackwardWeight;
            let since = self.before_layer(position, micro_batch, work, [])?;
            let finished = weights.finish(self.step.gradients.accumulators(position));
            finished.map_err(|source| self.in_layer(position, source))?;
            self.after_layer(since, position, micro_batch, work, [])?;
            self.summed(micro_batch, position)?;
        }
        self.device.finish().map_err(in_operation("the gradients of the weights"))
    }

    /// Records that `micro_batch` is summed in the gradients of the layer at `position`.
    pub(super) fn summed(&mut self, micro_batch: MicroBatch, position: usize) -> StageResult<()> {
        self.step.gradients.have_summed(position, micro_batch);
        self.complete(micro_batch, position)
    }

    pub(super) fn in_layer(&self, position: usize, source: LayerError) -> StageError {
        let named = &self.config.named[position];
        named.layer.failed(&source);
        StageError::Layer { layer: named.name.clone(), source }
    }
}
