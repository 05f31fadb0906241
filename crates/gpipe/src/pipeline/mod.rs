//! The pipeline as its user sees it: built once, then `train_step`, `evaluate` and `predict` in any
//! order.
//!
//! - [`model`]: what is computed; [`training`]: what changes from step to step
//! - [`run`]: the stages, and how a step runs on them
//! - [`builder`]: checks the settings and places stages on devices
//! - [`mini_batch`]: checks a mini-batch and cuts it into micro-batches; [`padding`]: cuts off
//!   columns of a micro-batch that are only padding
//! - [`peers`]: other processes, as the runtime sees them; [`pack`]: a step's results as bytes;
//!   [`expected`]: upper bounds for messages
//! - [`replicas`]: this replica's samples, and sums over all replicas
//! - [`parts`]: forwards, backwards and the update as separate calls
//! - [`accumulated`]: what an update in parts has accumulated so far
//! - [`outputs`]: what a forward alone returns, and which forwards are open
//! - [`gradients`]: the gradients between a backward and the update
//! - [`differences`]: gradients against finite differences
//! - [`reconfigure`]: changes between steps of what is trained, and how
//! - [`decoding`]: outputs position by position, with caches of earlier positions
//! - [`balance`]: where a sequence is cut
//! - [`parameters`]: reads and writes parameters, gradients and averages
//! - [`state`]: saves and restores everything that a pipeline keeps between two steps
//! - [`topology`]: the edges that result from cutting a sequence
//! - [`cost_inputs`]: the settings that costs depend on, and estimated costs
//! - [`report`]: what a step returns
//! - here: training, evaluating and predicting

mod accumulated;
mod balance;
mod builder;
mod cost_inputs;
mod decoding;
mod differences;
mod expected;
mod gradients;
mod mini_batch;
mod model;
mod outputs;
mod pack;
mod padding;
mod parameters;
mod parts;
mod peers;
mod reconfigure;
mod replicas;
mod report;
mod run;
mod state;
mod topology;
mod training;

pub use accumulated::Count;
use accumulated::UpdateInParts;
pub use balance::Balance;
pub use builder::{PipelineBuilder, TIMEOUT_MAX};
pub use decoding::{Decoding, GroupStep};
pub use differences::Difference;
use gpipe_core::{
    lower::Part,
    simulate::{Costs, Timeline, median, simulate},
    validate::{HeldMicroBatches, Invalid, validate},
};
use gpipe_runtime::{Ran, Verdict};
use model::Model;
pub use outputs::Outputs;
#[cfg(feature = "fuzzing")]
pub(crate) use pack::fuzzed;
pub use padding::Padding;
pub use report::{DeviceReport, Evaluation, StepReport, UpdateReport};
use run::{Caches, Engine, Task};
pub use state::RunSettings;
use tch::Tensor;
use training::Training;

use crate::{
    arguments::{IntoTensors, Tensors},
    error::{Error, Result},
    loss::{LossTerm, not_finite},
    sequence::Sequence,
    stage::{
        Stage,
        feed::{Mode, Outcome},
        recorder::StageProfile,
    },
};

/// A model cut into stages on devices, ready to run.
///
/// Calls may come in any order. A failed step leaves parameters and optimizer state unchanged,
/// except after a torn update or an in-place change: see [`Pipeline::accept_torn_update`].
pub struct Pipeline {
    /// Runs steps on the stages.
    engine: Engine,
    /// What is computed.
    model: Model,
    /// What changes from step to step.
    training: Training,
    /// The update that runs in parts, if one does.
    update: UpdateInParts,
    /// The settings as the caller gave them, for [`reconfigure`].
    settings: PipelineBuilder,
    /// The caller's tensors of tied weights of which further stages have copies, by name.
    shared_ties: Vec<(String, Tensor)>,
    /// Results that are computed once and reused.
    caches: Caches,
}

impl Pipeline {
    /// Starts building a pipeline for `sequence`. `inputs` describes a mini-batch (one
    /// [`TensorSpec`](crate::TensorSpec) or several), so that `build` can name a layer whose
    /// shapes do not fit.
    pub fn builder(sequence: Sequence, inputs: impl Into<builder::Inputs>) -> PipelineBuilder {
        PipelineBuilder::new(sequence, inputs.into())
    }

    /// Trains on one mini-batch.
    ///
    /// `inputs` and `targets` have the same number of samples (their first size), at least 1.
    /// Gradients of all micro-batches are computed with the same parameters, summed, and applied
    /// once.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Model`] and [`Error::Setting`] before anything runs;
    /// [`Error::Step`], [`Error::NotFinite`] and [`Error::Peer`] from the step. Nothing is updated
    /// then, except as [`Pipeline::accept_torn_update`] says. In float16, a step whose gradients
    /// overflow is not an error: it is reported as skipped.
    pub fn train_step(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
    ) -> Result<StepReport> {
        Ok(self.train(inputs.into_tensors(), targets.into_tensors())?.0)
    }

    /// As [`Pipeline::train_step`]. If layers are profiled, also returns each stage's profile.
    pub(crate) fn train(
        &mut self,
        inputs: Tensors,
        targets: Tensors,
    ) -> Result<(StepReport, Vec<StageProfile>)> {
        self.needs_loss_and_optimizer()?;
        let lr = self.checked_learning_rate()?;
        self.needs_own_parameters("train")?;
        self.needs_no_update("train on a whole step")?;
        let inputs = self.model.listed_inputs(inputs)?;
        let targets = self.model.listed_targets(targets)?;
        let batch = self.check(inputs, Some(&targets), true)?;
        let denominators = self.model.counts(&batch.whole, &targets)?;
        let counts = self.training_metric_counts(&targets)?;
        let scale = self.training.loss_scale.scale;
        let task = Task {
            denominators: denominators.clone(),
            ..Task::new(Mode::Train, Part::Step, &batch)
        };
        let mut ran = match self.run(task.clone()) {
            Ok(ran) => ran,
            Err(error) => return Err(self.name_the_layer(error, task)),
        };
        let verdict = ran.outcomes.first().and_then(|outcome| outcome.verdict);
        if let Err(error) = self.of_all_replicas(&mut ran.outcomes) {
            if verdict.is_some_and(|verdict| verdict.apply) {
                self.training.torn = Some("the exchange of losses after an update");
            }
            return Err(error);
        }
        let losses = self.finite_losses(&ran.outcomes, &denominators)?;
        let skipped = match self.conclude(verdict) {
            Ok(skipped) => skipped,
            Err(error) => return Err(self.name_the_layer(error, task)),
        };
        let metrics = self.model.measured(&ran.outcomes, &counts);
        let step = report::Numbers {
            step: self.training.step,
            skipped,
            lr,
            loss_scale: scale,
            losses,
            metrics,
        };
        let profiles = ran.outcomes.iter_mut().filter_map(|own| own.profile.take()).collect();
        let program = self.program(Part::Step, batch.slices.len())?;
        let capacity = self.engine.link_capacity;
        let report = StepReport::new(step, &program, capacity, ran, verdict);
        Ok((report, profiles))
    }

    /// The losses of a run.
    ///
    /// # Errors
    /// If one is not finite. In one process the last stage has already reported it. Across
    /// processes only the driver sees every process's result.
    fn finite_losses(&self, outcomes: &[Outcome], counts: &[f64]) -> Result<Vec<LossTerm>> {
        let losses = self.model.losses_of(outcomes, counts);
        match losses.iter().find(|term| term.weight != 0.0 && !term.value().is_finite()) {
            None => Ok(losses),
            Some(term) => {
                Err(Error::NotFinite { what: not_finite(&term.name, &term.value().to_string()) })
            }
        }
    }

    fn needs_loss_and_optimizer(&self) -> Result<()> {
        if !self.model.losses.is_empty() && self.training.optimizer.is_some() {
            return Ok(());
        }
        Err(Error::Setting(
            "this pipeline cannot train: give the builder a loss and an optimizer".into(),
        ))
    }

    /// The learning rate of the next update.
    fn checked_learning_rate(&self) -> Result<f64> {
        let lr = self.training.base_lr();
        if !lr.is_finite() || lr < 0.0 {
            return Err(Error::Setting(format!(
                "the learning rate lr is {lr}: set a number of at least 0"
            )));
        }
        Ok(self.training.learning_rate())
    }

    /// The counts of the metrics, if they are computed in training.
    fn training_metric_counts(&self, targets: &[Tensor]) -> Result<Vec<f64>> {
        match self.model.training_metrics {
            true => self.model.metric_counts(targets),
            false => Ok(Vec::new()),
        }
    }

    /// Counts the step that the stages decided on. Returns whether float16 gradients overflowed, so
    /// that the update was skipped.
    ///
    /// # Errors
    /// If the norm is not finite, so that nothing was updated.
    fn conclude(&mut self, verdict: Option<Verdict>) -> Result<bool> {
        let applied = verdict.is_some_and(|verdict| verdict.apply);
        let skipped = !applied && self.training.loss_scale.step_overflowed();
        if let Some(verdict) = verdict.filter(|verdict| !verdict.apply && !skipped) {
            return Err(Error::NotFinite { what: format!("the gradient norm ({})", verdict.norm) });
        }
        if !skipped {
            self.training.step += 1;
            self.training.loss_scale.step_was_good();
        }
        Ok(skipped)
    }

    /// Returns the mean loss over a mini-batch, without dropout and without an update. The result
    /// is the same for every K.
    ///
    /// # Errors
    /// As for [`Pipeline::train_step`].
    pub fn evaluate(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
    ) -> Result<Evaluation> {
        if self.model.losses.is_empty() {
            return Err(Error::Setting(
                "this pipeline cannot evaluate: give the builder a loss".into(),
            ));
        }
        let inputs = self.model.listed_inputs(inputs)?;
        let targets = self.model.listed_targets(targets)?;
        let batch = self.check(inputs, Some(&targets), false)?;
        let denominators = self.model.counts(&batch.whole, &targets)?;
        let counts = self.model.metric_counts(&targets)?;
        let task = Task {
            denominators: denominators.clone(),
            ..Task::new(Mode::Evaluate, Part::Inference, &batch)
        };
        let ran = match self.run(task.clone()) {
            Ok(ran) => ran,
            Err(error) => return Err(self.name_the_layer(error, task)),
        };
        let losses = self.finite_losses(&ran.outcomes, &denominators)?;
        let metrics = self.model.measured(&ran.outcomes, &counts);
        Ok(Evaluation::new(losses, metrics))
    }

    /// Returns the model's outputs for a mini-batch, without dropout, in sample order.
    ///
    /// Outputs are on the CPU, in float32 if the arithmetic is in bfloat16 or float16. They are not
    /// checked: a NaN is returned as it is. One that is `None` is an undefined tensor.
    ///
    /// # Errors
    /// As for [`Pipeline::train_step`].
    pub fn predict(&mut self, inputs: impl IntoTensors) -> Result<Vec<Tensor>> {
        let inputs = self.model.listed_inputs(inputs)?;
        let batch = self.check(inputs, None, false)?;
        let ran = self.run(Task::new(Mode::Predict, Part::Inference, &batch))?;
        self.joined(outputs_of(ran))
    }

    /// Joins the outputs of the micro-batches, for the caller.
    fn joined(&self, outputs: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        let mut columns: Vec<Vec<Tensor>> = Vec::new();
        for tensors in outputs {
            columns.resize_with(tensors.len(), Vec::new);
            for (column, tensor) in columns.iter_mut().zip(tensors) {
                column.push(tensor);
            }
        }
        let join = |(at, parts): (usize, &Vec<Tensor>)| match parts
            .iter()
            .filter(|part| part.defined())
            .count()
        {
            0 => Ok(Tensor::new()),
            all if all == parts.len() => self.model.returned(&Tensor::f_cat(parts, 0)?),
            _ => Err(Error::Input(format!(
                "output {at} is None in some micro-batches only, so it cannot be joined"
            ))),
        };
        columns.iter().enumerate().map(join).collect()
    }

    /// Replaces the optimizer's learning rate. The factor of [`PipelineBuilder::learning_rate`]
    /// still applies.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.training.lr_override = Some(lr);
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.training.learning_rate()
    }

    /// Whether some of the stages are in other processes.
    pub(crate) fn is_in_processes(&self) -> bool {
        self.engine.peers.is_some() && self.engine.here().len() < self.engine.placement.len()
    }

    /// Layers per stage.
    pub fn balance(&self) -> &[usize] {
        &self.model.balance
    }

    /// Number of steps applied so far.
    pub fn steps(&self) -> u64 {
        self.training.step
    }

    /// Simulates a training step with all M micro-batches from the times measured in `timelines`.
    ///
    /// The simulator runs the pipeline's own list of actions. Each action takes the median time of
    /// its kind on its stage.
    ///
    /// # Errors
    /// None that `build` has not already found.
    pub fn simulate(&mut self, timelines: &[&Timeline]) -> Result<Timeline> {
        let program = self.program(Part::Step, self.engine.micro_batches)?;
        simulate(&program, &Costs::measured(timelines, median), self.engine.link_capacity)
            .map_err(|deadlock| Error::Schedule(Invalid::Deadlock(deadlock)))
    }

    /// The most micro-batches that each stage holds at once in a step with all M micro-batches,
    /// derived from the schedule alone.
    ///
    /// # Errors
    /// None that `build` has not already found.
    pub fn held(&mut self) -> Result<HeldMicroBatches> {
        let program = self.program(Part::Step, self.engine.micro_batches)?;
        Ok(validate(&program, self.engine.link_capacity)?)
    }
}

/// The last stage's outputs, per micro-batch.
fn outputs_of(ran: Ran<Stage>) -> Vec<Vec<Tensor>> {
    ran.outcomes.into_iter().next_back().map(|outcome| outcome.outputs).unwrap_or_default()
}
