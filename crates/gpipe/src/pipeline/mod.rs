//! The pipeline as its user sees it: built once, then `train_step`, `evaluate` and `predict` in any order.
//!
//! - [`builder`]: settings, checked; stages placed on devices
//! - [`mini_batch`]: a mini-batch, checked and cut; [`padding`]: columns of a micro-batch that are only padding, cut off
//! - [`peers`]: other processes, as the runtime sees them; [`pack`]: a step's results as bytes; [`expected`]: what may be sent
//! - [`decoding`]: outputs of new positions, where layers keep what they need of earlier ones
//! - [`balance`]: where a sequence is cut
//! - [`parameters`]: parameters, gradients and averages, read and written
//! - [`state`]: all that it knows between two steps, taken out and put back
//! - [`topology`]: the edges that a cut of a sequence gives
//! - [`cost_inputs`]: what its costs depend on, and those costs as estimated
//! - [`report`]: what a step returns
//! - here: running steps

mod balance;
mod builder;
mod cost_inputs;
mod decoding;
mod expected;
mod mini_batch;
mod pack;
mod padding;
mod parameters;
mod peers;
mod replicas;
mod report;
mod state;
mod topology;

use std::{collections::HashMap, sync::Arc};

pub use balance::Balance;
pub use builder::PipelineBuilder;
pub use decoding::{Decoding, GroupStep};
use expected::Carried;
use gpipe_core::{
    Bytes, StageId,
    lower::{Program, Topology, lower},
    remat::RematPolicies,
    schedule::Schedule,
    simulate::{Costs, Timeline, median, simulate},
    validate::{HeldMicroBatches, Invalid, validate},
};
use gpipe_runtime::{Ran, WorkerPool};
use mini_batch::MiniBatch;
#[cfg(feature = "fuzzing")]
pub(crate) use pack::fuzzed;
pub use padding::Padding;
use parameters::Averages;
use peers::TransportPeers;
pub use report::{DeviceReport, Evaluation, StepReport};
pub use state::RunSettings;
use tch::Tensor;

use crate::{
    error::{Error, Result, StageError},
    loss::Loss,
    metric::{Measured, Metric},
    optim::{LearningRate, Optimizer},
    precision::{LossScale, Precision},
    processes::Replicas,
    sequence::Sequence,
    spec::TensorSpec,
    stage::{
        Stage, catching,
        feed::{Feed, Mode, Outcome},
        recorder::StageProfile,
    },
    value::IntoTensors,
};

/// A parameter of the model, under its first use if it is tied.
#[derive(Debug, Clone)]
struct OwnedParameter {
    /// `layer.parameter`
    name: String,
    /// The layer's position in the sequence, and the parameter's in the layer.
    layer: usize,
    slot: usize,
    /// The stage and place (layer within the stage, position) of every use, in layer order; the first owns it.
    uses: Vec<(StageId, (usize, usize))>,
}

/// A model cut into stages on devices, ready to run.
///
/// All calls may come in any order. After a failed step, parameters and optimizer state are as before it.
pub struct Pipeline {
    pool: WorkerPool<Stage>,
    /// The other processes, if there are any.
    joined: Option<Arc<TransportPeers>>,
    /// The other replicas, if there are any.
    replicas: Option<Arc<dyn Replicas>>,
    sequence: Sequence,
    topology: Topology,
    /// By edge of the topology.
    carried: Vec<Carried>,
    /// By the inputs of a micro-batch: the most bytes of a message, by edge.
    expected: Vec<(Vec<TensorSpec>, Vec<Bytes>)>,
    schedule: Schedule,
    remat: RematPolicies,
    rematerializes_early: bool,
    micro_batches: usize,
    balance: Vec<usize>,
    /// By stage: its device.
    placement: Vec<usize>,
    precision: Precision,
    loss: Option<Arc<dyn Loss>>,
    metrics: Vec<Arc<dyn Metric>>,
    training_metrics: bool,
    trains: bool,
    /// What [`Pipeline::set_learning_rate`] set.
    lr_override: Option<f64>,
    rate: LearningRate,
    loss_scale: LossScale,
    averages: Averages,
    /// Why parameters and state are of no use any more.
    torn: Option<&'static str>,
    /// How many tensors an input of it has.
    inputs: usize,
    step: u64,
    seed: u64,
    owned: Vec<OwnedParameter>,
    optimizer: Option<Arc<dyn Optimizer>>,
    programs: HashMap<(bool, usize), Arc<Program>>,
    shapes: Vec<(Vec<TensorSpec>, Vec<TensorSpec>)>,
    link_capacity: usize,
    padding: Option<Padding>,
    profiled: Vec<StageProfile>,
}

impl Pipeline {
    /// Starts building a pipeline for `sequence`; `inputs` is what a mini-batch of it looks like (one
    /// [`TensorSpec`], or several), so that a mis-fit is found now and named.
    pub fn builder(sequence: Sequence, inputs: impl Into<builder::Inputs>) -> PipelineBuilder {
        PipelineBuilder::new(sequence, inputs.into())
    }

    /// Trains on one mini-batch: `inputs` and `targets` have the same number of samples (their first
    /// size), which may be any but 0. Gradients of all micro-batches are summed with the same parameters
    /// and applied once.
    ///
    /// # Errors
    /// [`Error::Input`] and [`Error::Model`] before anything runs; [`Error::Step`] from the stages. Nothing
    /// is updated then. In float16 a step whose gradients overflow is no error: it is reported as skipped.
    pub fn train_step(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
    ) -> Result<StepReport> {
        if !self.trains {
            return Err(Error::Setting(
                "this pipeline cannot train: give the builder a loss and an optimizer".into(),
            ));
        }
        let lr = self.base_lr();
        if !lr.is_finite() || lr < 0.0 {
            return Err(Error::Setting(format!(
                "the learning rate lr is {lr}: set a number of at least 0"
            )));
        }
        self.needs_own_parameters("train")?;
        let targets = targets.into_tensors();
        let batch = self.check(inputs.into_tensors(), Some(&targets), true)?;
        let denominator = self.denominator(&targets)?;
        let counts = match self.training_metrics {
            true => self.metric_counts(&targets)?,
            false => Vec::new(),
        };
        let (lr, scale) = (self.learning_rate(), self.loss_scale.scale);
        let mut ran = match self.run(Mode::Train, &batch, denominator, false) {
            Ok(ran) => ran,
            Err(error) => {
                return Err(self.name_the_layer(error, Mode::Train, &batch, denominator));
            }
        };
        self.of_all_replicas(&mut ran.outcomes)?;
        finite_loss(&ran.outcomes)?;
        let verdict = ran.outcomes.first().and_then(|outcome| outcome.verdict);
        let applied = verdict.is_some_and(|verdict| verdict.apply);
        let skipped = !applied && self.loss_scale.step_overflowed();
        if let Some(verdict) = verdict.filter(|verdict| !verdict.apply && !skipped) {
            let error = not_finite("all", format!("the gradient norm ({})", verdict.norm));
            return Err(self.name_the_layer(error, Mode::Train, &batch, denominator));
        }
        if !skipped {
            self.step += 1;
            self.loss_scale.step_was_good();
        }
        let metrics = self.measured(&ran.outcomes, &counts);
        let step = report::Numbers { step: self.step, skipped, lr, loss_scale: scale, metrics };
        let program = self.program(true, batch.slices.len())?;
        Ok(StepReport::new(step, &program, self.link_capacity, ran, denominator, verdict))
    }

    /// The mean loss over a mini-batch, without dropout; nothing is updated. The same on every K.
    ///
    /// # Errors
    /// As [`Pipeline::train_step`].
    pub fn evaluate(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
    ) -> Result<Evaluation> {
        if self.loss.is_none() {
            return Err(Error::Setting(
                "this pipeline cannot evaluate: give the builder a loss".into(),
            ));
        }
        let targets = targets.into_tensors();
        let batch = self.check(inputs.into_tensors(), Some(&targets), false)?;
        let denominator = self.denominator(&targets)?;
        let counts = self.metric_counts(&targets)?;
        let ran = match self.run(Mode::Evaluate, &batch, denominator, false) {
            Ok(ran) => ran,
            Err(error) => {
                return Err(self.name_the_layer(error, Mode::Evaluate, &batch, denominator));
            }
        };
        finite_loss(&ran.outcomes)?;
        let metrics = self.measured(&ran.outcomes, &counts);
        Ok(Evaluation::new(report::loss_sum(&ran.outcomes), denominator, metrics))
    }

    /// What the metrics' sums are divided by; before the run, because it may fail.
    fn metric_counts(&self, targets: &[Tensor]) -> Result<Vec<f64>> {
        let count = |metric: &Arc<dyn Metric>| catching(|| metric.count(targets));
        let counts = self.metrics.iter().map(count).collect::<std::result::Result<_, _>>();
        counts.map_err(Error::Torch)
    }

    /// The metrics' sums over all micro-batches, in their order, with their counts.
    fn measured(&self, outcomes: &[Outcome], counts: &[f64]) -> Vec<Measured> {
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

    /// The model's outputs for a mini-batch on the CPU, without dropout, in the order of the samples; in
    /// float32 where the arithmetic is in bfloat16 or float16. They are not looked at: a NaN in them is given
    /// as it is.
    ///
    /// # Errors
    /// As [`Pipeline::train_step`].
    pub fn predict(&mut self, inputs: impl IntoTensors) -> Result<Vec<Tensor>> {
        let batch = self.check(inputs.into_tensors(), None, false)?;
        let ran = self.run(Mode::Predict, &batch, 1.0, false)?;
        let mut columns: Vec<Vec<Tensor>> = Vec::new();
        for tensors in outputs(ran) {
            columns.resize_with(tensors.len(), Vec::new);
            for (column, tensor) in columns.iter_mut().zip(tensors) {
                column.push(tensor);
            }
        }
        columns.iter().map(|parts| self.given(&Tensor::f_cat(parts, 0)?)).collect()
    }

    /// An output as users get it: on the CPU, and in no smaller dtype than float32.
    fn given(&self, output: &Tensor) -> Result<Tensor> {
        let Precision { compute, master } = self.precision;
        let output = output.f_to(tch::Device::Cpu)?;
        Ok(if output.kind() == compute { output.f_to_kind(master)? } else { output })
    }

    fn program(&mut self, trains: bool, micro_batches: usize) -> Result<Arc<Program>> {
        if let Some(program) = self.programs.get(&(trains, micro_batches)) {
            return Ok(Arc::clone(program));
        }
        let devices = self.devices();
        let compute = match trains {
            true => self.remat.apply(&self.schedule.actions(devices, micro_batches)),
            false => self.schedule.forwards(devices, micro_batches),
        };
        let mut program = lower(&compute, &self.topology, micro_batches)?;
        if !self.rematerializes_early {
            program = program.rematerializing_late();
        }
        validate(&program, self.link_capacity)?;
        let program = Arc::new(program);
        self.programs.insert((trains, micro_batches), Arc::clone(&program));
        Ok(program)
    }

    fn run(
        &mut self,
        mode: Mode,
        batch: &MiniBatch,
        denominator: f64,
        check_finite: bool,
    ) -> Result<Ran<Stage>> {
        self.needs_whole_state()?;
        let expected = self.joined.is_some().then(|| self.expected(batch)).transpose()?;
        if let (Some(joined), Some(expected)) = (&self.joined, expected) {
            joined.expect(expected);
        }
        let program = self.program(mode == Mode::Train, batch.slices.len())?;
        let mut feeds: Vec<Vec<Feed>> = (0..self.devices()).map(|_| Vec::new()).collect();
        for (stage, &device) in self.placement.iter().enumerate() {
            let fed = |all: &[Vec<Tensor>], here: bool| -> Vec<Vec<Tensor>> {
                let all = all.iter().take(if here { usize::MAX } else { 0 });
                all.map(|tensors| tensors.iter().map(Tensor::shallow_clone).collect()).collect()
            };
            feeds[device].push(Feed {
                mode,
                step: self.step,
                slices: batch.slices.clone(),
                inputs: fed(&batch.inputs, stage == 0),
                targets: fed(&batch.targets, stage + 1 == self.placement.len()),
                denominator,
                lr: self.learning_rate(),
                loss_scale: self.loss_scale.scale,
                check_finite,
                groups: batch.groups.clone(),
                begins: batch.begins,
            });
        }
        let ran = self.pool.run(&program, feeds).map_err(Error::from);
        if ran.as_ref().is_err_and(Error::has_changed_parameters) {
            self.torn = Some(parameters::CHANGED_PARAMETERS);
        }
        let mut ran = ran?;
        self.profiled = ran.outcomes.iter_mut().filter_map(|own| own.profile.take()).collect();
        Ok(ran)
    }

    /// What the last step's layers took and held, by stage, if they are measured.
    pub(crate) fn take_profiles(&mut self) -> Vec<StageProfile> {
        std::mem::take(&mut self.profiled)
    }

    /// After a NaN somewhere: runs the step again, which changes nothing because it fails again, and looks at
    /// every value, so that the error names the first layer that makes one. It costs nothing until then.
    fn name_the_layer(
        &mut self,
        error: Error,
        mode: Mode,
        batch: &MiniBatch,
        denominator: f64,
    ) -> Error {
        // Among processes a step that fails on purpose would be the last one.
        if !error.is_not_finite() || self.joined.is_some() {
            return error;
        }
        match self.run(mode, batch, denominator, true) {
            Err(found) if found.is_not_finite() => found,
            _ => error, // it did not come again: the first message is the better one
        }
    }

    /// Replaces the optimizer's learning rate; the factor of [`PipelineBuilder::learning_rate`] still holds.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.lr_override = Some(lr);
    }

    fn base_lr(&self) -> f64 {
        self.lr_override.or(self.optimizer.as_ref().map(|optimizer| optimizer.lr())).unwrap_or(0.0)
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.base_lr() * self.rate.factor(self.step)
    }

    /// Whether some of its stages are in other processes.
    pub(crate) fn is_in_processes(&self) -> bool {
        self.joined.is_some() && self.here().len() < self.placement.len()
    }

    /// On how many devices its stages are.
    pub(crate) fn devices(&self) -> usize {
        self.placement.iter().max().map_or(1, |last| last + 1)
    }

    /// Layers per stage.
    pub fn balance(&self) -> &[usize] {
        &self.balance
    }

    /// Steps that were applied so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// What the simulator makes of the costs measured in `timelines`, of steps of this pipeline with all M
    /// micro-batches: the same list of actions, each taking the median time of its kind on its stage.
    ///
    /// # Errors
    /// None that `build` has not already found.
    pub fn simulate(&mut self, timelines: &[&Timeline]) -> Result<Timeline> {
        let program = self.program(true, self.micro_batches)?;
        simulate(&program, &Costs::measured(timelines, median), self.link_capacity)
            .map_err(|deadlock| Error::Schedule(Invalid::Deadlock(deadlock)))
    }

    /// What each stage holds at most in a step with all M micro-batches, from the schedule alone.
    ///
    /// # Errors
    /// None that `build` has not already found.
    pub fn held(&mut self) -> Result<HeldMicroBatches> {
        let program = self.program(true, self.micro_batches)?;
        Ok(validate(&program, self.link_capacity)?)
    }
}

/// An error if the loss is no number. In one process a stage has said so already.
fn finite_loss(outcomes: &[Outcome]) -> Result<()> {
    match report::loss_sum(outcomes) {
        sum if sum.is_finite() => Ok(()),
        sum => Err(not_finite("loss", format!("the loss ({sum})"))),
    }
}

fn not_finite(layer: &str, what: String) -> Error {
    Error::NotFinite(StageError::NotFinite { layer: layer.into(), what })
}

/// The last stage's outputs, by micro-batch.
fn outputs(ran: Ran<Stage>) -> Vec<Vec<Tensor>> {
    ran.outcomes.into_iter().next_back().map(|outcome| outcome.outputs).unwrap_or_default()
}
