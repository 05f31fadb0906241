//! `gpipe plan`: how to run a model, decided before it runs.

use std::path::PathBuf;

use gpipe::{Balance, Bytes, Nanos, Schedule};
use gpipe_core::{
    partition::uniform,
    plan::{Found, PlanDevice, advice, explain},
};
use gpipe_observe::{
    picture::{self, Panel, Scene},
    step_file::STAGES_MAX,
};

use crate::{
    CliError,
    args::PlanArguments,
    config::Config,
    files::write_aside,
    machine,
    output::prose,
    plan_choices::{Choices, all_schedules, file, find},
    plan_costs::{positive, source},
    plan_file::{Deployment, Source},
    plan_ways::{self, Way},
    profile::{self, host_memory},
    values::ScheduleChoice,
};

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
    let mut source = source(arguments, &config)?;
    let remat = arguments.remat.clone();
    let makes_orders = arguments.schedule.contains(&ScheduleChoice::Auto);
    let named = arguments.schedule.iter().filter(|choice| **choice != ScheduleChoice::Auto);
    let mut schedules = named.map(planned).collect::<Result<Vec<_>, _>>()?;
    if schedules.is_empty() && makes_orders {
        schedules = all_schedules(&source);
    }
    let balance = given_balance(arguments, &config, &source, (&schedules, devices.len()))?;
    let mut choices = Choices {
        makes_orders,
        takes_the_best: makes_orders,
        stages: arguments.stages.clone(),
        micro_batches: arguments.micro_batches.clone(),
        schedules,
        balance,
        remat,
        ..Choices::default()
    };
    if choices.micro_batches.is_empty() && source.costs.has_batch_norms() {
        let own = config.pipeline.micro_batches;
        prose!(
            "batch norms depend on the size of micro-batches: M stays {own} (--micro-batches \
            names others)"
        );
        choices.keep_sizes(own);
    }
    // A way to use other devices, or other numbers of stages, is not asked for.
    let is_open = arguments.stages.is_empty() && arguments.profile.is_none();
    let are_alike = arguments.speed.is_empty() && caps.len() <= 1;
    let are_here = devices.len() <= machine::cores();
    let found = find(&mut source, &devices, &config, choices.clone());
    let mut ways = match !source.analytic && is_open && are_alike && are_here {
        true => {
            let of_threads = |config: &Config, deployment: Deployment| {
                let path = profile::path_of_threads(&arguments.config, deployment.threads);
                plan_ways::costs_of_threads(config, profile::existing(path).as_deref())
            };
            plan_ways::planned((&config, &devices, &source), &choices, of_threads)?
        }
        false => Vec::new(),
    };
    let (are_compared, usual) = (!ways.is_empty(), config.clone());
    match found {
        Ok(found) => {
            let deployment = Deployment { replicas: 1, threads: config.pipeline.threads_per_stage };
            let way = Way { deployment, source, devices, config, found, sums: Nanos(0) };
            ways.insert(0, way);
        }
        Err(error) if !are_compared => return Err(error),
        Err(error) => prose!("left out: a pipeline of {} stages: {error}", devices.len()),
    }
    ways.sort_by_key(Way::step);
    let Some((best, others)) = ways.split_first() else { return Ok(()) };
    tell(best)?;
    if are_compared {
        prose!("ways to use the cores, a step of each:\n  {} (chosen)", best.text());
        others.iter().for_each(|other| prose!("  {}", other.text()));
    }
    tell_norms(best, &usual);
    write(arguments, best, are_compared)
}

/// Says what batch norms see, if it is not what is configured.
fn tell_norms(Way { source, config, found, .. }: &Way, usual: &Config) {
    let of = |config: &Config, m: usize| config.samples_of_a_pipeline().div_ceil(m.max(1));
    let (planned, configured) =
        (of(config, found.plan.micro_batches), of(usual, usual.pipeline.micro_batches));
    if source.costs.has_batch_norms() && planned != configured {
        prose!(
            "batch norms see micro-batches of {planned} samples, not of {configured} as configured"
        );
    }
}

/// Prints a plan, and what it is from.
fn tell(Way { source, config, found, sums, .. }: &Way) -> Result<(), CliError> {
    prose!("costs: {}", source.text);
    if found.interval.is_none() {
        prose!("{}", uncertain(source.analytic));
    }
    prose!("{}", explain(found).trim_end());
    if *sums > Nanos(0) {
        prose!("with the sums of gradients, a step takes {}", found.prediction.step() + *sums);
    }
    if found.advice.is_empty() {
        // If choices were taken away, the best plan may still not be a good one.
        let samples = config.samples_of_a_pipeline();
        if let Some(advice) = advice(&source.costs, &found.devices, samples, &found.plan)? {
            prose!("{advice}");
        }
    }
    prose!("{}", host_memory(&source.costs));
    if config.pipeline.replicas > 1 && *sums == Nanos(0) {
        prose!(
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
    Ok(())
}

/// Writes a plan and the pictures that were asked for. A plan that was compared with other ways
/// says which one it is.
fn write(arguments: &PlanArguments, way: &Way, is_compared: bool) -> Result<(), CliError> {
    let Way { source, devices, config, found, .. } = way;
    let name = arguments.config.name();
    let default = PathBuf::from("out").join(format!("{name}.plan.json"));
    let path = arguments.out.clone().unwrap_or(default);
    let own = if is_compared { way.file() } else { file(source, devices, config, found) };
    own.write(&path)?;
    prose!("{}: gpipe train --plan runs it", path.display());
    let drawn = Drawn::new(found, &name);
    let scene = drawn.scene(found, &source.text);
    if let Some(path) = &arguments.svg {
        write_aside(path, &picture::svg(&scene))?;
        prose!("{}: the planned step", path.display());
    }
    if let Some(path) = &arguments.html {
        write_aside(path, &picture::html(&scene))?;
        prose!("{}: the planned step", path.display());
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
    if !(1..=STAGES_MAX).contains(&count) {
        return Err(CliError::Usage(format!(
            "{count} devices (--devices, or pipeline.stages): use 1 to {STAGES_MAX}"
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
fn given_balance(
    arguments: &PlanArguments,
    config: &Config,
    source: &Source,
    (schedules, devices): (&[Schedule], usize),
) -> Result<Option<Vec<usize>>, CliError> {
    if arguments.config.balance.is_none() || config.pipeline.balance == Balance::Cost {
        return Ok(None);
    }
    let devices = match arguments.stages[..] {
        [] => devices,
        [stages] => stages,
        _ => {
            let reason = "--balance is of one number of stages: give one --stages";
            return Err(CliError::Usage(reason.into()));
        }
    };
    // A schedule may put several stages on a device.
    let mut all = schedules.iter().filter_map(|own| own.stages(devices).ok());
    let stages = all.next().filter(|first| all.all(|own| own == *first));
    fixed_balance(config, source.costs.layers.len(), stages.unwrap_or(devices))
}

/// The configured cut of a number of layers into `stages`, if it does not follow from costs.
pub(crate) fn fixed_balance(
    config: &Config,
    layers: usize,
    stages: usize,
) -> Result<Option<Vec<usize>>, CliError> {
    match &config.pipeline.balance {
        Balance::Layers(layers) => Ok(Some(layers.clone())),
        Balance::Uniform => {
            let cut = uniform(layers, stages);
            cut.map(Some).map_err(|error| CliError::Usage(error.to_string()))
        }
        Balance::Cost => Ok(None),
    }
}
