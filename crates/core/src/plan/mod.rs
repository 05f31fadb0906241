//! Plans: where to cut, how many micro-batches, which schedule and what to re-materialize; and what a plan will take
//! and hold, before anything runs.
//!
//! - here: a plan, and its [`Prediction`]

use crate::{
    cost::{BadCosts, ModelCosts},
    ids::MicroBatch,
    lower::{LowerError, Program, lower},
    memory::{EdgeBytes, StageBytes, peaks, series},
    partition::{PartitionError, check_balance},
    remat::RematPolicies,
    report,
    schedule::Schedule,
    simulate::{Costs, Deadlock, StageCost, Timeline, simulate_with_room},
    topology::{of_cut, ranges},
    units::{Bytes, Nanos},
};

/// A device that a stage is placed on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanDevice {
    /// How many times as fast as the device that the costs are of; above 0.
    pub speed: f64,
    /// Most bytes of tensors that its stage may hold.
    pub memory: Option<Bytes>,
}

impl Default for PlanDevice {
    fn default() -> Self {
        Self { speed: 1.0, memory: None }
    }
}

/// How to run a model: stage k is on device k.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Layers per stage.
    pub balance: Vec<usize>,
    /// M.
    pub micro_batches: usize,
    /// The order of forwards and backwards.
    pub schedule: Schedule,
    /// What is discarded and recomputed.
    pub remat: RematPolicies,
}

/// What a plan will take and hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The list that will be executed.
    pub program: Program,
    /// Its actions with their times.
    pub timeline: Timeline,
    /// By stage.
    pub stages: Vec<StagePrediction>,
    /// By edge: what its messages hold.
    pub edges: Vec<EdgeBytes>,
}

/// What one stage will take and hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagePrediction {
    /// Of its actions; for the larger micro-batches where there are two sizes.
    pub cost: StageCost,
    /// Of its actions.
    pub bytes: StageBytes,
    /// Most that it can hold, whatever the timing.
    pub peak: Bytes,
}

impl Prediction {
    /// The time of a step.
    pub fn step(&self) -> Nanos {
        self.timeline.makespan
    }

    /// The share of devices x step in which a device is not busy.
    pub fn bubble(&self) -> f64 {
        report::bubble(&self.timeline)
    }

    /// The bytes of each stage over the step: from each time on, until the next one.
    pub fn bytes(&self) -> Vec<Vec<(Nanos, Bytes)>> {
        let bytes: Vec<StageBytes> = self.stages.iter().map(|stage| stage.bytes).collect();
        series(&self.program, &self.timeline, &bytes, &self.edges)
    }
}

/// A plan that cannot be.
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
    /// Anything else, with the remedy.
    #[error("{0}")]
    Setting(String),
}

/// What `plan` takes and holds in a step of `samples` samples on `devices`, one per stage.
///
/// # Errors
/// [`PlanError`]: costs, devices and plan that do not fit each other.
pub fn predict(
    model: &ModelCosts,
    devices: &[PlanDevice],
    samples: usize,
    plan: &Plan,
) -> Result<Prediction, PlanError> {
    let stages = plan.balance.len();
    model.check()?;
    check_balance(&plan.balance, stages, model.layers.len())?;
    plan.remat.check(stages).map_err(PlanError::Setting)?;
    if devices.len() != stages {
        let devices = devices.len();
        return Err(PlanError::Setting(format!(
            "the plan is for {stages} stages, there are {devices} devices: give one device per stage"
        )));
    }
    if let Some(device) = devices.iter().find(|d| !(d.speed.is_finite() && d.speed > 0.0)) {
        let speed = device.speed;
        return Err(PlanError::Setting(format!("a device's speed is {speed}: it must be above 0")));
    }
    if samples == 0 || plan.micro_batches == 0 {
        return Err(PlanError::Setting(
            "a step needs samples and micro-batches: at least 1".into(),
        ));
    }
    let ranges = ranges(&plan.balance);
    let (skips, ties) = model.ends();
    let (topology, purposes) = of_cut(&ranges, model.across(&skips, &ties));
    let micro_batches = plan.micro_batches.min(samples);
    let compute = plan.remat.apply(&plan.schedule.actions(stages, micro_batches));
    let program = lower(&compute, &topology, micro_batches)?;

    let (larger, smaller) = (samples.div_ceil(micro_batches), samples / micro_batches);
    let costs = model.at(larger);
    let at = |costs: &[_]| -> Vec<StageCost> {
        let stage = |(stage, (range, device)): (usize, (&std::ops::Range<usize>, &PlanDevice))| {
            model.stage_cost(range.clone(), costs, plan.remat.of(stage), device.speed)
        };
        ranges.iter().zip(devices).enumerate().map(stage).collect()
    };
    let bytes: Vec<StageBytes> = ranges
        .iter()
        .enumerate()
        .map(|(stage, range)| model.stage_bytes(range.clone(), &costs, plan.remat.of(stage)))
        .collect();
    let edges = model.edge_bytes(&ranges, &costs, larger, &purposes);
    let simulated = Costs {
        stages: at(&costs),
        smaller: if smaller < larger { at(&model.at(smaller)) } else { Vec::new() },
        smaller_from: (smaller < larger).then(|| MicroBatch::from_index(samples % micro_batches)),
        links: model.link_costs(&edges),
    };
    let (capacity, timeline) = simulate_with_room(&program, &simulated)?;
    let peaks = peaks(&program, capacity, &bytes, &edges);
    let stages = simulated.stages.iter().zip(bytes).zip(peaks);
    let stages =
        stages.map(|((&cost, bytes), peak)| StagePrediction { cost, bytes, peak }).collect();
    Ok(Prediction { program, timeline, stages, edges })
}
