//! `gpipe plan`, and the plans of `gpipe train --plan`: how to run a model, decided before it runs.

use std::path::{Path, PathBuf};

use gpipe::{Balance, Bytes, Nanos, RematPolicies, Schedule, Sequence};
use gpipe_core::plan::{Found, PlanDevice, Request, Usual, advice, explain, search};
use gpipe_observe::picture::{self, Panel, Scene};

use crate::{
    CliError,
    args::{ConfigArguments, PlanArguments},
    config::Config,
    files::write_aside,
    output::say,
    plan_costs::{measured, positive, powers_of_two, source},
    plan_file::{PlanFile, Source},
    processes::Processes,
    profile::{self, host_memory},
    task::Task,
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
    };
    let found = find(&mut source, &devices, &config, choices)?;
    say!("costs: {}", source.text);
    if found.interval.is_none() {
        say!("{}", uncertain(source.analytic));
    }
    say!("{}", explain(&found).trim_end());
    if found.advice.is_empty() {
        // If choices were taken away, the best plan may still not be a good one.
        let samples = config.samples_of_a_pipeline();
        if let Some(advice) = advice(&source.costs, &found.devices, samples, &found.plan)? {
            say!("{advice}");
        }
    }
    say!("{}", host_memory(&source.costs));
    if config.pipeline.replicas > 1 {
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
    let name = arguments.config.name();
    let default = PathBuf::from("out").join(format!("{name}.plan.json"));
    let path = arguments.out.clone().unwrap_or(default);
    file(&source, &devices, &config, &found).write(&path)?;
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

/// Why a predicted step has no interval.
fn uncertain(analytic: bool) -> &'static str {
    match analytic {
        true => {
            "costs from shapes do not say how certain they are: gpipe profile measures that, too"
        }
        false => "this profile does not say how certain it is: gpipe profile measures it again",
    }
}

/// The plan that was requested for a training.
pub(crate) enum Wanted {
    Automatic,
    /// A plan from the file with this name.
    Given(String, Box<PlanFile>),
}

/// Parses `--plan`. A file is read now, before any work.
pub(crate) fn wanted(argument: Option<&str>) -> Result<Option<Wanted>, CliError> {
    Ok(match argument {
        None => None,
        Some("auto") => Some(Wanted::Automatic),
        Some(path) => {
            Some(Wanted::Given(path.to_owned(), Box::new(PlanFile::read(Path::new(path))?)))
        }
    })
}

/// The plan that a training follows, if one was requested: read from a file, or made here. Changes
/// `config` to follow it.
pub(crate) fn for_training(
    wanted: Option<Wanted>,
    arguments: &ConfigArguments,
    config: &mut Config,
    (task, model): (&dyn Task, &Sequence),
    processes: &Processes,
) -> Result<Option<PlanFile>, CliError> {
    let (plan, origin) = match wanted {
        None if config.pipeline.schedule == ScheduleChoice::Auto => {
            let pipeline = &config.pipeline;
            let choices = Choices {
                micro_batches: vec![pipeline.micro_batches.min(config.samples_of_a_pipeline())],
                balance: fixed_balance(config, true),
                remat: Some(pipeline.remat.clone()),
                takes_the_best: true,
                ..Choices::default()
            };
            let own = config.before_order();
            let plan = automatic(arguments, &own, (task, model), choices, processes)?;
            (plan, "--schedule auto".to_owned())
        }
        None => return Ok(None),
        Some(Wanted::Automatic) => {
            let (own, choices) = (config.before_order(), Choices::default());
            let plan = automatic(arguments, &own, (task, model), choices, processes)?;
            (plan, "--plan auto".to_owned())
        }
        Some(Wanted::Given(path, plan)) => {
            if arguments.memory.is_some() {
                return Err(CliError::Usage(format!(
                    "--memory: the caps of {path} hold; leave it out, or plan again with it"
                )));
            }
            let own = profile::subject(config, model)?;
            let own = if plan.analytic { own.of_shapes() } else { own };
            plan.subject.check(&own, &path).map_err(profile::measure_again)?;
            (*plan, path)
        }
    };
    plan.apply(config, &origin)?;
    let predicted = &plan.predicted;
    say!(
        "plan: {} stages, M = {}, {}, re-materialization {}; predicted: {}{} per step, bubble \
        {:.1}%, peak {} ({})",
        plan.plan.balance.len(),
        plan.plan.micro_batches,
        plan.plan.schedule,
        plan.plan.remat,
        predicted.step,
        predicted.quartiles(),
        100.0 * predicted.bubble,
        predicted.peaks.iter().max().copied().unwrap_or_default(),
        plan.source
    );
    Ok(Some(plan))
}

/// Plans for the configured stages and memory, with an existing profile or one that is measured
/// now.
fn automatic(
    arguments: &ConfigArguments,
    config: &Config,
    (task, model): (&dyn Task, &Sequence),
    mut choices: Choices,
    processes: &Processes,
) -> Result<PlanFile, CliError> {
    let path = profile::default_path(arguments);
    let subject = profile::subject(config, model)?;
    // Of several processes, rank 0 looks for a profile, and all of them plan with it.
    let there = processes.decided(|| {
        let found = match path.exists() {
            true => match profile::read(&path) {
                Ok(found) => Some(found).filter(|found| found.subject == subject),
                Err(error) => {
                    say!("{error}: it is measured anew");
                    None
                }
            },
            false => None,
        };
        Ok(found)
    })?;
    let found = match there {
        Some(found) => found,
        None => {
            let own = profile::measure_for_plan(config, (task, model), processes)?;
            processes.decided(|| profile::write(&path, &own).map(|()| own))?
        }
    };
    let mut source = measured(found, &path);
    let pipeline = &config.pipeline;
    let devices = placed(pipeline.stages, &pipeline.memory.0, &[])?;
    choices.schedules = all_schedules(&source);
    choices.makes_orders = true;
    if source.costs.layers.iter().any(|layer| layer.statistics.0 > 0) {
        // Batch norms depend on the size of micro-batches, so M must not change.
        choices.micro_batches = vec![pipeline.micro_batches];
    }
    let found = find(&mut source, &devices, config, choices)?;
    if let Some(text) = found.within().or_else(|| found.made_text()) {
        say!("{text}");
    }
    Ok(file(&source, &devices, config, &found))
}

/// All named schedules whose costs are known.
fn all_schedules(source: &Source) -> Vec<Schedule> {
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

/// The choices of the planner. Empty lists and `None` leave everything open.
#[derive(Default)]
struct Choices {
    stages: Vec<usize>,
    micro_batches: Vec<usize>,
    schedules: Vec<Schedule>,
    /// Whether orders are made, too.
    makes_orders: bool,
    /// Whether a better plan is taken even if the configured schedule is within the spread.
    takes_the_best: bool,
    balance: Option<Vec<usize>>,
    remat: Option<RematPolicies>,
}

fn find(
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
    if choices.micro_batches.is_empty() {
        tell_unmeasured(&powers, samples, is_measured);
    }
    powers.retain(|&m| is_measured(m));
    for &m in &choices.micro_batches {
        let size = samples.div_ceil(m.clamp(1, samples));
        if !source.costs.has_size(size) {
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
    Ok(search(&Request {
        model: &source.costs,
        devices,
        samples,
        stages: or(choices.stages, vec![devices.len()]),
        micro_batches: or(choices.micro_batches, powers),
        schedules: or_all(choices.schedules),
        makes_orders: choices.makes_orders,
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

fn file(source: &Source, devices: &[PlanDevice], config: &Config, found: &Found) -> PlanFile {
    let predicted = (&found.prediction, found.interval);
    PlanFile::new(source, config.samples_of_a_pipeline(), devices, &found.plan, predicted)
}

/// Devices with memory caps and speeds. There may be one value for all devices, or one per device.
fn placed(count: usize, caps: &[Bytes], speeds: &[f64]) -> Result<Vec<PlanDevice>, CliError> {
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
fn fixed_balance(config: &Config, given: bool) -> Option<Vec<usize>> {
    match &config.pipeline.balance {
        Balance::Layers(layers) if given => Some(layers.clone()),
        _ => None,
    }
}
