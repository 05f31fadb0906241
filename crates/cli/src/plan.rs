//! `gpipe plan`: how to run a model, decided before it runs.

use std::path::PathBuf;

use gpipe::{Balance, Bytes, Nanos, RematPolicies, Schedule};
use gpipe_core::plan::{Found, PlanDevice, Request, Usual, advice, explain, search};
use gpipe_observe::picture::{self, Panel, Scene};

use crate::{
    CliError,
    args::PlanArguments,
    config::{Config, OnUnreadableChoice},
    files::write_aside,
    machine,
    output::say,
    plan_costs::{positive, powers_of_two, source},
    plan_file::{Deployment, PlanFile, Source},
    plan_ways::{self, Way},
    profile::{self, host_memory},
    values::ScheduleChoice,
};

/// Maximum number of devices of a plan.
const DEVICES_MAX: usize = 4096;
/// Plans, prints explanations, and writes the requested files.
pub(crate) fn run(arguments: &PlanArguments) -> Result<(), CliError> {
    let mut config = Config::load(&arguments.config)?.before_order();
    let counts = [("--stages", &arguments.stages), ("--micro-batches", &arguments.micro_batches)];
    if let Some((flag, _)) = counts.iter().find(|(_, given)| given.contains(&0)) {
        return Err(CliError::Usage(format!("{flag} 0: use at least 1")));
    }
    for &speed in &arguments.speed {
        positive("--speed", speed)?;
    }
    let devices = arguments.devices.unwrap_or(config.pipeline.stages);
    let caps = std::mem::take(&mut config.pipeline.memory.0);
    let devices = placed(devices, &caps, &arguments.speed)?;
    let balance = fixed_balance(&config, arguments.config.balance.is_some());
    let mut source = source(arguments, &config)?;
    let remat = arguments.remat.clone();
    let makes_orders = arguments.schedule.contains(&ScheduleChoice::Auto);
    let named = arguments.schedule.iter().filter(|choice| **choice != ScheduleChoice::Auto);
    let mut schedules = named.map(planned).collect::<Result<Vec<_>, _>>()?;
    if schedules.is_empty() && makes_orders {
        schedules = all_schedules(&source);
    }
    let choices = Choices {
        makes_orders,
        takes_the_best: makes_orders,
        stages: arguments.stages.clone(),
        micro_batches: arguments.micro_batches.clone(),
        schedules,
        balance,
        remat,
        is_quiet: false,
    };
    let found = find(&mut source, &devices, &config, choices.clone());
    let mut ways = Vec::new();
    // A way to use other devices, or other numbers of stages, is not asked for.
    let is_open = arguments.stages.is_empty() && arguments.profile.is_none();
    let are_alike = arguments.speed.is_empty() && caps.len() <= 1;
    let are_here = devices.len() <= machine::cores();
    if !source.analytic && is_open && are_alike && are_here {
        ways = other_ways(arguments, (&config, &devices, &source), &choices)?;
    }
    let are_compared = !ways.is_empty();
    match found {
        Ok(found) => {
            let deployment = Deployment { replicas: 1, threads: config.pipeline.threads_per_stage };
            ways.push(Way { deployment, source, devices, config, found, sums: Nanos(0) });
        }
        Err(error) if !are_compared => return Err(error),
        Err(error) => say!("left out: a pipeline of {} stages: {error}", devices.len()),
    }
    ways.sort_by_key(Way::step);
    let others = ways.split_off(1);
    let Some(way) = ways.pop() else { return Ok(()) };
    let text = way.text();
    let Way { deployment, source, devices, config, found, sums } = way;
    say!("costs: {}", source.text);
    if found.interval.is_none() {
        say!("{}", uncertain(source.analytic));
    }
    say!("{}", explain(&found).trim_end());
    if sums > Nanos(0) {
        say!("with the sums of gradients, a step takes {}", found.prediction.step() + sums);
    }
    if found.advice.is_empty() {
        // If choices were taken away, the best plan may still not be a good one.
        let samples = config.samples_of_a_pipeline();
        if let Some(advice) = advice(&source.costs, &found.devices, samples, &found.plan)? {
            say!("{advice}");
        }
    }
    say!("{}", host_memory(&source.costs));
    if config.pipeline.replicas > 1 && sums == Nanos(0) {
        say!(
            "of one of {} replicas, with {} samples of each mini-batch{}; the time that sums of \
            gradients take is not in the prediction",
            config.pipeline.replicas,
            config.samples_of_a_pipeline(),
            if config.optimizer_shards() > 1 {
                "; each keeps a part of the optimizer state"
            } else {
                ""
            }
        );
    }
    if are_compared {
        say!("ways to use the cores, a step of each:\n  {text} (chosen)");
        others.iter().for_each(|other| say!("  {}", other.text()));
    }
    let name = arguments.config.name();
    let default = PathBuf::from("out").join(format!("{name}.plan.json"));
    let path = arguments.out.clone().unwrap_or(default);
    let mut own = file(&source, &devices, &config, &found);
    if are_compared {
        own.deployment = Some(deployment);
        own.predicted.step += sums;
        let later = |[low, high]: [Nanos; 2]| [low + sums, high + sums];
        own.predicted.interval = own.predicted.interval.map(later);
    }
    own.write(&path)?;
    say!("{}: gpipe train --plan runs it", path.display());
    let drawn = Drawn::new(&found, &name);
    let scene = drawn.scene(&found, &source.text);
    if let Some(path) = &arguments.svg {
        write_aside(path, &picture::svg(&scene))?;
        say!("{}: the planned step", path.display());
    }
    if let Some(path) = &arguments.html {
        write_aside(path, &picture::html(&scene))?;
        say!("{}: the planned step", path.display());
    }
    Ok(())
}

/// The best plans of other ways to use the devices' cores than one pipeline with a thread for each
/// stage.
fn other_ways(
    arguments: &PlanArguments,
    (config, devices, costs): (&Config, &[PlanDevice], &Source),
    choices: &Choices,
) -> Result<Vec<Way>, CliError> {
    let mut all = Vec::new();
    let choices = Choices { is_quiet: true, ..choices.clone() };
    let no_replicas = why_no_replicas(config, costs);
    if let Some(reason) = no_replicas.filter(|_| devices.len() > 1) {
        say!("left out: replicas: {reason}");
    }
    for (deployment, config, devices) in plan_ways::others(config, devices) {
        if deployment.replicas > 1 && no_replicas.is_some() {
            continue;
        }
        let mut source = costs.clone();
        if deployment.threads > 1 {
            let path = profile::path_of_threads(&arguments.config, deployment.threads);
            let Some(own) = plan_ways::costs_of_threads(&config, &path)? else { continue };
            source = own;
        }
        // A cut or policies for another number of stages are not for this way.
        let found = match find(&mut source, &devices, &config, choices.clone()) {
            Ok(found) => found,
            Err(error) => {
                let Deployment { replicas, threads } = deployment;
                say!("left out: {replicas} replicas, {threads} threads for each stage: {error}");
                continue;
            }
        };
        let gradients = source.costs.layers.iter().map(|layer| layer.gradients).sum();
        let sums = plan_ways::time_of_sums(deployment.replicas, gradients)?;
        all.push(Way { deployment, source, devices, config, found, sums });
    }
    Ok(all)
}

/// Why a plan does not choose replicas, if it does not.
fn why_no_replicas(config: &Config, costs: &Source) -> Option<&'static str> {
    if costs.costs.layers.iter().any(|layer| layer.statistics.0 > 0) {
        return Some(
            "batch norms would see micro-batches of another size; --replicas asks for them",
        );
    }
    let skips = config.images.on_unreadable == OnUnreadableChoice::Skip;
    skips.then_some("images.on_unreadable = \"skip\" is for one replica")
}

/// Why a predicted step has no interval.
fn uncertain(analytic: bool) -> &'static str {
    match analytic {
        true => {
            "costs from shapes do not say how certain they are: gpipe profile measures that, too"
        }
        false => "this profile does not say how certain it is: gpipe profile measures it again",
    }
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

/// A schedule to choose from. Files are refused.
fn planned(choice: &ScheduleChoice) -> Result<Schedule, CliError> {
    match choice {
        ScheduleChoice::Named(schedule) => Ok(schedule.clone()),
        ScheduleChoice::File(_) | ScheduleChoice::Auto => Err(CliError::Usage(format!(
            "--schedule {choice}: a plan chooses among named schedules; run a file with `gpipe \
            train --schedule {choice}`"
        ))),
    }
}

/// The drawing of a plan.
struct Drawn {
    bytes: Vec<Vec<(Nanos, Bytes)>>,
    peaks: Vec<Bytes>,
    caps: Vec<Option<Bytes>>,
    title: String,
    subtitle: Vec<String>,
}

impl Drawn {
    fn new(found: &Found, name: &str) -> Self {
        let Found { plan, prediction, .. } = found;
        let balance = match plan.balance.len() {
            0..=16 => format!(", layers {}", Balance::Layers(plan.balance.clone())),
            _ => String::new(),
        };
        Self {
            bytes: prediction.bytes(),
            peaks: prediction.device_peaks(),
            caps: found.devices.iter().map(|device| device.memory).collect(),
            title: format!("{name}: a planned step"),
            subtitle: vec![format!(
                "{} stages, M = {}, {}, re-materialization {}{balance}",
                plan.balance.len(),
                plan.micro_batches,
                plan.schedule,
                plan.remat
            )],
        }
    }

    fn scene<'a>(&'a self, found: &'a Found, source: &str) -> Scene<'a> {
        let panel = Panel::new("predicted", source, &found.prediction.timeline);
        let panel = Panel { bytes: &self.bytes, peaks: &self.peaks, caps: &self.caps, ..panel };
        Scene { title: self.title.clone(), subtitle: self.subtitle.clone(), panels: vec![panel] }
    }
}

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
    /// Whether nothing is said of sizes that were not measured, because it was said before.
    pub is_quiet: bool,
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
    let mut powers: Vec<usize> = powers_of_two(samples).collect();
    powers.push(config.pipeline.micro_batches.min(samples));
    // Unless told otherwise, the planner uses only micro-batch sizes that were measured.
    powers.sort_unstable();
    powers.dedup();
    let is_measured = |m: usize| source.analytic || source.costs.has_size(samples.div_ceil(m));
    if choices.micro_batches.is_empty() && !choices.is_quiet {
        tell_unmeasured(&powers, samples, is_measured);
    }
    powers.retain(|&m| is_measured(m));
    for &m in &choices.micro_batches {
        let size = samples.div_ceil(m.clamp(1, samples));
        if !source.costs.has_size(size) && !choices.is_quiet {
            say!(
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

/// Names the values of M that are left out because no micro-batches of their size were measured.
fn tell_unmeasured(all: &[usize], samples: usize, is_measured: impl Fn(usize) -> bool) {
    let without = all.iter().filter(|&&m| !is_measured(m));
    let without: Vec<String> =
        without.map(|m| format!("{m} ({} samples)", samples.div_ceil(*m))).collect();
    if !without.is_empty() {
        say!(
            "left out: M = {}, of whose size no micro-batches were measured: gpipe profile \
            --micro-batches, or gpipe plan --micro-batches, which interpolates",
            without.join(", ")
        );
    }
}

fn or_all(schedules: Vec<Schedule>) -> Vec<Schedule> {
    if schedules.is_empty() { Schedule::SEARCHED_EXACTLY.to_vec() } else { schedules }
}

pub(crate) fn file(
    source: &Source,
    devices: &[PlanDevice],
    config: &Config,
    found: &Found,
) -> PlanFile {
    let predicted = (&found.prediction, found.interval);
    PlanFile::new(source, config.samples_of_a_pipeline(), devices, &found.plan, predicted)
}

/// Devices with memory caps and speeds. There may be one value for all devices, or one per device.
pub(crate) fn placed(
    count: usize,
    caps: &[Bytes],
    speeds: &[f64],
) -> Result<Vec<PlanDevice>, CliError> {
    let fits = |given: usize, what: &str| match given {
        0 | 1 => Ok(()),
        _ if given == count => Ok(()),
        _ => Err(CliError::Usage(format!(
            "{given} {what} for {count} devices: give one for all, or one for each"
        ))),
    };
    if !(1..=DEVICES_MAX).contains(&count) {
        return Err(CliError::Usage(format!(
            "{count} devices (--devices, or pipeline.stages): use 1 to {DEVICES_MAX}"
        )));
    }
    fits(caps.len(), "memory caps")?;
    fits(speeds.len(), "speeds")?;
    let device = |index: usize| PlanDevice {
        speed: speeds.get(index).or(speeds.first()).copied().unwrap_or(1.0),
        memory: caps.get(index).or(caps.first()).copied(),
    };
    Ok((0..count).map(device).collect())
}

/// The cut, if the command line fixes it.
pub(crate) fn fixed_balance(config: &Config, given: bool) -> Option<Vec<usize>> {
    match &config.pipeline.balance {
        Balance::Layers(layers) if given => Some(layers.clone()),
        _ => None,
    }
}
