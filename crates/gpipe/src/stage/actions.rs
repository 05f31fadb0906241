//! The stage's implementation of the runtime's interface, one method per action.

use std::sync::Arc;

use gpipe_bridge::{memory, offload::SavedTensors};
use gpipe_core::{
    Action, Direction, EdgeId, MicroBatch, Nanos, Op, StageId, Transfer, lower::Part,
};
use gpipe_runtime::{
    Keep, StageExecutor, Verdict, Vote,
    stage::{OnEdges, Progress, Span},
};
use tch::Tensor;

use super::{
    Stage, StageResult,
    back::{Weights, arrivals},
    feed::{Feed, Mode, Outcome},
    held::SavedActivations,
    in_operation,
    layers::{ForwardOptions, GraphMode, LastLayer, SavedOps},
    parameters::copy_to_cpu,
    recorder::{LayerBytes, ProfiledOp, Recorder, StageProfile},
    reduction,
    step::{ActiveStage, StepState},
    update::StepUpdate,
};
use crate::{
    arguments::{defined, if_defined},
    error::StageError,
    observer::When,
    value::Value,
};

impl StageExecutor for Stage {
    type Value = Value;
    type Feed = Feed;
    type Outcome = Outcome;
    type Error = StageError;

    fn stage(&self) -> StageId {
        self.config.stage
    }

    fn before(&mut self, action: Action) -> StageResult<()> {
        // A refused allocation that a layer handled itself must not explain a later error.
        let _ = memory::take_refusal();
        self.device.charge_stage().map_err(in_operation("memory"))?;
        self.device.begin_work().map_err(in_operation("memory"))?;
        let live = self.device.memory().map_err(in_operation("memory"))?.live;
        let step = &mut self.active()?.step;
        step.levels.push(live);
        step.action = Some(action);
        self.active()?.observe_action(action, When::Before)?;
        match action.op.communicates() {
            true => Ok(()),
            false => self.device.begin_action().map_err(in_operation("the device")),
        }
    }

    fn after(&mut self, action: Action, time: Nanos) -> StageResult<()> {
        if !action.op.communicates() {
            self.device.end_action().map_err(in_operation("the device"))?;
        }
        self.active()?.observe_action(action, When::After(time))
    }

    fn progress(&mut self) -> StageResult<Progress> {
        self.device.progress().map_err(in_operation("the device"))
    }

    fn failed(&self) -> Option<Action> {
        self.step.as_ref()?.failed.get()
    }

    fn waits(&self, action: Action) -> bool {
        self.device.is_gpu() && self.reads_within(action.op)
    }

    fn is_ready(&mut self, transfer: Transfer, value: &Value) -> StageResult<bool> {
        // The action that the value is for.
        let op = match (transfer.micro_batch, transfer.direction) {
            (Some(m), Direction::Forward) => Op::Forward(m),
            (Some(m), Direction::Backward) => Op::Backward(m),
            (None, _) => Op::Norm,
        };
        match value.ready() {
            Some(event) if !self.device.is_gpu() || self.reads_within(op) => {
                event.is_done().map_err(|error| in_operation("receiving")(error.into()))
            }
            _ => Ok(true),
        }
    }

    fn spans(&mut self) -> StageResult<Vec<Span>> {
        self.device.end_step().map_err(in_operation("the device"))
    }

    fn begin(&mut self, feed: Feed) -> StageResult<()> {
        // Drop an earlier step that never ended, so that it does not count in this step's peak.
        self.step = None;
        self.device.reset_peak(self.config.first_on_device).map_err(in_operation("memory"))?;
        if feed.mode != Mode::Decode || feed.begins {
            self.decoding.clear();
        }
        let is_watched =
            !self.config.observers.is_empty() || self.config.profile || feed.check_finite;
        self.device.begin_step(is_watched).map_err(in_operation("the device"))?;
        let mut step = StepState::new(&self.config, feed);
        self.pending.hand_to(&mut step, &self.config);
        self.step = Some(step);
        self.observe_step(When::Before)
    }

    fn forward(
        &mut self,
        micro_batch: MicroBatch,
        inputs: OnEdges<Value>,
        keep: Keep,
    ) -> StageResult<OnEdges<Value>> {
        self.active()?.forward(micro_batch, inputs, keep)
    }

    fn rematerialize(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        self.active()?.rematerialize(micro_batch)
    }

    fn backward(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Value>,
    ) -> StageResult<OnEdges<Value>> {
        self.active()?.go_back(micro_batch, output_grads, Weights::Now)
    }

    fn backward_input(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Value>,
    ) -> StageResult<OnEdges<Value>> {
        self.active()?.go_back(micro_batch, output_grads, Weights::Later)
    }

    fn backward_weight(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        self.active()?.finish_weights(micro_batch)
    }

    fn tied(&mut self, edge: EdgeId) -> StageResult<Value> {
        self.active()?.tied(edge)
    }

    fn reduce(&mut self, arrived: OnEdges<Value>) -> StageResult<OnEdges<Value>> {
        self.active()?.reduce(arrived)
    }

    fn accept(&mut self, edge: EdgeId, sums: Value) -> StageResult<()> {
        self.active()?.accept(edge, sums)
    }

    fn norm(&mut self) -> StageResult<Vote> {
        self.active()?.norm()
    }

    fn decide(&mut self, votes: &[Vote]) -> StageResult<Verdict> {
        Ok(self.active()?.decide(votes))
    }

    fn update(&mut self, verdict: Verdict) -> StageResult<()> {
        self.active()?.update(verdict)
    }

    fn finish(&mut self) -> StageResult<Outcome> {
        self.active()?.read_values()?;
        let begun = self.step.as_ref().map(|step| step.begun);
        let time = begun.map_or(0, |begun| begun.elapsed().as_nanos());
        self.observe_step(When::After(Nanos(u64::try_from(time).unwrap_or(u64::MAX))))?;
        // A forward alone may have left a write.
        self.store.finish().map_err(in_operation("moving saved activations"))?;
        let mut step = self.end_step()?;
        self.pending.take_from(&mut step);
        // The rest of the step is dropped here, so that the reported memory is what remains.
        let StepState {
            loss_sums,
            metric_sums,
            outputs,
            input_grads,
            verdict,
            levels,
            peak,
            moved,
            recorder,
            ..
        } = step;
        let mut memory = self.device.memory().map_err(in_operation("memory"))?;
        memory.peak = memory.peak.max(peak.get());
        let profile = recorder.map(|mut recorder| {
            let samples = recorder.take();
            StageProfile { samples, layers: self.layer_bytes(&mut recorder) }
        });
        Ok(Outcome {
            loss_sums: in_order(loss_sums),
            metric_sums: in_order(metric_sums),
            outputs: in_order(outputs),
            input_grads: in_order(input_grads),
            verdict,
            memory,
            levels,
            moved,
            profile,
        })
    }

    fn abort(&mut self) {
        self.step = None;
        self.store.forget();
        self.device.abort_step();
        self.decoding.clear();
        self.parameters.forget_last_grads();
    }
}

/// Runs `work`, and collects what its operators save if `saved` is there.
fn saving<T>(
    saved: &mut Option<SavedTensors>,
    work: impl FnOnce() -> StageResult<T>,
) -> StageResult<T> {
    match saved {
        Some(saved) => saved.around(work).map_err(|error| in_operation("offload")(error.into()))?,
        None => work(),
    }
}

/// Sorts values by micro-batch, because schedules run micro-batches in different orders.
fn in_order<T>(mut values: Vec<(MicroBatch, T)>) -> Vec<T> {
    values.sort_by_key(|(micro_batch, _)| *micro_batch);
    values.into_iter().map(|(_, value)| value).collect()
}

impl Stage {
    /// Whether an action looks at values of the device before it returns: the norm, metrics,
    /// outputs and input gradients for the caller, and gradients and updated parameters for the
    /// other replicas. Also whether it waits for copies of offloaded activations.
    fn reads_within(&self, op: Op) -> bool {
        let Some(StepState { feed, .. }) = &self.step else { return false };
        let is_last = |m: MicroBatch| m.index() + 1 == feed.slices.len();
        let sums = |m| self.replicas.is_some() && feed.part == Part::Step && is_last(m);
        let returns_input_grads = feed.input_grads && self.config.edges.boundary_in.is_none();
        let measures = feed.mode == Mode::Evaluate || self.config.training_metrics;
        let measures = self.config.last && measures && !self.config.metrics.is_empty();
        // The loss by rows, and its metrics, are part of the backward.
        let late = feed.mode == Mode::Train && self.config.loss_rows.is_some();
        let offloads = feed.mode == Mode::Train && self.config.remat.offloads();
        match op {
            Op::Norm | Op::Reduce => true,
            Op::Update => self.parameters.sharding.is_some(),
            Op::Forward(_) => {
                let returns_outputs = self.config.last && feed.part == Part::Forward;
                offloads || (measures && !late) || returns_outputs
            }
            Op::Rematerialize(_) => offloads,
            Op::Backward(m) => sums(m) || returns_input_grads || (measures && late),
            Op::BackwardInput(_) => returns_input_grads || (measures && late),
            Op::BackwardWeight(m) => sums(m),
            _ => false,
        }
    }

    fn layer_bytes(&self, recorder: &mut Recorder) -> Vec<LayerBytes> {
        let mut layers = self.parameters.bytes(&self.config);
        for (layer, statistics) in layers.iter_mut().zip(recorder.take_statistics()) {
            layer.statistics = statistics;
        }
        for (position, layer) in layers.iter_mut().enumerate() {
            layer.unsplit = recorder.is_whole(position);
            layer.early = recorder.early_of(position);
            layer.products = recorder.products_of(position);
        }
        layers
    }
}

impl ActiveStage<'_> {
    fn forward(
        &mut self,
        micro_batch: MicroBatch,
        inputs: OnEdges<Value>,
        keep: Keep,
    ) -> StageResult<OnEdges<Value>> {
        // If nothing up to here is trained, there is no backward, so nothing is kept.
        let keep = if self.parameters.trains_up_to_here() { keep } else { Keep::Nothing };
        // Kept all the same, and then moved away: the backward's R brings it back.
        let offloads = keep == Keep::Inputs && self.config.remat.offloads();
        let keep = if offloads { Keep::Activations } else { keep };
        let mut saved = match offloads {
            true => {
                self.before_offload()?;
                let saved = SavedTensors::new(self.device.tch())
                    .map_err(|error| in_operation("offload")(error.into()))?;
                Some(saved)
            }
            false => None,
        };
        let edges = Arc::clone(&self.config.edges);
        let mut inputs = self.receive(inputs)?;
        // As layers see `None`.
        inputs.iter_mut().flat_map(|(_, own)| own).for_each(|own| {
            own.get_or_insert_default();
        });
        let (arrived, mut skips) = arrivals(inputs, edges.boundary_in, &edges.skips_in);
        let inputs = match arrived {
            Some(tensors) => tensors.into_iter().flatten().collect(),
            None => self.fed_inputs(micro_batch)?,
        };
        let stays: Vec<Tensor> = match offloads {
            true => inputs.iter().chain(skips.values()).map(Tensor::shallow_clone).collect(),
            false => Vec::new(),
        };
        let outputs = if keep == Keep::Activations {
            let layers = 0..self.config.layers.len();
            let how = ForwardOptions {
                run: GraphMode::Keep,
                work: ProfiledOp::ForwardKept,
                products: SavedOps::Compute,
                last: LastLayer::Read,
            };
            let ran = saving(&mut saved, || {
                self.run_layers(layers, micro_batch, inputs, &mut skips, how)
            })?;
            self.count_statistics(micro_batch, ran.statistics);
            self.step.held.insert(micro_batch, SavedActivations::whole(ran.islands));
            ran.outputs
        } else {
            self.forward_discarding(micro_batch, inputs, &mut skips, keep)?
        };
        let own = self.config.losses.own_outputs(outputs.len());
        let outputs = self.wanted_positions(micro_batch, outputs)?;
        if matches!(self.step.feed.mode, Mode::Predict | Mode::Decode) && self.config.last {
            let outputs = outputs.into_iter().take(own).collect();
            self.step.outputs.push((micro_batch, outputs));
            return self.finished(Vec::new());
        }
        if self.step.feed.part == Part::Forward && self.config.last {
            let copy =
                || outputs.iter().take(own).map(|own| if_defined(own, copy_to_cpu)).collect();
            let copies = self.device.for_driver(copy).map_err(in_operation("the outputs"))?;
            self.step.outputs.push((micro_batch, copies));
        }
        // A forward that discards leaves the loss to re-materialization, which computes it anyway.
        if keep != Keep::Inputs {
            let graph = keep == Keep::Activations;
            let keeps = self.step.feed.mode == Mode::Train;
            let loss = saving(&mut saved, || self.run_loss(micro_batch, &outputs, graph, keeps))?;
            if let Some(held) = self.step.held.get_mut(&micro_batch) {
                held.loss = loss;
            }
        }
        let outputs = outputs.into_iter().map(defined).collect();
        let outgoing = self.outgoing(edges.boundary_out, outputs, &edges.skips_out, &mut skips);
        drop(skips);
        if let Some(saved) = saved {
            self.move_away(micro_batch, saved, stays)?;
        }
        self.finished(outgoing)
    }

    fn rematerialize(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        if !self.parameters.trains_up_to_here() {
            return Ok(());
        }
        self.bring_back(micro_batch)?;
        self.recompute(micro_batch)?;
        self.device.finish().map_err(in_operation("re-materialization"))
    }

    fn tied(&mut self, edge: EdgeId) -> StageResult<Value> {
        self.reduced()?;
        let (tensors, _) = self.step.gradients.tied(self.config, edge).into_parts();
        self.device
            .send(tensors, self.config.peer(edge))
            .map_err(in_operation("sending tied gradients"))
    }

    fn reduce(&mut self, arrived: OnEdges<Value>) -> StageResult<OnEdges<Value>> {
        self.reduced()?;
        let arrived = self.receive(arrived)?;
        let sums = self.step.gradients.reduce(self.config, arrived);
        let sums = sums.map_err(in_operation("summing tied gradients"))?;
        self.finished(sums.into_iter().map(|(edge, sum)| (edge, sum.into_parts().0)).collect())
    }

    fn accept(&mut self, edge: EdgeId, sums: Value) -> StageResult<()> {
        let received = self.receive(vec![(edge, sums)])?;
        for (edge, sums) in received {
            self.step.gradients.accept_sums(self.config, edge, sums);
        }
        Ok(())
    }

    fn norm(&mut self) -> StageResult<Vote> {
        self.reduced()?;
        let unscale = 1.0 / self.step.feed.loss_scale;
        let statistics = std::mem::take(&mut self.step.statistics);
        if let Some(recorder) = &self.step.recorder {
            recorder.statistics(self.config.named.len(), &statistics);
        }
        let replicas = self.replicas.as_deref_mut();
        let running = self.parameters.running_statistics(self.config, statistics, replicas);
        self.step.running = running.map_err(in_operation("counting batch norm's statistics"))?;
        let vote = self.parameters.prepare(self.config, &self.step.gradients, unscale);
        let mut vote = vote.map_err(in_operation("preparing the update"))?;
        // Here, where exceeding the cap may still fail; the update may not fail.
        self.device.finish().map_err(in_operation("preparing the update"))?;
        // After the norm, which waits for the GPU anyway.
        self.read_values()?;
        // A backward may mask the NaN of the loss, so that the norm is finite. All replicas decide
        // alike.
        if self.config.last
            && !self.config.alone
            && let Some(replicas) = self.replicas.as_deref_mut()
        {
            let any = reduction::any(replicas, self.step.loss_is_not_finite);
            self.step.loss_is_not_finite = any.map_err(in_operation("comparing the losses"))?;
        }
        if self.step.loss_is_not_finite
            && let Some((_, square)) = vote.squares.first_mut()
        {
            *square = f64::NAN;
        }
        Ok(vote)
    }

    fn decide(&self, votes: &[Vote]) -> Verdict {
        let squares: f64 =
            votes.iter().flat_map(|vote| &vote.squares).map(|(_, square)| square).sum();
        let norm = squares.sqrt() / self.step.feed.loss_scale;
        let clip = match self.config.max_norm {
            // The same formula as torch.nn.utils.clip_grad_norm_.
            Some(max) if norm > max => max / (norm + 1e-6),
            _ => 1.0,
        };
        // A run that searches for the layer of a NaN never updates, even if the NaN does not recur.
        let apply = norm.is_finite() && !self.step.feed.check_finite;
        Verdict { apply, norm, scale: clip / self.step.feed.loss_scale }
    }

    fn update(&mut self, verdict: Verdict) -> StageResult<()> {
        self.step.verdict = Some(verdict);
        if verdict.apply {
            // An update that has begun must not fail. `norm` allocated what the update needs, or
            // made sure that it fits.
            self.device.lift_cap().map_err(in_operation("memory"))?;
            let StepState { gradients, running, feed, .. } = &mut *self.step;
            let (scale, lr, number) = (verdict.scale, feed.lr, feed.step + 1);
            let replicas = self.replicas.as_deref_mut();
            let update = StepUpdate { gradients, running, scale, lr, number, replicas };
            let updated = self.parameters.update(self.config, update);
            let updated = updated.and_then(|()| self.device.settle());
            // After a failure, too: an accepted update goes on under the cap.
            let restored = self.device.restore_cap();
            updated.map_err(in_operation("the update"))?;
            restored.map_err(in_operation("memory"))?;
        }
        self.step.gradients.clear();
        self.step.running.clear();
        Ok(())
    }
}
