//! What a plan may choose from, and the search for the best one.

use gpipe::{RematPolicies, Schedule};
use gpipe_core::plan::{Found, PlanDevice, Request, Usual, search};

use crate::{
    CliError,
    config::Config,
    output::prose,
    plan_costs::powers_of_two,
    plan_file::{PlanFile, Source},
    values::ScheduleChoice,
};

/// The choices of the planner, which are the same for all ways to use a machine. Empty lists and
/// `None` leave everything open.
#[derive(Default, Clone)]
pub(crate) struct Choices {
    pub stages: Vec<usize>,
    pub micro_batches: Vec<usize>,
    pub schedules: Vec<Schedule>,
    /// Whether orders are made, too.
    pub makes_orders: bool,
    /// Whether a better plan is taken even if the configured schedule is within the spread.
    pub takes_the_best: bool,
    pub balance: Option<Vec<usize>>,
    pub remat: Option<RematPolicies>,
    /// Whether there must be one replica, as the command line says.
    pub one_replica: bool,
    /// Whether replicas must keep the size of micro-batches, because batch norms see it.
    pub keeps_sizes: bool,
    /// Whether nothing is said of sizes that were not measured, because it was said before.
    pub is_quiet: bool,
}

impl Choices {
    /// Keeps the size of micro-batches, on which batch norms depend.
    pub(crate) fn keep_sizes(&mut self, micro_batches: usize) {
        self.micro_batches = vec![micro_batches];
        self.keeps_sizes = true;
    }
}

/// The M among which a plan chooses unless told otherwise: powers of two, and what is configured.
pub(crate) fn usual_micro_batches(config: &Config) -> Vec<usize> {
    let samples = config.samples_of_a_pipeline();
    let own = config.pipeline.micro_batches.min(samples);
    let mut all: Vec<usize> = powers_of_two(samples).chain([own]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

pub(crate) fn find(
    source: &mut Source,
    devices: &[PlanDevice],
    config: &Config,
    choices: Choices,
) -> Result<Found, CliError> {
    // Set here, where all plans are made, so that advice uses the same costs.
    source.costs.replicated = config.pipeline.replicas > 1;
    source.costs.optimizer_shards = config.optimizer_shards();
    source.costs.own_memory =
        config.pipeline.devices.0.iter().any(|own| *own != gpipe::Device::Cpu);
    let samples = config.samples_of_a_pipeline();
    let or = |given: Vec<usize>, other: Vec<usize>| if given.is_empty() { other } else { given };
    // Unless told otherwise, the planner uses only micro-batch sizes that were measured.
    let mut powers = usual_micro_batches(config);
    let is_measured = |m: usize| source.analytic || source.costs.has_size(samples.div_ceil(m));
    if choices.micro_batches.is_empty() && !choices.is_quiet {
        tell_unmeasured(&powers, samples, is_measured);
    }
    powers.retain(|&m| is_measured(m));
    for &m in &choices.micro_batches {
        let size = samples.div_ceil(m.clamp(1, samples));
        if !source.costs.has_size(size) && !choices.is_quiet {
            prose!(
                "M = {m}: micro-batches of {size} samples were not measured; their costs are on a \
                line through the nearest sizes"
            );
        }
    }
    if let Some(stages) = choices.stages.iter().find(|&&stages| stages > devices.len()) {
        let devices = devices.len();
        return Err(CliError::Usage(format!(
            "--stages {stages}: there are {devices} devices; --devices says how many"
        )));
    }
    let usual = match &config.pipeline.schedule {
        _ if choices.takes_the_best => None,
        ScheduleChoice::Named(schedule) => Some(Usual {
            stages: devices.len(),
            micro_batches: config.pipeline.micro_batches,
            schedule: schedule.clone(),
        }),
        ScheduleChoice::File(_) | ScheduleChoice::Auto => None,
    };
    let mut schedules = or_all(choices.schedules);
    let mut makes_orders = choices.makes_orders;
    if devices.len() == 1 {
        // On one device there is nothing to overlap. One stage has the least to hand over.
        let (one, several): (Vec<_>, _) =
            schedules.into_iter().partition(|schedule| schedule.stages(1) == Ok(1));
        schedules = if one.is_empty() { several } else { one };
        makes_orders = false;
    }
    Ok(search(&Request {
        model: &source.costs,
        devices,
        samples,
        stages: or(choices.stages, vec![devices.len()]),
        micro_batches: or(choices.micro_batches, powers),
        schedules,
        makes_orders,
        balance: choices.balance,
        remat: choices.remat,
        budget: Request::BUDGET,
        usual,
    })?)
}

/// The file of a plan that was found.
pub(crate) fn file(
    source: &Source,
    devices: &[PlanDevice],
    config: &Config,
    found: &Found,
) -> PlanFile {
    let predicted = (&found.prediction, found.interval);
    PlanFile::new(source, config.samples_of_a_pipeline(), devices, &found.plan, predicted)
}

/// Names the values of M that are left out because no micro-batches of their size were measured.
fn tell_unmeasured(all: &[usize], samples: usize, is_measured: impl Fn(usize) -> bool) {
    let without = all.iter().filter(|&&m| !is_measured(m));
    let without: Vec<String> =
        without.map(|m| format!("{m} ({} samples)", samples.div_ceil(*m))).collect();
    if !without.is_empty() {
        prose!(
            "left out: M = {}, of whose size no micro-batches were measured: gpipe profile \
            --micro-batches, or gpipe plan --micro-batches, which interpolates",
            without.join(", ")
        );
    }
}

fn or_all(schedules: Vec<Schedule>) -> Vec<Schedule> {
    if schedules.is_empty() { Schedule::SEARCHED_EXACTLY.to_vec() } else { schedules }
}

/// All named schedules whose costs are known.
pub(crate) fn all_schedules(source: &Source) -> Vec<Schedule> {
    let costs = &source.costs;
    let has_halves = |schedule: &Schedule| {
        costs.sizes.keys().any(|&samples| costs.has_halves(samples, schedule))
    };
    let named = Schedule::NAMED.into_iter();
    named.filter(|schedule| !schedule.splits() || has_halves(schedule)).collect()
}
