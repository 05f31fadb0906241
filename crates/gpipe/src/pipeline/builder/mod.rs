//! Settings of a pipeline.
//!
//! - [`build`]: their checks, and the stages

mod build;

use std::{sync::Arc, time::Duration};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{Action, Bytes, remat::RematPolicies, schedule::Schedule};
use gpipe_runtime::Settings;
use tch::Kind;

use super::{Padding, balance::Balance};
use crate::{
    device::Device,
    error::LayerError,
    loss::Loss,
    metric::Metric,
    optim::{Group, LearningRate, Optimizer},
    processes::{Replicas, Transport},
    sequence::Sequence,
    spec::TensorSpec,
    stage::BeforeAction,
};

/// What a mini-batch's inputs look like.
pub struct Inputs(pub(crate) Vec<TensorSpec>);

impl From<TensorSpec> for Inputs {
    fn from(spec: TensorSpec) -> Self {
        Self(vec![spec])
    }
}

impl From<Vec<TensorSpec>> for Inputs {
    fn from(specs: Vec<TensorSpec>) -> Self {
        Self(specs)
    }
}

/// Builds a [`Pipeline`](crate::Pipeline). Unless told otherwise: one stage, one micro-batch, 1F1B,
/// cuts by cost, re-materialization only where a backward does not directly follow its forward, one
/// thread per stage, seed 0, float32, the fastest kernels, no cap, no clipping, a constant learning
/// rate, no groups, no averages, a deadline of five minutes.
pub struct PipelineBuilder {
    pub(super) sequence: Sequence,
    pub(super) inputs: Vec<TensorSpec>,
    pub(super) devices: Vec<Device>,
    micro_batches: usize,
    schedule: Schedule,
    balance: Balance,
    remat: RematPolicies,
    rematerializes_early: bool,
    pub(super) threads: usize,
    seed: u64,
    pub(super) kind: Kind,
    pub(super) kernels: Kernels,
    caps: Vec<Bytes>,
    max_norm: Option<f64>,
    keep_gradients: bool,
    deadline: Duration,
    pub(super) loss: Option<Arc<dyn Loss>>,
    metrics: Vec<Arc<dyn Metric>>,
    training_metrics: bool,
    pub(super) optimizer: Option<Arc<dyn Optimizer>>,
    groups: Vec<Group>,
    rate: LearningRate,
    pub(super) average: Option<f64>,
    profile: bool,
    padding: Option<Padding>,
    transport: Option<Arc<dyn Transport>>,
    replicas: Option<Arc<dyn Replicas>>,
    before_action: Option<BeforeAction>,
}

impl PipelineBuilder {
    pub(super) fn new(sequence: Sequence, inputs: Inputs) -> Self {
        Self {
            sequence,
            inputs: inputs.0,
            devices: vec![Device::Cpu],
            micro_batches: 1,
            schedule: Schedule::OneFOneB,
            balance: Balance::default(),
            remat: RematPolicies::default(),
            rematerializes_early: true,
            threads: 1,
            seed: 0,
            kind: Kind::Float,
            kernels: Kernels::fastest(),
            caps: Vec::new(),
            max_norm: None,
            keep_gradients: false,
            deadline: Settings::default().deadline,
            loss: None,
            metrics: Vec::new(),
            training_metrics: false,
            optimizer: None,
            groups: Vec::new(),
            rate: LearningRate::default(),
            average: None,
            profile: false,
            padding: None,
            transport: None,
            before_action: None,
            replicas: None,
        }
    }

    /// One stage (K) on each device, in order, or as many as the schedule puts there; CPU and GPU
    /// may be mixed.
    #[must_use]
    pub fn devices(mut self, devices: impl Into<Vec<Device>>) -> Self {
        self.devices = devices.into();
        self
    }

    /// So many stages (K), each on a CPU device of its own; where the schedule puts several on one,
    /// so many devices.
    #[must_use]
    pub fn stages(self, stages: usize) -> Self {
        self.devices(vec![Device::Cpu; stages])
    }

    /// Micro-batches (M) of a mini-batch. A mini-batch of fewer samples has fewer.
    #[must_use]
    pub fn micro_batches(mut self, micro_batches: usize) -> Self {
        self.micro_batches = micro_batches;
        self
    }

    /// Runs as planned: cuts, M, schedule and re-materialization, with a stage for each entry of
    /// the plan's balance; on CPUs unless as many devices were named as that takes.
    #[must_use]
    pub fn planned(mut self, plan: &gpipe_core::plan::Plan) -> Self {
        let devices = plan.devices();
        if self.devices.len() != devices {
            self = self.stages(devices);
        }
        self.balance(Balance::Layers(plan.balance.clone()))
            .micro_batches(plan.micro_batches)
            .schedule(plan.schedule.clone())
            .remat(plan.remat.clone())
    }

    /// The order of forwards and backwards. `interleaved:V` makes V stages on each device; a listed
    /// one says how many.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Cuts the padding off each micro-batch of tokens; unless it is told, mini-batches are used as
    /// they are.
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = Some(padding);
        self
    }

    /// Runs as one of several processes, which make the same calls in the same order: each builds
    /// the stages that are its own, the first of K / P processes the first K / P stages and so on.
    /// Results, losses and reports are the same in all of them; parameters, gradients and states
    /// are those of a process's own stages.
    #[must_use]
    pub fn processes(mut self, transport: Arc<dyn Transport>) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Trains as one of several replicas, all of which are given the whole mini-batch: each trains
    /// on its part of the samples, and all make the same update, of the sum of their gradients.
    /// Losses and metrics are of the whole mini-batch; evaluations and predictions are made by
    /// each. A mini-batch has at least as many samples as there are replicas.
    #[must_use]
    pub fn replicas(mut self, replicas: Arc<dyn Replicas>) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// The order that it has so far.
    pub(crate) fn scheduled(&self) -> Schedule {
        self.schedule.clone()
    }

    /// Where to cut.
    #[must_use]
    pub fn balance(mut self, balance: Balance) -> Self {
        self.balance = balance;
        self
    }

    /// What is discarded and recomputed: one policy for all stages, or one for each.
    #[must_use]
    pub fn remat(mut self, remat: impl Into<RematPolicies>) -> Self {
        self.remat = remat.into();
        self
    }

    /// Whether re-materialization starts before the gradients that its backward needs arrive (the
    /// default), or waits for them: for measurements of what that brings. Results are the same.
    #[must_use]
    pub fn early_rematerialization(mut self, early: bool) -> Self {
        self.rematerializes_early = early;
        self
    }

    /// CPU threads of each stage. Another number changes results in the last bits.
    #[must_use]
    pub fn threads_per_stage(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// What initial values and dropout are drawn from.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Dtype of the arithmetic: `Kind::Float`, `Double`, `BFloat16` or `Half`. In the last two
    /// parameters are kept, gradients summed, and losses and updates computed in float32 (layers
    /// see copies); with `Half` the loss is scaled dynamically, and a step whose gradients overflow
    /// is skipped.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Whose matrix products the float32 arithmetic on CPUs uses; another choice changes results in
    /// the last bits.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Most bytes of tensors that a stage (or all stages of a device) may hold: one cap for all, or
    /// one per device. On a CPU enforced by the allocator; on a GPU an action after which the GPU
    /// has held more fails.
    #[must_use]
    pub fn memory_cap(mut self, caps: impl Into<Vec<Bytes>>) -> Self {
        self.caps = caps.into();
        self
    }

    /// Scales the gradients down where their global norm, over all stages, exceeds `max_norm`.
    #[must_use]
    pub fn clip_norm(mut self, max_norm: f64) -> Self {
        self.max_norm = Some(max_norm);
        self
    }

    /// Keeps a copy of each step's gradients for
    /// [`Pipeline::gradients`](crate::Pipeline::gradients).
    #[must_use]
    pub fn keep_gradients(mut self) -> Self {
        self.keep_gradients = true;
        self
    }

    /// Longest silence of a stage before a step fails; longer than the longest forward or backward
    /// of one micro-batch.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The loss; needed to train and to evaluate.
    #[must_use]
    pub fn loss(mut self, loss: impl Loss) -> Self {
        self.loss = Some(Arc::new(loss));
        self
    }

    /// Another metric, for [`Pipeline::evaluate`](crate::Pipeline::evaluate).
    #[must_use]
    pub fn metric(mut self, metric: impl Metric) -> Self {
        self.metrics.push(Arc::new(metric));
        self
    }

    /// Takes the metrics in training steps, too.
    #[must_use]
    pub fn training_metrics(mut self) -> Self {
        self.training_metrics = true;
        self
    }

    /// The optimizer; needed to train.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl Optimizer) -> Self {
        self.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// The learning rate over the steps, as a factor of the optimizer's own.
    #[must_use]
    pub fn learning_rate(mut self, rate: LearningRate) -> Self {
        self.rate = rate;
        self
    }

    /// Another group of parameters with settings of their own; the first that matches a parameter
    /// holds.
    #[must_use]
    pub fn group(mut self, group: Group) -> Self {
        self.groups.push(group);
        self
    }

    /// Keeps exponential moving averages of the parameters (Polyak & Juditsky 1992) with `decay`,
    /// such as 0.999, for [`Pipeline::with_averages`](crate::Pipeline::with_averages).
    #[must_use]
    pub fn average(mut self, decay: f64) -> Self {
        self.average = Some(decay);
        self
    }

    /// Calls `call` before each action of this process's stages, on the stage's thread, whose
    /// memory it is charged to. For tests of faults: its errors and panics are the action's.
    #[doc(hidden)]
    #[must_use]
    pub fn before_action(
        mut self,
        call: impl Fn(Action) -> std::result::Result<(), LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.before_action = Some(Arc::new(call));
        self
    }

    /// Measures each layer in each step: [`crate::profile`] does it.
    #[must_use]
    pub(crate) fn profiled(mut self) -> Self {
        self.profile = true;
        self
    }
}
