//! Settings of a pipeline.
//!
//! - [`arguments`]: inputs and targets
//! - [`losses`]: losses and metrics
//! - [`check`]: checks the settings
//! - [`build`]: builds the stages

mod arguments;
mod build;
mod check;
mod connect;
mod losses;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{Action, Bytes, remat::RematPolicies, schedule::Schedule};
use gpipe_runtime::Settings;
use tch::Kind;

pub use check::TIMEOUT_MAX;

use super::{Padding, balance::Balance};
use crate::{
    arguments::Arguments,
    batch_norm::NormsFollow,
    device::Device,
    error::LayerError,
    interrupt::Interrupt,
    loss::Losses,
    metric::Metric,
    observer::{ActionEvent, Observer, When},
    optim::{Group, LearningRate, Optimizer},
    processes::{Links, Replicas, Transport},
    sequence::Sequence,
    spec::TensorSpec,
};

/// Shapes and dtypes of a mini-batch's inputs.
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

/// Builds a [`Pipeline`](crate::Pipeline).
///
/// The defaults are:
///
/// - one stage on the CPU with one thread, one micro-batch, the 1F1B schedule, cuts by cost
/// - re-materialization only where a backward does not immediately follow its forward
/// - seed 0, float32, the fastest kernels, no memory cap
/// - a constant learning rate, no clipping, no parameter groups, no averages
/// - a timeout of five minutes
#[derive(Clone)]
pub struct PipelineBuilder {
    pub(super) sequence: Sequence,
    pub(super) inputs: Vec<TensorSpec>,
    pub(super) devices: Vec<Device>,
    micro_batches: usize,
    schedule: Schedule,
    pub(super) balance: Balance,
    remat: RematPolicies,
    offload_folder: Option<PathBuf>,
    rematerializes_early: bool,
    pub(super) threads: usize,
    seed: u64,
    pub(super) kind: Kind,
    pub(super) kernels: Kernels,
    caps: Vec<Bytes>,
    pub(super) max_norm: Option<f64>,
    keep_gradients: bool,
    pub(super) input_gradients: bool,
    /// What is declared of the targets. The sequence has what is declared of the inputs.
    pub(super) targets: Arguments,
    open_forwards: usize,
    timeout: Duration,
    pub(super) losses: Losses,
    metrics: Vec<Arc<dyn Metric>>,
    training_metrics: bool,
    pub(super) loss_rows: Option<usize>,
    pub(super) optimizer: Option<Arc<dyn Optimizer>>,
    pub(super) groups: Vec<Group>,
    /// Patterns of names that were frozen (`true`) or unfrozen after the build, in order.
    frozen: Vec<(String, bool)>,
    pub(super) rate: LearningRate,
    pub(super) average: Option<f64>,
    norms_follow: NormsFollow,
    given_parameters: bool,
    profile: bool,
    padding: Option<Padding>,
    transport: Option<Arc<dyn Transport>>,
    links: Links,
    replicas: Option<Arc<dyn Replicas>>,
    shard_optimizer: bool,
    observers: Vec<Arc<dyn Observer>>,
    interrupt: Interrupt,
}

impl PipelineBuilder {
    pub(super) fn new(sequence: Sequence, inputs: Inputs) -> Self {
        Self {
            sequence,
            inputs: inputs.0,
            devices: Device::defaults(1),
            micro_batches: 1,
            schedule: Schedule::OneFOneB,
            balance: Balance::default(),
            remat: RematPolicies::default(),
            offload_folder: None,
            rematerializes_early: true,
            threads: 1,
            seed: 0,
            kind: Kind::Float,
            kernels: Kernels::fastest(),
            caps: Vec::new(),
            max_norm: None,
            keep_gradients: false,
            input_gradients: false,
            targets: Arguments::default(),
            open_forwards: 8,
            timeout: Settings::default().deadline,
            losses: Losses::default(),
            metrics: Vec::new(),
            training_metrics: false,
            loss_rows: None,
            optimizer: None,
            groups: Vec::new(),
            frozen: Vec::new(),
            rate: LearningRate::default(),
            average: None,
            norms_follow: NormsFollow::default(),
            given_parameters: false,
            profile: false,
            padding: None,
            transport: None,
            links: Links::default(),
            observers: Vec::new(),
            interrupt: Interrupt::default(),
            replicas: None,
            shard_optimizer: false,
        }
    }

    /// The devices, in order. Each holds one stage, or as many as the schedule puts on it. CPU and
    /// GPU may be mixed.
    #[must_use]
    pub fn devices(mut self, devices: impl Into<Vec<Device>>) -> Self {
        self.devices = devices.into();
        self
    }

    /// Sets the number of stages (K), each on its own CPU device. If the schedule puts several
    /// stages on each device, this is the number of devices.
    #[must_use]
    pub fn stages(self, stages: usize) -> Self {
        self.devices(Device::defaults(stages))
    }

    /// Sets the number of micro-batches (M) in a mini-batch. A mini-batch with fewer samples than
    /// that has one micro-batch per sample.
    #[must_use]
    pub fn micro_batches(mut self, micro_batches: usize) -> Self {
        self.micro_batches = micro_batches;
        self
    }

    /// Applies a plan: cuts, M, schedule and re-materialization, with one stage for each entry of
    /// the plan's balance. Keeps the configured devices if the plan needs as many; otherwise uses
    /// CPUs.
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

    /// Which device holds which stage, and the order of forwards and backwards. Some schedules put
    /// several stages on each device; a custom schedule states its own number of stages.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Cuts the padding off each micro-batch of tokens. By default mini-batches are used as they
    /// are.
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = Some(padding);
        self
    }

    /// Runs the pipeline as one of several processes.
    ///
    /// All processes make the same calls in the same order. Each runs a contiguous block of the
    /// devices, in blocks as equal as possible, and builds the stages on them. Losses, predictions
    /// and reports are the same in all processes. Parameters, gradients and states cover only a
    /// process's own stages.
    #[must_use]
    pub fn processes(mut self, transport: Arc<dyn Transport>) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Sets how values pass between processes.
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.links = links;
        self
    }

    /// Trains the pipeline as one of several replicas.
    ///
    /// All replicas are given the whole mini-batch, and each trains on its part of the samples. All
    /// make the same update, from the sum of their gradients. Losses and metrics cover the whole
    /// mini-batch. Each replica computes evaluations and predictions in full. A mini-batch needs at
    /// least as many samples as there are replicas.
    #[must_use]
    pub fn replicas(mut self, replicas: Arc<dyn Replicas>) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// Shards the optimizer state over the replicas (ZeRO stage 1: Rajbhandari et al. 2020, section
    /// 5.1). Without replicas it has no effect.
    ///
    /// Within each stage, a parameter belongs to one replica, which stores and updates its state.
    /// The replicas get about equal numbers of bytes. After an update they exchange the updated
    /// parameters. No bit of the result changes. States and checkpoints are the same, so they fit
    /// any number of replicas, sharded or not.
    ///
    /// Each optimizer of this crate updates every parameter separately. A custom optimizer that
    /// combines the parameters of a layer sees only those that its replica updates.
    ///
    /// [`Pipeline::state`](crate::Pipeline::state) collects the state from all replicas. After the
    /// same step, each replica calls it or [`Pipeline::share_state`](crate::Pipeline::share_state).
    #[must_use]
    pub fn shard_optimizer(mut self) -> Self {
        self.shard_optimizer = true;
        self
    }

    /// Freezes or unfreezes the parameters that match `patterns`, whatever was said before.
    pub(super) fn set_frozen(&mut self, patterns: Vec<String>, frozen: bool) {
        self.frozen.retain(|(own, _)| !patterns.contains(own));
        self.frozen.extend(patterns.into_iter().map(|pattern| (pattern, frozen)));
    }

    /// The settings that the speed of offload depends on: first device, folder and timeout.
    pub(super) fn offload_inputs(&self) -> (Device, Option<&Path>, Duration) {
        let device = self.devices.first().copied().unwrap_or(Device::Cpu);
        (device, self.offload_folder.as_deref(), self.timeout)
    }

    /// The schedule set so far.
    pub(crate) fn scheduled(&self) -> Schedule {
        self.schedule.clone()
    }

    /// How the sequence is cut into stages: a [`Balance`], or the number of layers of each stage,
    /// such as `[2, 3]`.
    #[must_use]
    pub fn balance(mut self, balance: impl Into<Balance>) -> Self {
        self.balance = balance.into();
        self
    }

    /// What to discard and recompute: one policy for all stages, or one per stage.
    #[must_use]
    pub fn remat(mut self, remat: impl Into<RematPolicies>) -> Self {
        self.remat = remat.into();
        self
    }

    /// The folder of the files to which stages on CPUs offload activations
    /// ([`Remat::Offload`](gpipe_core::remat::Remat::Offload)). The default is the system's
    /// temporary folder, which may itself be in memory. The files have no names and vanish when the
    /// process ends.
    #[must_use]
    pub fn offload_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.offload_folder = Some(folder.into());
        self
    }

    /// Whether re-materialization may start before the backward's gradients arrive. The default is
    /// `true`. Waiting is for measuring the benefit; results are the same.
    #[must_use]
    pub fn early_rematerialization(mut self, early: bool) -> Self {
        self.rematerializes_early = early;
        self
    }

    /// Number of CPU threads per stage. Changing it changes results in the last bits.
    #[must_use]
    pub fn threads_per_stage(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// The seed for initial values and dropout.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Leaves the parameters without values and, on CPUs, without memory. The caller gives all of
    /// them before the first step, with [`Pipeline::share_parameters`](crate::Pipeline::share_parameters) and
    /// [`Pipeline::set_parameters`](crate::Pipeline::set_parameters).
    #[must_use]
    pub fn given_parameters(mut self) -> Self {
        self.given_parameters = true;
        self
    }

    /// What the running statistics of batch norms follow: mini-batches by default. With replicas,
    /// only that is possible.
    #[must_use]
    pub fn norms_follow(mut self, follow: NormsFollow) -> Self {
        self.norms_follow = follow;
        self
    }

    /// The dtype of the arithmetic: `Kind::Float`, `Double`, `BFloat16` or `Half`.
    ///
    /// With `BFloat16` and `Half`, layers see copies of the parameters. Parameters, gradient sums,
    /// losses and updates stay in float32. With `Half` the loss is also scaled dynamically, and a
    /// step whose gradients overflow is skipped.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The kernels for float32 matrix products and 1x1 convolutions on CPUs, and the layout of
    /// images. Changing them changes results in the last
    /// bits.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// The most bytes of tensors that a device may hold, all its stages together: one cap for all
    /// devices, or one per device.
    ///
    /// On a CPU the allocator enforces the cap. On a GPU a layer fails after it has exceeded the
    /// cap, and devices that share a GPU share the sum of their caps.
    #[must_use]
    pub fn memory_cap(mut self, caps: impl Into<Vec<Bytes>>) -> Self {
        self.caps = caps.into();
        self
    }

    /// Clips gradients: scales them down if their global norm over all stages exceeds `max_norm`.
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

    /// Computes the gradients of floating-point inputs, too, so that
    /// [`Pipeline::backward`](crate::Pipeline::backward) returns them. All layers then pass
    /// gradients on, frozen ones too, in whole steps as well.
    #[must_use]
    pub fn input_gradients(mut self) -> Self {
        self.input_gradients = true;
        self
    }

    /// The most forwards of [`Pipeline::forward`](crate::Pipeline::forward) that may wait for their
    /// backward at once: 8 by default. Each holds memory on all stages
    /// ([`Outputs::held`](crate::Outputs::held)).
    #[must_use]
    pub fn open_forwards(mut self, most: usize) -> Self {
        self.open_forwards = most;
        self
    }

    /// The longest silence of a stage before a step fails. Must exceed the longest forward or
    /// backward of one micro-batch; on a GPU, of three. At most [`TIMEOUT_MAX`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The optimizer. Required for training.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl Optimizer) -> Self {
        self.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// The learning rate schedule, as a factor of the optimizer's learning rate.
    #[must_use]
    pub fn learning_rate(mut self, rate: LearningRate) -> Self {
        self.rate = rate;
        self
    }

    /// Adds a group of parameters with its own settings. The first group that matches a parameter
    /// applies.
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

    /// For fault injection: calls `call` before each action of this process's stages. The call runs
    /// on the stage's thread, and its memory is charged to the stage. Its errors and panics count
    /// as the action's.
    #[doc(hidden)]
    #[must_use]
    pub fn before_action(
        self,
        call: impl Fn(Action) -> std::result::Result<(), LayerError> + Send + Sync + 'static,
    ) -> Self {
        struct Before<F>(F);
        impl<F> Observer for Before<F>
        where
            F: Fn(Action) -> std::result::Result<(), LayerError> + Send + Sync + 'static,
        {
            fn action(&self, event: &ActionEvent) -> std::result::Result<(), LayerError> {
                if event.when == When::Before { self.0(event.action) } else { Ok(()) }
            }
        }
        self.observer(Before(call))
    }

    /// Calls `observer` as stages work. Several are called in the order in which they were added.
    /// For them recomputations run to the end, and hold outputs that plans do not count.
    #[must_use]
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observers.push(Arc::new(observer));
        self
    }

    /// Lets `interrupt` end a running step from another thread, such as at Ctrl-C.
    #[must_use]
    pub fn interrupt(mut self, interrupt: &Interrupt) -> Self {
        self.interrupt = interrupt.clone();
        self
    }

    /// Measures each layer in each step; used by [`crate::profile`].
    #[must_use]
    pub(crate) fn profiled(mut self) -> Self {
        self.profile = true;
        self
    }
}
