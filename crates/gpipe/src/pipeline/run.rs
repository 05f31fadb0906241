//! How a step runs on the stages.

use std::{collections::HashMap, sync::Arc};

use gpipe_core::{
    Bytes, DeviceId,
    lower::{Part, Program, Topology, lower},
    remat::RematPolicies,
    schedule::{ActionLists, Schedule},
    validate::validate,
};
use gpipe_runtime::{Ran, WorkerPool};
use tch::Tensor;

use super::{
    Pipeline, expected::Carried, mini_batch::MiniBatch, parameters, peers::TransportPeers,
};
use crate::{
    error::{Error, Result},
    processes::Replicas,
    spec::TensorSpec,
    stage::{
        Stage,
        feed::{Feed, Mode},
    },
};

/// The stages and the order of their work. Only the stages themselves change after the build.
pub(super) struct Engine {
    pub(super) pool: WorkerPool<Stage>,
    /// The other processes, if there are any.
    pub(super) peers: Option<Arc<TransportPeers>>,
    /// The other replicas, if there are any.
    pub(super) replicas: Option<Arc<dyn Replicas>>,
    /// Whether each replica stores the optimizer state of only a part of the parameters.
    pub(super) shards_optimizer: bool,
    pub(super) topology: Topology,
    /// What each edge of the topology carries.
    pub(super) carried: Vec<Carried>,
    /// Device of each stage.
    pub(super) placement: Vec<usize>,
    pub(super) schedule: Schedule,
    pub(super) remat: RematPolicies,
    pub(super) rematerializes_early: bool,
    pub(super) micro_batches: usize,
    pub(super) link_capacity: usize,
}

/// A run of the stages: what of a step they do, and with what.
#[derive(Clone)]
pub(super) struct Task<'a> {
    pub(super) mode: Mode,
    pub(super) part: Part,
    pub(super) batch: &'a MiniBatch,
    /// The number of the forward, where forwards or backwards run alone.
    pub(super) forward: u64,
    /// The numbers that the sums of the mini-batch's losses are divided by.
    pub(super) denominators: Vec<f64>,
    /// The number that gradients are divided by before the update.
    pub(super) divisor: f64,
    /// Whether the first stage returns the gradients of the inputs.
    pub(super) input_grads: bool,
    /// Whether to check every value.
    pub(super) check_finite: bool,
}

impl<'a> Task<'a> {
    pub(super) fn new(mode: Mode, part: Part, batch: &'a MiniBatch) -> Self {
        let (forward, denominators, divisor, check_finite) = (0, Vec::new(), 1.0, false);
        let input_grads = part == Part::Backward;
        Self { mode, part, batch, forward, denominators, divisor, input_grads, check_finite }
    }
}

/// Maximum number of programs that are kept. Mini-batches of other sizes may need others.
const PROGRAMS_MAX: usize = 64;

/// Results that are computed once and reused. All of them can be recomputed at any time.
#[derive(Default)]
pub(super) struct Caches {
    /// Keyed by the part of a step, and by the number of micro-batches.
    programs: HashMap<(Part, usize), Arc<Program>>,
    /// Shapes of inputs and targets that fit the model.
    pub(super) shapes: Vec<(Vec<TensorSpec>, Vec<TensorSpec>)>,
    /// For each micro-batch input: the most bytes of a message, by edge.
    pub(super) message_bytes: Vec<(Vec<TensorSpec>, Vec<Bytes>)>,
}

impl Engine {
    /// Number of devices.
    pub(super) fn devices(&self) -> usize {
        self.placement.iter().max().map_or(1, |last| last + 1)
    }

    /// The compute actions of the step of which `part` is a part.
    fn compute(&self, part: Part, micro_batches: usize) -> ActionLists {
        let devices = self.devices();
        match part {
            Part::Inference => self.schedule.forwards(devices, micro_batches),
            Part::Forward | Part::Backward => {
                self.remat.apply(&self.schedule.in_parts(devices, micro_batches))
            }
            Part::Step | Part::Gradients | Part::Reduce | Part::Update | Part::Finish => {
                self.remat.apply(&self.schedule.actions(devices, micro_batches))
            }
        }
    }

    /// The stages that are in this process, in order.
    pub(super) fn here(&self) -> Vec<usize> {
        let devices: Vec<usize> = self.pool.here().map(DeviceId::index).collect();
        let stages = self.placement.iter().enumerate();
        stages.filter(|(_, device)| devices.contains(device)).map(|(stage, _)| stage).collect()
    }
}

impl Pipeline {
    /// The list of actions of a step with `micro_batches` micro-batches, or of a part of one.
    ///
    /// # Errors
    /// None that `build` has not already found.
    pub(super) fn program(&mut self, part: Part, micro_batches: usize) -> Result<Arc<Program>> {
        if let Some(program) = self.caches.programs.get(&(part, micro_batches)) {
            return Ok(Arc::clone(program));
        }
        let compute = self.engine.compute(part, micro_batches);
        let mut program = lower(&compute, &self.engine.topology, micro_batches)?;
        if !self.engine.rematerializes_early {
            program = program.rematerializing_late();
        }
        let program = program.part(part);
        validate(&program, self.engine.link_capacity)?;
        let program = Arc::new(program);
        if self.caches.programs.len() >= PROGRAMS_MAX {
            self.caches.programs.clear();
        }
        self.caches.programs.insert((part, micro_batches), Arc::clone(&program));
        Ok(program)
    }

    /// Runs a step on all stages. Returns their outcomes and measurements.
    ///
    /// # Errors
    /// If the pipeline is torn, or if a stage fails.
    pub(super) fn run(&mut self, task: Task<'_>) -> Result<Ran<Stage>> {
        self.needs_whole_state()?;
        self.await_dropped()?;
        let Task { mode, part, batch, forward, denominators, divisor, input_grads, check_finite } =
            task;
        let expected = self.engine.peers.is_some().then(|| self.expected(batch)).transpose()?;
        if let (Some(peers), Some(expected)) = (&self.engine.peers, expected) {
            peers.expect_at_most(expected);
        }
        // The end of a step has no micro-batches, and is the same for any number of them.
        let micro_batches = match batch.slices.len() {
            0 => self.engine.micro_batches,
            count => count,
        };
        let program = self.program(part, micro_batches)?;
        let takes_inputs = self.model.losses.take_inputs();
        let everywhere = self.model.has_named_inputs();
        let mut feeds: Vec<Vec<Feed>> = (0..self.engine.devices()).map(|_| Vec::new()).collect();
        for (stage, &device) in self.engine.placement.iter().enumerate() {
            let fed = |all: &[Vec<Tensor>], here: bool| -> Vec<Vec<Tensor>> {
                let all = all.iter().take(if here { usize::MAX } else { 0 });
                all.map(|tensors| tensors.iter().map(Tensor::shallow_clone).collect()).collect()
            };
            let last = stage + 1 == self.engine.placement.len();
            let grads = batch.output_grads.iter().take(if last { usize::MAX } else { 0 });
            let grads = grads.map(|all| {
                all.iter().map(|grad| grad.as_ref().map(Tensor::shallow_clone)).collect()
            });
            feeds[device].push(Feed {
                mode,
                part,
                forward,
                output_grads: grads.collect(),
                step: self.training.step,
                slices: batch.slices.clone(),
                inputs: fed(&batch.inputs, stage == 0 || everywhere || last && takes_inputs),
                targets: fed(&batch.targets, last),
                denominators: denominators.clone(),
                lr: self.training.learning_rate(),
                loss_scale: self.training.loss_scale.scale * divisor,
                input_grads,
                check_finite,
                groups: batch.groups.clone(),
                begins: batch.begins,
            });
        }
        let ran = self.engine.pool.run(&program, feeds).map_err(Error::from);
        if ran.as_ref().is_err_and(Error::has_changed_parameters) {
            self.training.torn = Some(parameters::CHANGED_PARAMETERS);
        }
        ran
    }

    /// Finds the layer that made a NaN. Runs the step again with every value checked, so that the
    /// error names the first layer with a non-finite value. The second run never updates
    /// (`ActiveStage::decide`). Steps without a NaN pay nothing for it.
    pub(super) fn name_the_layer(&mut self, error: Error, task: Task<'_>) -> Error {
        // Across processes, a step that fails ends the run, so it cannot be repeated.
        if !error.is_not_finite() || self.engine.peers.is_some() {
            return error;
        }
        match self.run(Task { check_finite: true, ..task }) {
            // Or what a layer finds wrong with a value, which on a GPU may be known after the NaN.
            Err(found)
                if found.is_not_finite()
                    || found.layer().is_some() && !found.is_out_of_memory() =>
            {
                found
            }
            _ => error, // the NaN did not recur: keep the first error
        }
    }
}
