//! A training step in parts: forwards, backwards and the update as separate calls, with the
//! caller's own work between them.
//!
//! ```text
//! forward     F of all micro-batches; the stages keep what the backwards need
//! backward    R and B of one forward; gradients of parameters accumulate on the stages
//! accumulate  F and B under the pipeline's schedule, with its loss
//! update      tied gradients, norm, vote, update
//! ```
//!
//! Each part runs a section of the list that a whole step runs ([`gpipe_core::lower::Part`]).

use gpipe_core::{Bytes, lower::Part, simulate::Timeline};
use gpipe_runtime::Ran;
use tch::Tensor;

use super::{
    Pipeline,
    accumulated::{Accumulated, Count, add_up, listed, mixed},
    mini_batch::MiniBatch,
    outputs::Outputs,
    outputs_of,
    report::{self, DeviceReport, Evaluation, UpdateReport},
    run::Task,
};
use crate::{
    arguments::{IntoTensors, Tensors, defined},
    error::{Error, Result},
    loss::total,
    spec::TensorSpec,
    stage::{Stage, feed::Mode, gradients::sum_in_order},
};

impl Pipeline {
    /// Runs the forwards of a mini-batch in training mode. The stages keep what
    /// [`Pipeline::backward`] needs, under the pipeline's re-materialization policy.
    ///
    /// No backward directly follows a forward here, unless M is 1. By default every micro-batch is
    /// therefore recomputed in its backward.
    ///
    /// Dropout is keyed by the global number of each sample. The samples of further forwards and of
    /// [`Pipeline::accumulate`] continue these numbers until the update. The update applies the
    /// statistics of batch norms of forwards whose backward has run. Several forwards may be open
    /// at once, up to [`PipelineBuilder::open_forwards`](crate::PipelineBuilder::open_forwards).
    ///
    /// # Errors
    /// As for [`Pipeline::predict`]; [`Error::Setting`] if too many forwards are open. Gradients
    /// and other open forwards remain as they were.
    pub fn forward(&mut self, inputs: impl IntoTensors) -> Result<Outputs> {
        self.needs_own_parameters("run a forward")?;
        self.needs_unreduced("another forward")?;
        let most = self.update.forwards_max;
        if self.update.open.with(|open| open.numbers.len()) >= most {
            return Err(Error::Setting(format!(
                "{most} forwards are open: run their backward or drop their outputs first, or \
                raise open_forwards"
            )));
        }
        let inputs = self.model.listed_inputs(inputs)?;
        let mut batch = self.check(inputs, None, true)?;
        let first = batch.slices.first().map_or(0, |slice| slice.first);
        self.continue_samples(&mut batch);
        let given = batch.whole.iter().filter(|own| own.defined());
        let given = given.map(|own| Ok((own.shallow_clone(), own.f_internal_version()?)));
        let given = given.collect::<Result<_>>()?;
        let number = self.update.begin_forward();
        let task = Task { forward: number, ..Task::new(Mode::Train, Part::Forward, &batch) };
        self.update.open.with(|open| open.numbers.insert(number));
        // From here on an error drops the outputs, which frees what stages have kept already.
        let mut outputs = Outputs {
            tensors: Vec::new(),
            number,
            first,
            slices: batch.slices.clone(),
            rows: Vec::new(),
            specs: batch.specs.clone(),
            given,
            inputs: Vec::new(),
            timeline: Timeline::default(),
            held: Vec::new(),
            open: self.update.open.clone(),
            errands: self.engine.pool.errands(),
        };
        let ran = self.run(task)?;
        self.update.samples += batch.samples;
        if self.model.has_named_inputs() {
            outputs.inputs = batch.inputs;
        }
        outputs.held = self.added(&ran);
        outputs.timeline = ran.timeline.clone();
        let made = outputs_of(ran);
        let rows = |own: &Tensor| match own.defined() {
            true => own.size().first().copied().unwrap_or(0),
            false => 0,
        };
        outputs.rows = made.iter().map(|own| own.iter().map(rows).collect()).collect();
        for tensor in self.joined(made)? {
            let differentiable = TensorSpec::of(&tensor).is_float();
            let leaf = if differentiable { tensor.f_set_requires_grad(true)? } else { tensor };
            outputs.tensors.push(leaf);
        }
        Ok(outputs)
    }

    /// Goes back through a forward: adds the gradients of all parameters to those that have
    /// accumulated, and frees what the stages kept.
    ///
    /// `gradients` are those of the outputs: one for each output, of its shape. The result has one
    /// entry for each input by position: its gradient, which has the input's shape and is on the
    /// CPU, in float32 (or float64). The entry of an integer input is `None`. The gradient of a
    /// shared input is the sum over all micro-batches. With replicas, gradients cover this
    /// replica's samples. All entries are `None` unless the builder was told
    /// [`PipelineBuilder::input_gradients`](crate::PipelineBuilder::input_gradients).
    ///
    /// # Errors
    /// [`Error::Input`] and [`Error::Setting`] before anything runs: the forward is still open
    /// then. An input that was changed in place since the forward is an [`Error::Input`].
    ///
    /// After an error of the backward itself, all that has accumulated since the last update is
    /// discarded, and all forwards are closed. Parameters and optimizer state are unchanged.
    pub fn backward(
        &mut self,
        outputs: &Outputs,
        gradients: impl IntoTensors,
    ) -> Result<Vec<Option<Tensor>>> {
        self.needs_own_parameters("run a backward")?;
        self.needs_unreduced("another backward")?;
        self.needs_open(outputs)?;
        match &self.update.accumulated {
            None | Some(Accumulated::Given) => {}
            Some(_) => return Err(mixed()),
        }
        for (input, version) in &outputs.given {
            if input.f_internal_version()? != *version {
                return Err(Error::Input(format!(
                    "an input {} was changed in place since its forward, which would give wrong \
                    gradients: make a new tensor, or run the forward again",
                    TensorSpec::of(input)
                )));
            }
        }
        let gradients = self.check_gradients(outputs, gradients.into_tensors())?;
        let mut first = vec![0; gradients.len()];
        let of = |micro_batch: usize| -> Result<Vec<Option<Tensor>>> {
            let rows = outputs.rows.get(micro_batch);
            let narrow = |(at, (grad, first)): (usize, (&Option<Tensor>, &mut i64))| {
                let count = rows.and_then(|own| own.get(at)).copied().unwrap_or(0);
                let from = std::mem::replace(first, *first + count);
                grad.as_ref().map(|grad| Ok(grad.f_narrow(0, from, count)?)).transpose()
            };
            gradients.iter().zip(&mut first).enumerate().map(narrow).collect()
        };
        let batch = MiniBatch {
            slices: outputs.slices.clone(),
            specs: outputs.specs.clone(),
            inputs: outputs.inputs.iter().map(|own| shallow(own)).collect(),
            output_grads: (0..outputs.slices.len()).map(of).collect::<Result<_>>()?,
            ..MiniBatch::default()
        };
        let task =
            Task { forward: outputs.number, ..Task::new(Mode::Train, Part::Backward, &batch) };
        let ran = self.run(task).or_else(|error| self.lose_update(error))?;
        outputs.open.close(outputs.number);
        self.update.accumulated = Some(Accumulated::Given);
        self.joined_input_grads(ran, &outputs.specs).or_else(|error| self.lose_update(error))
    }

    /// Returns an error if the backward of a forward can no longer run here.
    pub(super) fn needs_open(&self, outputs: &Outputs) -> Result<()> {
        if !outputs.open.is_same(&self.update.open) {
            return Err(Error::Input("these outputs are another pipeline's".into()));
        }
        if !outputs.open.with(|open| open.numbers.contains(&outputs.number)) {
            return Err(Error::Input(
                "these outputs have no backward any more: it has run, or an update or an error \
                ended it; run the forward again"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Joins the gradients of each input, in micro-batch order. `specs`: each micro-batch's inputs.
    /// Where only some micro-batches use an input, the gradient of the others is zero.
    pub(super) fn joined_input_grads(
        &self,
        ran: Ran<Stage>,
        specs: &[Vec<TensorSpec>],
    ) -> Result<Vec<Option<Tensor>>> {
        let by_micro_batch = ran.outcomes.into_iter().next().map(|first| first.input_grads);
        let by_micro_batch = by_micro_batch.unwrap_or_default();
        let join = |at: usize| {
            let of =
                |grads: &Vec<Option<Tensor>>| grads.get(at)?.as_ref().map(Tensor::shallow_clone);
            let parts: Vec<Option<Tensor>> = by_micro_batch.iter().map(of).collect();
            let Some(one) = parts.iter().flatten().next() else { return Ok(None) };
            // Every micro-batch had the whole of a shared input.
            if self.model.sequence.inputs.shared.contains(&at) {
                return Ok(sum_in_order(parts)?);
            }
            let options = (one.kind(), one.device());
            let whole =
                parts.into_iter().zip(specs).map(|(part, specs)| match (part, specs.get(at)) {
                    (None, Some(spec)) => Tensor::f_zeros(spec.shape.as_slice(), options),
                    (part, _) => Ok(part.unwrap_or_default()),
                });
            let whole = whole.collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(Some(Tensor::f_cat(&whole, 0)?))
        };
        (0..self.model.inputs).map(join).collect()
    }

    /// Trains on one mini-batch without an update: runs forwards and backwards under the pipeline's
    /// schedule, with its loss, and adds the gradients to those that have accumulated.
    ///
    /// Returns the loss and, with [`PipelineBuilder::training_metrics`], the metrics of this
    /// mini-batch. [`Pipeline::count_of`] tells its count beforehand. One call with
    /// [`Count::Total`] and one [`Pipeline::update`] equal [`Pipeline::train_step`] to the bit.
    ///
    /// [`PipelineBuilder::training_metrics`]: crate::PipelineBuilder::training_metrics
    ///
    /// # Errors
    /// As for [`Pipeline::train_step`] before anything runs. After an error of the run itself, all
    /// that has accumulated since the last update is discarded, and all forwards are closed.
    pub fn accumulate(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
        count: Count,
    ) -> Result<Evaluation> {
        let inputs = self.model.listed_inputs(inputs)?;
        let targets = self.model.listed_targets(targets)?;
        Ok(self.accumulated(inputs, targets, count, false)?.0)
    }

    /// As [`Pipeline::accumulate`]. Also returns the run, with the gradients of the inputs if
    /// `input_grads` is set.
    pub(super) fn accumulated(
        &mut self,
        inputs: Vec<Tensor>,
        targets: Vec<Tensor>,
        count: Count,
        input_grads: bool,
    ) -> Result<(Evaluation, Ran<Stage>)> {
        if self.model.losses.is_empty() {
            return Err(Error::Setting(
                "this pipeline cannot accumulate gradients: give the builder a loss".into(),
            ));
        }
        self.needs_own_parameters("accumulate")?;
        self.needs_unreduced("another mini-batch")?;
        let mut batch = self.check(inputs, Some(&targets), true)?;
        let own = self.model.counts(&batch.whole, &targets)?;
        let metric_counts = self.training_metric_counts(&targets)?;
        let accumulated = self.update.counting(count, &own)?;
        let denominators = match &accumulated {
            Accumulated::Of { total, .. } => total.clone(),
            _ => vec![1.0],
        };
        self.continue_samples(&mut batch);
        let task =
            Task { denominators, input_grads, ..Task::new(Mode::Train, Part::Gradients, &batch) };
        let mut ran = match self.run(task.clone()) {
            Ok(ran) => ran,
            Err(error) => {
                let error = self.name_the_layer(error, task);
                return self.lose_update(error);
            }
        };
        let complete = self.of_all_replicas(&mut ran.outcomes);
        let losses = complete.and_then(|()| self.finite_losses(&ran.outcomes, &own));
        let losses = losses.or_else(|error| self.lose_update(error))?;
        self.update.samples += batch.samples;
        self.update.accumulated = Some(accumulated);
        self.update.add_losses(&losses);
        let metrics = self.model.measured(&ran.outcomes, &metric_counts);
        Ok((Evaluation::new(losses, metrics), ran))
    }

    /// The count of the pipeline's loss over a mini-batch with these targets: the number that the
    /// sum of losses is divided by. Add up those of several mini-batches for [`Count::Total`].
    ///
    /// # Errors
    /// If there is no loss, if there are several, or if the loss takes inputs: see
    /// [`Pipeline::counts_of`]. If no target counts, or an error of the loss.
    pub fn count_of(&self, targets: impl IntoTensors) -> Result<f64> {
        match &self.model.losses.0[..] {
            [_] if !self.model.losses.take_inputs() => {
                Ok(self.model.counts(&[], &self.model.listed_targets(targets)?)?[0])
            }
            [] => Err(Error::Setting("there is no loss: give the builder one".into())),
            _ => Err(Error::Setting(
                "there are several losses, or a loss takes inputs: call counts_of".into(),
            )),
        }
    }

    /// The count of each loss over a mini-batch, in the order in which the builder was given the
    /// losses, for [`Count::Totals`].
    ///
    /// # Errors
    /// If no loss counts any target, or an error of a loss. One loss may have a count of 0 if
    /// another counts something.
    pub fn counts_of(
        &self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
    ) -> Result<Vec<f64>> {
        let inputs = self.model.listed_inputs(inputs)?;
        self.model.counts(&inputs, &self.model.listed_targets(targets)?)
    }

    /// Applies the gradients that have accumulated, once, and begins a new update.
    ///
    /// Forwards that are still open are closed, because their parameters have changed.
    ///
    /// # Errors
    /// [`Error::Setting`] and [`Error::Input`] before anything runs: the gradients remain.
    /// [`Error::Step`], [`Error::NotFinite`] and [`Error::Peer`] from the update: nothing is
    /// updated then, except as [`Pipeline::accept_torn_update`] says, and the gradients are
    /// discarded. In float16, an update whose gradients overflow is not an error: it is reported as
    /// skipped.
    pub fn update(&mut self) -> Result<UpdateReport> {
        if self.training.optimizer.is_none() {
            return Err(Error::Setting(
                "this pipeline cannot update: give the builder an optimizer".into(),
            ));
        }
        self.needs_own_parameters("update")?;
        let lr = self.checked_learning_rate()?;
        match &self.update.accumulated {
            None => {
                return Err(Error::Setting(
                    "there is no gradient to apply: call backward or accumulate first".into(),
                ));
            }
            Some(Accumulated::Of { total, seen }) if !add_up(seen, total) => {
                return Err(Error::Input(format!(
                    "the total count was {}, the mini-batches count {}: accumulate the others \
                    first, or call discard_update",
                    listed(total),
                    listed(seen)
                )));
            }
            Some(_) => {}
        }
        let batch = MiniBatch::default();
        let part = if self.update.reduced { Part::Update } else { Part::Finish };
        let (scale, divisor) = (self.training.loss_scale.scale, self.update.divisor());
        let task = Task { divisor, ..Task::new(Mode::Train, part, &batch) };
        let losses = std::mem::take(&mut self.update.losses);
        let ran = self.run(task).or_else(|error| self.lose_update(error))?;
        self.update.reset();
        let verdict = ran.outcomes.first().and_then(|outcome| outcome.verdict);
        // Another replica may still copy parameters that this one has updated.
        if let Err(error) = self.meet_shards() {
            if verdict.is_some_and(|verdict| verdict.apply) {
                self.training.torn = Some("the exchange of parameters after an update");
            }
            return Err(error);
        }
        let skipped = self.conclude(verdict)?;
        let program = self.program(part, self.engine.micro_batches)?;
        let devices = DeviceReport::of(&program, self.engine.link_capacity, &ran);
        Ok(UpdateReport {
            step: self.training.step,
            skipped,
            loss: (!losses.is_empty()).then(|| total(&losses)),
            count: report::count(&losses),
            losses,
            grad_norm: verdict.map_or(0.0, |verdict| verdict.norm),
            clip_scale: verdict.map_or(1.0, |verdict| verdict.scale * scale * divisor),
            lr,
            loss_scale: scale,
            devices,
            timeline: ran.timeline,
        })
    }

    /// Discards the gradients that have accumulated since the last update, and closes all open
    /// forwards. Parameters and optimizer state are unchanged.
    ///
    /// # Errors
    /// If a device does not answer.
    pub fn discard_update(&mut self) -> Result<()> {
        self.update.reset();
        self.visit_all(|_| |stage: &mut Stage| stage.pending().clear())?;
        Ok(())
    }

    /// Waits until the stages have freed what dropped outputs held. Values between stages are freed
    /// by whoever drops them last, so a stage alone cannot know.
    pub(super) fn await_dropped(&mut self) -> Result<()> {
        if self.update.open.with(|open| std::mem::take(&mut open.dropped)) {
            self.visit_all(|_| |_: &mut Stage| ())?;
        }
        Ok(())
    }

    /// After an error in a part that changes gradients: discards the update.
    pub(super) fn lose_update<T>(&mut self, error: Error) -> Result<T> {
        // If the pipeline is unusable, nothing of it can be used again.
        let _ = self.discard_update();
        Err(error)
    }

    /// Returns an error if an update is under way.
    pub(super) fn needs_no_update(&self, what: &str) -> Result<()> {
        let open = self.update.open.with(|open| !open.numbers.is_empty());
        if self.update.accumulated.is_none() && !open {
            return Ok(());
        }
        Err(Error::Setting(format!(
            "an update is under way, with gradients or open forwards: update or discard_update \
            before you {what}"
        )))
    }

    /// Returns an error if the gradients of the update are final already.
    fn needs_unreduced(&self, what: &str) -> Result<()> {
        match self.update.reduced {
            false => Ok(()),
            true => Err(Error::Setting(format!(
                "the gradients of this update were read or changed, so {what} cannot be added: \
                update or discard_update first"
            ))),
        }
    }

    /// Numbers the samples of `batch` after those of the update so far.
    fn continue_samples(&self, batch: &mut MiniBatch) {
        batch.slices.iter_mut().for_each(|slice| slice.first += self.update.samples);
    }

    fn check_gradients(
        &self,
        outputs: &Outputs,
        gradients: Tensors,
    ) -> Result<Vec<Option<Tensor>>> {
        let Tensors { positional: gradients, named } = gradients;
        if let Some((name, _)) = named.first() {
            return Err(Error::Input(format!(
                "a gradient is named '{name}': outputs have no names, give their gradients in order"
            )));
        }
        let gradients: Vec<Option<Tensor>> = gradients.into_iter().map(defined).collect();
        if gradients.len() != outputs.tensors.len() {
            return Err(Error::Input(format!(
                "{} gradients for {} outputs: give one for each, or None",
                gradients.len(),
                outputs.tensors.len()
            )));
        }
        if gradients.iter().all(Option::is_none) {
            return Err(Error::Input(
                "no output has a gradient: call backward on a loss of the outputs first, or drop \
                them. If the gradients come from another pipeline, build it with \
                `input_gradients()`: autograd ends at a pipeline, so give its `backward`'s result \
                to this one"
                    .into(),
            ));
        }
        let checked = gradients.into_iter().zip(&outputs.tensors).enumerate();
        let check = |(index, (grad, output)): (usize, (Option<Tensor>, &Tensor))| {
            let Some(grad) = grad else { return Ok(None) };
            let (given, own) = (TensorSpec::of(&grad), TensorSpec::of(output));
            if given != own || !own.is_float() {
                return Err(Error::Input(format!(
                    "output {index} is {own}, the gradient for it {given}: shapes and dtypes must \
                    be equal, and integers have no gradient"
                )));
            }
            Ok(Some(grad.f_detach()?.f_to(tch::Device::Cpu)?))
        };
        checked.map(check).collect()
    }

    /// Bytes that a run added to what each device holds.
    fn added(&self, ran: &Ran<Stage>) -> Vec<Bytes> {
        let of_device = |device: usize| {
            let stages = ran.outcomes.iter().zip(&self.engine.placement);
            let mut own = stages.filter(|(_, own)| **own == device).map(|(outcome, _)| outcome);
            let before = own.clone().filter_map(|own| own.levels.first()).min().copied();
            let after = own.next_back().map(|own| own.memory.live);
            Bytes(after.unwrap_or(0).saturating_sub(before.unwrap_or(0)))
        };
        (0..self.engine.devices()).map(of_device).collect()
    }
}

fn shallow(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}
