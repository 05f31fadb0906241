//! Settings of a pipeline, checked when it is built.

use std::{collections::HashMap, sync::Arc, time::Duration};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{
    Bytes, EdgeId, StageId,
    lower::{Topology, lower},
    remat::RematPolicies,
    schedule::{ActionLists, Schedule},
    simulate::{Costs, simulate_with_room},
    validate::{Invalid, validate},
};
use gpipe_runtime::{Crew, Settings, crew::BuildDevice};
use tch::Kind;

use super::{
    Padding, Pipeline,
    balance::{Balance, stage_weights},
    parameters::Averages,
    topology,
};
use crate::{
    device::Device,
    error::{Error, Result},
    loss::Loss,
    metric::Metric,
    optim::{Group, LearningRate, Optimizer, ParameterSettings, settings},
    precision::{LossScale, Precision},
    sequence::Sequence,
    spec::TensorSpec,
    stage::{Stage, StagePlan},
};

/// Most micro-batches of a mini-batch.
const MICRO_BATCHES_MAX: usize = 1 << 16;

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

/// Builds a [`Pipeline`]. Unless told otherwise: one stage, one micro-batch, 1F1B, cuts by cost,
/// re-materialization only where a backward does not directly follow its forward, one thread per stage, seed
/// 0, float32, the fastest kernels, no cap, no clipping, a constant learning rate, no groups, no averages, a
/// deadline of five minutes.
pub struct PipelineBuilder {
    pub(super) sequence: Sequence,
    pub(super) inputs: Vec<TensorSpec>,
    pub(super) devices: Vec<Device>,
    micro_batches: usize,
    schedule: Schedule,
    balance: Balance,
    remat: RematPolicies,
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
        }
    }

    /// One stage (K) on each device, in order; CPU and GPU may be mixed.
    #[must_use]
    pub fn devices(mut self, devices: impl Into<Vec<Device>>) -> Self {
        self.devices = devices.into();
        self
    }

    /// So many stages (K), each on a CPU device of its own.
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

    /// Runs as planned: cuts, M, schedule and re-materialization, with a stage for each entry of the plan's balance; on CPUs unless so
    /// many devices were named.
    #[must_use]
    pub fn planned(mut self, plan: &gpipe_core::plan::Plan) -> Self {
        let stages = plan.balance.len();
        if self.devices.len() != stages {
            self = self.stages(stages);
        }
        self.balance(Balance::Layers(plan.balance.clone()))
            .micro_batches(plan.micro_batches)
            .schedule(plan.schedule)
            .remat(plan.remat.clone())
    }

    /// The order of forwards and backwards.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Cuts the padding off each micro-batch of tokens; unless it is told, mini-batches are used as they are.
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = Some(padding);
        self
    }

    /// The order that it has so far.
    pub(crate) fn scheduled(&self) -> Schedule {
        self.schedule
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

    /// Dtype of the arithmetic: `Kind::Float`, `Double`, `BFloat16` or `Half`. In the last two parameters are
    /// kept, gradients summed, and losses and updates computed in float32 (layers see copies); with `Half`
    /// the loss is scaled dynamically, and a step whose gradients overflow is skipped.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Whose matrix products the float32 arithmetic on CPUs uses; another choice changes results in the
    /// last bits.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Most bytes of tensors that a stage may hold: one cap for all, or one per stage. On a CPU enforced by
    /// the allocator; on a GPU an action after which the GPU has held more fails.
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

    /// Keeps a copy of each step's gradients for [`Pipeline::gradients`].
    #[must_use]
    pub fn keep_gradients(mut self) -> Self {
        self.keep_gradients = true;
        self
    }

    /// Longest silence of a stage before a step fails; longer than the longest forward or backward of one
    /// micro-batch.
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

    /// Another metric, for [`Pipeline::evaluate`].
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

    /// Another group of parameters with settings of their own; the first that matches a parameter holds.
    #[must_use]
    pub fn group(mut self, group: Group) -> Self {
        self.groups.push(group);
        self
    }

    /// Keeps exponential moving averages of the parameters (Polyak & Juditsky 1992) with `decay`, such as
    /// 0.999, for [`Pipeline::with_averages`].
    #[must_use]
    pub fn average(mut self, decay: f64) -> Self {
        self.average = Some(decay);
        self
    }

    /// Measures each layer in each step: [`crate::profile`] does it.
    #[must_use]
    pub(crate) fn profiled(mut self) -> Self {
        self.profile = true;
        self
    }

    /// Checks everything that can be checked without running, and builds each stage in its own thread.
    ///
    /// # Errors
    /// [`Error::Model`] (shapes, names, ties), [`Error::Partition`], [`Error::Setting`]; [`Error::Step`] when
    /// a stage cannot be built, for example because its parameters exceed its cap.
    pub fn build(mut self) -> Result<Pipeline> {
        let precision = self.check_settings()?;
        self.inputs = precision.fed(&self.inputs);
        let parameter_settings = self.apply_groups()?;
        let inferred = self.sequence.infer(&self.inputs, self.kind)?;
        let ties = self.sequence.ties()?;
        let compute = self.compute_actions();
        let cost = || self.sequence.costs(&self.inputs, self.kind);
        let weights = stage_weights(&compute, self.micro_batches);
        let balance = self.balance.cut(self.sequence.len(), cost, &weights)?;
        let ranges = topology::ranges(&balance);
        let trained_before = self.sequence.trained_before();
        topology::check_ties(&ranges, &self.devices, &ties)?;
        let (topology, views) = topology::build(&ranges, &inferred.skips, &ties, &trained_before);
        let program = lower(&compute, &topology, self.micro_batches)?;
        let (link_capacity, _) =
            simulate_with_room(&program, &Costs::unit(topology.stages)).map_err(Invalid::from)?;
        validate(&program, link_capacity)?;

        let trains = self.loss.is_some() && self.optimizer.is_some();
        let owned = topology::owned(&self.sequence, &ranges, &ties);
        let builds = ranges.iter().zip(views).enumerate().map(|(stage, (layers, edges))| {
            let mut plan = self.plan(stage, layers.clone(), precision);
            plan.input_grads = trained_before[layers.clone()].to_vec();
            plan.settings = parameter_settings[layers.clone()].to_vec();
            (plan.skips, plan.ties) = (inferred.skips.clone(), ties.clone());
            plan.peers = self.peers(stage, &topology);
            plan.edges = Arc::new(edges);
            let build: BuildDevice<Stage> = Box::new(move || Ok(vec![Stage::build(plan)?]));
            build
        });
        let settings = Settings { link_capacity, deadline: self.deadline, ..Settings::default() };
        let crew = Crew::spawn(builds.collect(), settings)?;
        Ok(Pipeline {
            crew,
            topology,
            schedule: self.schedule,
            remat: self.remat,
            micro_batches: self.micro_batches,
            balance,
            precision,
            loss: self.loss,
            metrics: self.metrics,
            training_metrics: self.training_metrics,
            trains,
            lr_override: None,
            rate: self.rate,
            loss_scale: LossScale::new(precision.compute),
            averages: if self.average.is_some() { Averages::Kept } else { Averages::None },
            torn: None,
            step: 0,
            seed: self.seed,
            owned,
            optimizer: self.optimizer,
            programs: HashMap::new(),
            shapes: Vec::new(),
            link_capacity,
            padding: self.padding,
            profiled: Vec::new(),
            sequence: self.sequence,
        })
    }

    pub(super) fn check_settings(&self) -> Result<Precision> {
        let refuse = |reason: String| Err(Error::Setting(reason));
        let stages = self.devices.len();
        if self.micro_batches == 0 || self.micro_batches > MICRO_BATCHES_MAX {
            return refuse(format!(
                "{} micro-batches: use 1 to {MICRO_BATCHES_MAX}",
                self.micro_batches
            ));
        }
        if self.threads == 0 || self.threads > 1024 {
            return refuse(format!("{} threads per stage: use 1 to 1024", self.threads));
        }
        self.devices.iter().try_for_each(|device| device.check())?;
        if self.average.is_some_and(|decay| !(0.0..1.0).contains(&decay)) {
            return refuse("the averages' decay must be at least 0 and below 1".into());
        }
        self.rate.check().map_err(Error::Setting)?;
        for (index, metric) in self.metrics.iter().enumerate() {
            if self.metrics[..index].iter().any(|other| other.name() == metric.name()) {
                let name = metric.name();
                return refuse(format!("two metrics are named '{name}': give each its own name"));
            }
        }
        if self.caps.len() > 1 && self.caps.len() != stages {
            return refuse(format!(
                "{} memory caps for {stages} stages: give one for all, or one per stage",
                self.caps.len()
            ));
        }
        self.remat.check(stages).map_err(Error::Setting)?;
        if self.max_norm.is_some_and(|norm| norm.is_nan() || norm <= 0.0) {
            return refuse("the largest gradient norm must be above 0".into());
        }
        if self.deadline.is_zero() {
            return refuse("the deadline must be longer than 0".into());
        }
        if let Some(optimizer) = &self.optimizer {
            let name = optimizer.name();
            optimizer.check().map_err(|reason| Error::Setting(format!("{name}: {reason}")))?;
        }
        if self.schedule == Schedule::ForwardOnly {
            return refuse("forward-only is no training schedule: use gpipe or 1f1b".into());
        }
        Precision::of(self.kind).ok_or_else(|| {
            let kind = self.kind;
            Error::Setting(format!(
                "dtype {kind:?} is not supported: use Float, Double, BFloat16 or Half"
            ))
        })
    }

    fn compute_actions(&self) -> ActionLists {
        let actions = self.schedule.actions(self.devices.len(), self.micro_batches);
        self.remat.apply(&actions)
    }

    /// Freezes what the groups freeze; the settings of every parameter, by layer.
    pub(super) fn apply_groups(&mut self) -> Result<Vec<Vec<ParameterSettings>>> {
        let mut owners: HashMap<String, String> = HashMap::new();
        let mut names = Vec::new();
        for layer in &self.sequence.layers {
            for parameter in &layer.parameters {
                let full = format!("{}.{}", layer.name, parameter.name);
                // A tied weight goes by the name of its first use.
                let owner = parameter.tie.as_ref().map(|tie| owners.entry(tie.clone()));
                names.push(owner.map_or(full.clone(), |entry| entry.or_insert(full).clone()));
            }
        }
        let found = settings(&self.groups, &names).map_err(Error::Setting)?;
        let mut found = found.into_iter();
        let mut all = Vec::new();
        for layer in &mut self.sequence.layers {
            let mut own = Vec::new();
            for parameter in &mut layer.parameters {
                let group = found.next().flatten();
                parameter.trainable &= group.is_none_or(|group| !group.frozen);
                own.push(group.map_or_else(ParameterSettings::default, |group| group.settings));
            }
            all.push(own);
        }
        Ok(all)
    }

    /// The device at the other end of each of a stage's edges.
    fn peers(&self, stage: usize, topology: &Topology) -> HashMap<EdgeId, Device> {
        let edges = topology.edges.iter().enumerate();
        let peer = |(index, edge): (usize, &gpipe_core::lower::Edge)| {
            let (from, to) = (edge.from.index(), edge.to.index());
            let other = if from == stage { to } else { from };
            let own = from == stage || to == stage;
            own.then(|| (EdgeId::from_index(index), self.devices[other]))
        };
        edges.filter_map(peer).collect()
    }

    /// The plan of one stage, but for what the whole model's shapes and the topology say.
    fn plan(
        &self,
        stage: usize,
        layers: std::ops::Range<usize>,
        precision: Precision,
    ) -> StagePlan {
        let last = stage + 1 == self.devices.len();
        let cap = if self.caps.len() == 1 { self.caps.first() } else { self.caps.get(stage) };
        StagePlan {
            stage: StageId::from_index(stage),
            last,
            named: self.sequence.layers[layers.clone()].to_vec(),
            layers,
            input_grads: Vec::new(),
            skips: Vec::new(),
            ties: Vec::new(),
            edges: Arc::default(),
            peers: HashMap::new(),
            device: self.devices[stage],
            first_on_device: !self.devices[..stage].contains(&self.devices[stage]),
            remat: self.remat.of(stage),
            seed: self.seed,
            precision,
            kernels: self.kernels,
            cap: cap.map(|cap| cap.0),
            max_norm: self.max_norm,
            keep_gradients: self.keep_gradients,
            threads: i32::try_from(self.threads).unwrap_or(1),
            loss: self.loss.clone().filter(|_| last),
            metrics: self.metrics.clone(),
            training_metrics: self.training_metrics,
            optimizer: self.optimizer.clone(),
            settings: Vec::new(),
            average: self.average,
            profile: self.profile,
        }
    }
}
