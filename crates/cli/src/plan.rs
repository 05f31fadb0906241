//! `gpipe plan`, and the plans of `gpipe train --plan`: how to run a model, decided before it runs.

use std::path::{Path, PathBuf};

use gpipe::{
    Balance, Bytes, Nanos, RematPolicies, Schedule, Sequence, estimate::Rate, profile::Profile,
};
use gpipe_core::plan::{Found, PlanDevice, Request, Usual, advice, explain, search};
use gpipe_observe::picture::{self, Panel, Scene};

use crate::{
    CliError,
    args::{ConfigArguments, PlanArguments},
    config::Config,
    files::write_aside,
    output::say,
    plan_file::{PlanFile, Source},
    processes::Processes,
    profile::{self, host_memory},
    setup,
    task::{self, Task},
    values::ScheduleChoice,
};

/// Default floating-point operations and bytes per second of a device.
const RATE: f64 = 1e11;
const BANDWIDTH: f64 = 2e10;
/// Maximum number of devices of a plan.
const DEVICES_MAX: usize = 4096;
/// Plans, prints explanations, and writes the requested files.
pub(crate) fn run(arguments: &PlanArguments) -> Result<(), CliError> {
    let mut config = Config::load(&arguments.config)?;
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
    let schedules = arguments.schedule.iter().map(planned).collect::<Result<_, _>>()?;
    let choices = Choices {
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
        None => return Ok(None),
        Some(Wanted::Automatic) => {
            (automatic(arguments, config, (task, model), processes)?, "--plan auto".to_owned())
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
    let mut choices = Choices::default();
    if source.costs.layers.iter().any(|layer| layer.statistics.0 > 0) {
        // Batch norms depend on the size of micro-batches, so M must not change.
        choices.micro_batches = vec![pipeline.micro_batches];
    }
    let found = find(&mut source, &devices, config, choices)?;
    if let Some(text) = found.within() {
        say!("{text}");
    }
    Ok(file(&source, &devices, config, &found))
}

/// A schedule to choose from. Files are refused.
fn planned(choice: &ScheduleChoice) -> Result<Schedule, CliError> {
    match choice {
        ScheduleChoice::Named(schedule) => Ok(schedule.clone()),
        ScheduleChoice::File(_) => Err(CliError::Usage(format!(
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
        ScheduleChoice::Named(schedule) => Some(Usual {
            stages: devices.len(),
            micro_batches: config.pipeline.micro_batches,
            schedule: schedule.clone(),
        }),
        ScheduleChoice::File(_) => None,
    };
    Ok(search(&Request {
        model: &source.costs,
        devices,
        samples,
        stages: or(choices.stages, vec![devices.len()]),
        micro_batches: or(choices.micro_batches, powers),
        schedules: or_all(choices.schedules),
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

fn source(arguments: &PlanArguments, config: &Config) -> Result<Source, CliError> {
    let path = profile::default_path(&arguments.config);
    let path = match (&arguments.profile, arguments.analytic) {
        (Some(path), _) => Some(path.clone()),
        (None, false) if path.exists() => Some(path),
        (None, _) => None,
    };
    let mut source = match path {
        Some(path) => {
            let found = profile::read(&path)?;
            // The numbers of tokens and classes are those of the profiled data, since no data are
            // read here.
            let size = usize::try_from(found.subject.classes).unwrap_or(0);
            let model = task::model(config, size)?;
            let found_in = path.display().to_string();
            let own = profile::subject(config, &model)?;
            found.subject.check(&own, &found_in).map_err(profile::measure_again)?;
            measured(found, &path)
        }
        None => analytic(arguments, config)?,
    };
    if !source.analytic && (arguments.flops.is_some() || arguments.bandwidth.is_some()) {
        return Err(CliError::Usage(
            "--flops and --bandwidth are of analytic costs, and these are measured: give \
            --analytic, too"
                .into(),
        ));
    }
    let transport = &mut source.costs.transport;
    if let Some(bytes_per_s) = arguments.link_bandwidth {
        transport.bytes_per_s = positive("--link-bandwidth", bytes_per_s)?.max(1.0) as u64;
    }
    if let Some(latency_us) = arguments.link_latency {
        if !(0.0..1e12).contains(&latency_us) {
            return Err(CliError::Usage(format!(
                "--link-latency {latency_us}: give microseconds, 0 or more"
            )));
        }
        transport.latency = Nanos((latency_us * 1e3) as u64);
    }
    Ok(source)
}

/// Costs estimated from shapes.
fn analytic(arguments: &PlanArguments, config: &Config) -> Result<Source, CliError> {
    let rate = Rate {
        flops_per_s: positive("--flops", arguments.flops.unwrap_or(RATE))?,
        bytes_per_s: positive("--bandwidth", arguments.bandwidth.unwrap_or(BANDWIDTH))?,
        latency: Nanos(0),
    };
    // The devices need not exist here. Bytes are those of CPU kernels.
    let mut config = config.clone();
    config.pipeline.devices.0 = vec![gpipe::Device::Cpu];
    let model = task::model(&config, task::configured_size(&config)?)?;
    let subject = profile::subject(&config, &model)?.of_shapes();
    // Costs between powers of two are interpolated linearly.
    let samples = config.samples_of_a_pipeline();
    let sizes: Vec<usize> = powers_of_two(samples).chain([samples]).collect();
    config.pipeline.memory.0.clear();
    let costs = setup::pipeline(&config, model)?.estimate(&sizes, &rate)?;
    let why =
        if arguments.analytic { "" } else { " (there is no profile: gpipe profile measures one)" };
    let text = format!(
        "analytic, of devices with {:.4} TFLOP/s and {:.1} GB/s{why}",
        rate.flops_per_s / 1e12,
        rate.bytes_per_s / 1e9
    );
    Ok(Source { costs, text, subject, analytic: true })
}

fn powers_of_two(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1_usize), |m| m.checked_mul(2)).take_while(move |&m| m <= most)
}

fn measured(found: Profile, path: &Path) -> Source {
    let text = format!(
        "measured on {} with {} stages at work ({})",
        found.subject.machine,
        found.stages,
        path.display()
    );
    Source { costs: found.costs, text, subject: found.subject, analytic: false }
}

fn positive(name: &str, value: f64) -> Result<f64, CliError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(CliError::Usage(format!("{name} {value}: give a number above 0"))),
    }
}
