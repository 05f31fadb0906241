//! Plans: where to cut, how many micro-batches, which schedule and what to re-materialize. This
//! module predicts what a plan will take and hold before anything runs, and searches for the best
//! plan.
//!
//! - here: a plan, and its [`Prediction`]
//! - `request`: what may be chosen; `search`: the best plan of a [`Request`]
//! - `explore`: goes through the plans of one K, M and schedule; `space` prices them, `bound` rules
//!   them out, and `neighbours` are one move away
//! - `rejected`: what lost against the plan; `heuristic`: plans under schedules that the exact
//!   search does not cover
//! - `auto`: orders that are made for a plan's costs
//! - `shortage`: the smallest caps that work, if the given ones do not
//! - `advice`, `explain`: one better move; a plan in words

mod advice;
mod auto;
mod bound;
mod explain;
mod explore;
mod heuristic;
mod limit;
mod memory_bounds;
mod neighbours;
mod rejected;
mod request;
mod search;
mod shortage;
mod space;
mod stages;
mod sums;
mod text;

pub use advice::{Advice, Move, advice};
pub use explain::{explain, shortened};
pub use limit::Limit;
pub use rejected::Rejected;
pub use request::{Request, Usual};
pub use search::{Faster, Found, MadeOrder, search};
pub use shortage::Shortage;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use self::text::schedule as schedule_text;

use crate::{
    cost::{BadCosts, LayerCost, ModelCosts},
    ids::{MicroBatch, StageId},
    lower::{LowerError, Program, RematSet, lower},
    memory::{EdgeBytes, StageBytes, peaks, series},
    partition::{PartitionError, check_balance},
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    simulate::{Costs, Deadlock, StageCost, Timeline, simulate_with_room},
    topology::{Purpose, of_cut, ranges},
    units::{Bytes, Nanos},
};

/// A device that holds stages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanDevice {
    /// Speed relative to the device that the costs were measured on; above 0.
    pub speed: f64,
    /// The most bytes of tensors that the device may hold.
    pub memory: Option<Bytes>,
}

impl Default for PlanDevice {
    fn default() -> Self {
        Self { speed: 1.0, memory: None }
    }
}

/// The most stages of a plan.
const STAGES_MAX: usize = 1 << 12;
/// The most micro-batches of a plan.
const MICRO_BATCHES_MAX: usize = 1 << 16;
/// The most actions of a plan's program.
const ACTIONS_MAX: usize = 1 << 25;

/// How to run a model. Stage k is on device k, unless the schedule places it elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Layers per stage.
    pub balance: Vec<usize>,
    /// The number of micro-batches, M.
    pub micro_batches: usize,
    /// The order of forwards and backwards.
    #[serde(with = "schedule_text")]
    pub schedule: Schedule,
    /// What is discarded and recomputed.
    #[serde(with = "text")]
    pub remat: RematPolicies,
}

impl Plan {
    /// The number of devices that the plan is for.
    pub fn devices(&self) -> usize {
        self.schedule.devices(self.balance.len())
    }
}

/// What a plan will take and hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The list that will be executed.
    pub program: Program,
    /// The program's actions with their times.
    pub timeline: Timeline,
    /// What each stage will take and hold.
    pub stages: Vec<StagePrediction>,
    /// By edge: the bytes of its messages.
    pub edges: Vec<EdgeBytes>,
    /// Whether messages are memory of their receivers ([`ModelCosts::own_memory`]).
    own_memory: bool,
    /// By stage: its device.
    pub placement: Vec<usize>,
}

/// What one stage will take and hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagePrediction {
    /// The times of its actions; of the larger micro-batches if there are two sizes.
    pub cost: StageCost,
    /// The bytes of its actions.
    pub bytes: StageBytes,
    /// The most that it can hold, whatever the timing.
    pub peak: Bytes,
}

impl Prediction {
    /// The time of a step.
    pub fn step(&self) -> Nanos {
        self.timeline.makespan
    }

    /// The share of device time (devices times step) in which devices are not busy.
    pub fn bubble(&self) -> f64 {
        self.timeline.bubble()
    }

    /// The most that each device can hold: the sum of its stages' peaks, which need not coincide.
    pub fn device_peaks(&self) -> Vec<Bytes> {
        let mut peaks = vec![Bytes(0); self.program.devices.len()];
        for (stage, &device) in self.stages.iter().zip(&self.placement) {
            peaks[device] += stage.peak;
        }
        peaks
    }

    /// The bytes that a forward of a step in parts adds to each device, until its backward. `plan`
    /// is the one that was predicted.
    ///
    /// Three things count for a stage: what it keeps of each micro-batch, the statistics of its
    /// batch norms, and the values that it sent, as long as the receiver holds them. If the stage
    /// keeps its activations, they include the sent values, which then count once. If the last
    /// stage keeps activations, the pipeline's loss is counted, too. With a caller's loss the true
    /// number is smaller.
    pub fn open_forward(&self, plan: &Plan) -> Vec<Bytes> {
        let micro_batches = self.program.micro_batches;
        let lists = plan.schedule.in_parts(self.program.devices.len(), micro_batches);
        let recomputed = RematSet::from_actions(plan.remat.apply(&lists).iter().flatten());
        let mut held = vec![Bytes(0); self.program.devices.len()];
        for (stage, (own, &device)) in self.stages.iter().zip(&self.placement).enumerate() {
            let id = StageId::from_index(stage);
            let discarded = recomputed.count(id);
            let sent = self
                .program
                .topology
                .edges_where(|edge| edge.kind.per_micro_batch() && edge.from == id);
            let sent: Bytes = sent.map(|(edge, _)| self.edges[edge.index()].forward).sum();
            let StageBytes { forward, forward_kept, statistics, .. } = own.bytes;
            held[device] += forward_kept.after.times(micro_batches - discarded)
                + (forward.after + sent).times(discarded)
                + statistics.times(micro_batches);
        }
        held
    }

    /// The bytes of each device over the step. Each value holds until the next time.
    pub fn bytes(&self) -> Vec<Vec<(Nanos, Bytes)>> {
        let bytes: Vec<StageBytes> = self.stages.iter().map(|stage| stage.bytes).collect();
        let edges = if self.own_memory { &[][..] } else { &self.edges };
        let stages = series(&self.program, &self.timeline, &bytes, edges);
        let mut devices = vec![Vec::new(); self.program.devices.len()];
        for (own, &device) in stages.into_iter().zip(&self.placement) {
            devices[device] = together(&devices[device], &own);
        }
        devices
    }
}

/// The sum of two series.
fn together(a: &[(Nanos, Bytes)], b: &[(Nanos, Bytes)]) -> Vec<(Nanos, Bytes)> {
    let mut times: Vec<Nanos> = a.iter().chain(b).map(|(time, _)| *time).collect();
    times.sort_unstable();
    times.dedup();
    let at = |series: &[(Nanos, Bytes)], time: Nanos| {
        let after = series.partition_point(|(own, _)| *own <= time);
        after.checked_sub(1).map_or(Bytes(0), |last| series[last].1)
    };
    times.into_iter().map(|time| (time, at(a, time) + at(b, time))).collect()
}

/// Why a plan is impossible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A balance that does not fit.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// Costs that cannot be used.
    #[error(transparent)]
    Costs(#[from] BadCosts),
    /// The schedule cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The schedule deadlocks.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
    /// No plan fits the devices' memory.
    #[error(transparent)]
    Memory(#[from] Box<Shortage>),
    /// Anything else, with the remedy.
    #[error("{0}")]
    Setting(String),
}

/// Predicts what `plan` takes and holds in a step of `samples` samples. `devices` has one entry per
/// stage, unless the schedule puts several stages on one device.
///
/// # Errors
/// [`PlanError`] if costs, devices and plan do not fit each other.
pub fn predict(
    model: &ModelCosts,
    devices: &[PlanDevice],
    samples: usize,
    plan: &Plan,
) -> Result<Prediction, PlanError> {
    check(model, devices, samples, plan)?;
    let stages = plan.balance.len();
    let ranges = ranges(&plan.balance);
    let (skips, ties) = model.ends();
    let (topology, purposes) = of_cut(&ranges, model.across(&skips, &ties));
    let micro_batches = plan.micro_batches.min(samples);
    let per_step = 3 * stages + 4 * topology.edges.len();
    if per_step.saturating_mul(micro_batches) > ACTIONS_MAX {
        return Err(PlanError::Setting(format!(
            "{stages} stages, {} edges and {micro_batches} micro-batches make a step of more than \
            {ACTIONS_MAX} actions: use fewer stages or micro-batches",
            topology.edges.len()
        )));
    }
    let placement = plan.schedule.placement(devices.len());
    let compute = plan.remat.apply(&plan.schedule.actions(devices.len(), micro_batches));
    let program = lower(&compute, &topology, micro_batches)?;
    let placed: Vec<PlanDevice> = placement.iter().map(|&device| devices[device]).collect();
    let at = |samples| model.at(samples, &plan.schedule);
    let (simulated, edges) = costs_of(model, &placed, (samples, &at), plan, &ranges, &purposes);
    let larger = samples.div_ceil(micro_batches);
    let costs = model.at(larger, &plan.schedule);
    let bytes = ranges.iter().enumerate();
    let bytes = bytes.map(|(stage, range)| {
        model.stage_bytes(range.clone(), &costs, larger, plan.remat.of(stage))
    });
    let bytes: Vec<StageBytes> = bytes.collect();
    let (capacity, timeline) = simulate_with_room(&program, &simulated)?;
    let peaks = peaks(&program, capacity, &bytes, model.held_for_receivers(&edges));
    let stages = simulated.stages.iter().zip(bytes).zip(peaks);
    let stages =
        stages.map(|((&cost, bytes), peak)| StagePrediction { cost, bytes, peak }).collect();
    let own_memory = model.own_memory;
    Ok(Prediction { program, timeline, stages, edges, own_memory, placement })
}

/// Checks that model, devices and plan fit each other.
fn check(
    model: &ModelCosts,
    devices: &[PlanDevice],
    samples: usize,
    plan: &Plan,
) -> Result<(), PlanError> {
    let setting = |text: String| Err(PlanError::Setting(text));
    let stages = plan.balance.len();
    model.check()?;
    check_balance(&plan.balance, stages, model.layers.len())?;
    plan.remat.check(stages).map_err(PlanError::Setting)?;
    let placed = plan.schedule.stages(devices.len());
    let placed = placed.map_err(|error| PlanError::Setting(error.to_string()))?;
    if placed != stages {
        let (devices, schedule) = (devices.len(), &plan.schedule);
        return setting(format!(
            "the balance is for {stages} stages, and {schedule} makes {placed} on {devices} \
            devices: give one number per stage, or as many devices as the stages need"
        ));
    }
    let larger = samples.div_ceil(plan.micro_batches.min(samples).max(1));
    if plan.schedule.splits() && !model.has_halves(larger, &plan.schedule) {
        return setting(format!(
            "the costs do not say what the halves of a backward take, which {} needs: measure a \
            profile under it, or plan with analytic costs",
            plan.schedule
        ));
    }
    let is_selective = (0..stages).any(|stage| plan.remat.of(stage) == Remat::Selective);
    if is_selective && !model.has_selective(larger, &plan.schedule) {
        return setting(
            "the costs do not say what re-materialization takes that keeps what products gave, \
            which selective needs: measure a profile again, or plan with analytic costs"
                .into(),
        );
    }
    let fits = plan.schedule.check_micro_batches(plan.micro_batches);
    fits.map_err(|error| PlanError::Setting(error.to_string()))?;
    check_devices(devices)?;
    check_size(stages, plan.micro_batches, samples)
}

fn check_devices(devices: &[PlanDevice]) -> Result<(), PlanError> {
    match devices.iter().find(|d| !(d.speed.is_finite() && d.speed > 0.0)) {
        Some(PlanDevice { speed, .. }) => {
            Err(PlanError::Setting(format!("a device's speed is {speed}: it must be above 0")))
        }
        None => Ok(()),
    }
}

fn check_size(stages: usize, micro_batches: usize, samples: usize) -> Result<(), PlanError> {
    let setting = |text: String| Err(PlanError::Setting(text));
    if samples == 0 || micro_batches == 0 {
        return setting(format!(
            "a step of {samples} samples in {micro_batches} micro-batches: use at least 1 of each"
        ));
    }
    if stages > STAGES_MAX {
        return setting(format!("{stages} stages are too many: use at most {STAGES_MAX}"));
    }
    if micro_batches > MICRO_BATCHES_MAX {
        return setting(format!(
            "{micro_batches} micro-batches are too many: use at most {MICRO_BATCHES_MAX}"
        ));
    }
    Ok(())
}

/// The times of a plan's actions and messages, and the bytes of the messages. `devices` is by
/// stage.
fn costs_of(
    model: &ModelCosts,
    devices: &[PlanDevice],
    (samples, layers): (usize, &dyn Fn(usize) -> Vec<LayerCost>),
    plan: &Plan,
    ranges: &[Range<usize>],
    purposes: &[Purpose],
) -> (Costs, Vec<EdgeBytes>) {
    let micro_batches = plan.micro_batches.min(samples).max(1);
    let (larger, smaller) = (samples.div_ceil(micro_batches), samples / micro_batches);
    let costs = layers(larger);
    let at = |costs: &[_]| -> Vec<StageCost> {
        let stage = |(stage, (range, device)): (usize, (&Range<usize>, &PlanDevice))| {
            model.stage_cost(range.clone(), costs, plan.remat.of(stage), device.speed)
        };
        ranges.iter().zip(devices).enumerate().map(stage).collect()
    };
    let edges = model.edge_bytes(ranges, &costs, larger, purposes);
    let simulated = Costs {
        stages: at(&costs),
        smaller: if smaller < larger { at(&layers(smaller)) } else { Vec::new() },
        smaller_from: (smaller < larger).then(|| MicroBatch::from_index(samples % micro_batches)),
        links: model.link_costs(&edges),
    };
    (simulated, edges)
}
