//! `gpipe profile`: the time and memory of each layer under real conditions.
//!
//! - [`show`]: the tables that are printed

mod show;

use std::path::{Path, PathBuf};

use gpipe::{
    IntoTensors, Sequence, Tensors,
    cost::ModelCosts,
    estimate::Rate,
    profile::{Measurement, Profile, Profiling, Subject, profile},
};
use gpipe_core::schedule::Schedule;
use tch::Tensor;

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::{ConfigArguments, ProfileArguments, typed},
    config::Config,
    demand,
    files::{read_bounded, write_aside},
    machine,
    output::prose,
    processes::Processes,
    progress::Work,
    setup,
    task::{self, Batch, Task},
    values::ScheduleChoice,
};

pub(crate) use show::host_memory;

/// Default number of steps measured for each size and policy.
const STEPS: u64 = 4;
/// FLOPs per step above which a model counts as large: a few seconds on two cores.
const LARGE_FLOPS: f64 = 2e12;
/// Trainings of at most this many steps are short: measuring all sizes would take longer.
const SHORT_STEPS: u64 = 500;
/// Default numbers of micro-batches to measure.
const MICRO_BATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Maximum number of different mini-batches; they are used in turn.
const BATCHES_MAX: u64 = 8;
/// Maximum number of passes.
const PASSES_MAX: usize = 100;
/// Maximum size of a profile.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Measures, prints the profile and writes the file.
pub(crate) fn run(
    arguments: &ProfileArguments,
    here: Option<&Environment>,
) -> Result<(), CliError> {
    Processes::among_replicas(here, &arguments.config, |processes| {
        measure_and_show(arguments, processes)
    })
}

fn measure_and_show(arguments: &ProfileArguments, processes: &Processes) -> Result<(), CliError> {
    let mut config = Config::load(&arguments.config)?.before_order();
    if !(1..=PASSES_MAX).contains(&arguments.passes) {
        let passes = arguments.passes;
        return Err(CliError::Usage(format!("--passes {passes}: use 1 to {PASSES_MAX}")));
    }
    if let Some(stages) = arguments.stages {
        config.set_stages(stages, arguments.config.device.is_some());
    }
    let stages = typed("pipeline.stages", "--stages", &arguments.stages);
    let all: Vec<_> = stages.into_iter().chain(arguments.config.typed()).collect();
    config.check_typed(&all)?;
    setup::check_images(&config, processes)?;
    processes.agree_on(&config)?;
    if processes.are_several() {
        // Each replica measures itself while the others are at work.
        processes.replicate(config.pipeline.replicas)?;
    }
    let steps = arguments.config.steps.unwrap_or(STEPS);
    let mut checked = config.clone();
    if let ScheduleChoice::File(_) = checked.pipeline.schedule {
        // It may be for another M. Then it is not measured.
        checked.pipeline.schedule = ScheduleChoice::Named(Schedule::OneFOneB);
    }
    setup::check(&checked, None)?;
    let task = task::open(&config, None)?;
    prose!("{}", task.summary());
    let model = task::model(&config, task.vocabulary().size())?;
    processes.agree_on_data(&task.fingerprint())?;
    let model_of = (task.as_ref(), &model);
    let passes = arguments.passes;
    let extent = Extent { micro_batches: &arguments.micro_batches, steps, passes };
    let found = measure(&config, model_of, extent, processes)?;
    let path = arguments.out.clone().unwrap_or_else(|| default_path(&arguments.config));
    processes.decided(|| write(&path, &found))?;
    let sizes: Vec<usize> = found.costs.sizes.keys().copied().collect();
    let estimated = setup::pipeline(&config, model)?.estimate(&sizes, &Rate::default())?;
    show::show(&found, &estimated, &config, &config.pipeline.schedule.schedule()?);
    prose!("{}: gpipe plan and gpipe train --plan auto use it", path.display());
    Ok(())
}

/// How much to measure.
pub(crate) struct Extent<'a> {
    /// The numbers of micro-batches M, or the default ones if empty.
    pub micro_batches: &'a [usize],
    /// Steps per size and policy in each pass.
    pub steps: u64,
    /// How often all measurements are repeated.
    pub passes: usize,
}

/// What `--plan auto` measures.
pub(crate) struct ForPlan {
    /// Steps of each kind.
    steps: u64,
    /// Why only the configured M is measured; `None` if all default M are.
    only_own: Option<&'static str>,
    /// Whether the number of steps is the reason: a longer training needs more.
    pub is_short: bool,
}

/// Chooses what `--plan auto` measures. Measuring everything would take longer than a short
/// training, and long for a large model: one step of each kind, at the configured M. A model with
/// batch norms must keep the size of micro-batches, so only that size is measured.
pub(crate) fn for_plan(config: &Config, model: &Sequence) -> Result<ForPlan, CliError> {
    let inputs = task::inputs(config, config.samples_of_a_pipeline());
    let forward: u64 = model.costs(&inputs, task::kind(config))?.into_iter().sum();
    let one = |steps, why| ForPlan { steps, only_own: Some(why), is_short: false };
    Ok(if 3.0 * forward as f64 > LARGE_FLOPS {
        one(1, "large model")
    } else if estimated(config, model)?.has_batch_norms() {
        one(STEPS, "batch norms depend on the size of micro-batches")
    } else if config.train.steps <= SHORT_STEPS {
        ForPlan { is_short: true, ..one(1, "short training") }
    } else {
        ForPlan { steps: STEPS, only_own: None, is_short: false }
    })
}

/// Measures what `--plan auto` needs.
pub(crate) fn measure_for_plan(
    config: &Config,
    of: (&dyn Task, &Sequence),
    extent: &ForPlan,
    processes: &Processes,
) -> Result<Profile, CliError> {
    let own = [config.pipeline.micro_batches];
    let micro_batches: &[usize] = match extent.only_own {
        Some(why) => {
            prose!("{why}: measuring only M = {}; gpipe profile measures more", own[0]);
            &own
        }
        None => &[],
    };
    measure(config, of, Extent { micro_batches, steps: extent.steps, passes: 1 }, processes)
}

/// The costs of the configured micro-batches, from shapes.
fn estimated(config: &Config, model: &Sequence) -> Result<ModelCosts, CliError> {
    let mut builder = setup::pipeline(&config.uncapped(), model.clone())?;
    Ok(builder.estimate(&[config.samples_of_a_micro_batch()], &Rate::default())?)
}

/// Measures the layers of the network that `config` describes.
pub(crate) fn measure(
    config: &Config,
    (task, model): (&dyn Task, &Sequence),
    Extent { micro_batches, steps, passes }: Extent,
    processes: &Processes,
) -> Result<Profile, CliError> {
    let make = task.training(0, 0, task::ALL)?;
    let mut all =
        if micro_batches.is_empty() { MICRO_BATCHES.to_vec() } else { micro_batches.to_vec() };
    if all.contains(&0) {
        return Err(CliError::Usage("--micro-batches 0: use 1 or more".into()));
    }
    all.push(config.pipeline.micro_batches);
    // M is at most the number of samples.
    let samples = config.samples_of_a_pipeline();
    for asked in micro_batches.iter().filter(|&&asked| asked > samples) {
        prose!(
            "--micro-batches {asked}: a mini-batch has {samples} samples: {samples} are measured"
        );
    }
    all.iter_mut().for_each(|m| *m = (*m).min(samples));
    all.sort_unstable();
    all.dedup();
    let mut batches = Vec::new();
    for number in 0..(steps + 1).min(BATCHES_MAX) {
        let Batch { inputs, targets, .. } = task::made(&make, number)?;
        batches.push(same_samples(inputs, targets.into_tensors(), samples)?);
    }
    let machine = machine();
    // What exceeds a cap as configured may fit it as planned.
    let uncapped = config.uncapped();
    // The configured schedule comes first, if its backwards are not split, because quartiles are
    // taken from the first schedule. ZB-H1 gives the costs of the halves of backwards.
    let own = &uncapped.pipeline.schedule.schedule()?;
    let mut schedules = Schedule::SEARCHED_EXACTLY.to_vec();
    schedules.sort_by_key(|schedule| schedule != own);
    schedules.push(Schedule::ZbH1);
    if !schedules.contains(own) {
        // A schedule from a file is for one M.
        match all.iter().find_map(|&m| own.check_micro_batches(m).err()) {
            None => schedules.push(own.clone()),
            Some(error) => prose!("{own} is not measured: {error}"),
        }
    }
    let config = &uncapped;
    let all = that_fit(config, model, all, processes)?;
    let settings = Profiling {
        micro_batches: &all,
        schedules: &schedules,
        steps: steps as usize,
        passes,
        batches: &batches,
        machine: &machine,
        values: &[],
    };
    let in_passes = if passes > 1 { format!(" in {passes} passes") } else { String::new() };
    prose!(
        "profiling {} layers on {machine}, {} stages at work, {steps} steps each{in_passes}:",
        model.len(),
        config.pipeline.stages
    );
    let mut work = None;
    Ok(profile(
        &settings,
        || {
            let built = setup::replica(config, model.clone(), processes);
            built.map_err(|error| gpipe::Error::Setting(error.to_string()))
        },
        |next: Measurement<'_>| {
            let (done, all) = (next.done as u64, next.all as u64);
            let work = work.get_or_insert_with(|| Work::new("profiling", all));
            work.next(next.what, done, all);
        },
        |own| {
            let told = processes.decided(|| Ok(own));
            told.map_err(|error| gpipe::Error::Setting(error.to_string()))
        },
    )?)
}

/// The M whose steps fit this machine's memory even when all activations are kept, which is
/// measured too. Of several processes, each must have the memory. The other M are reported.
fn that_fit(
    config: &Config,
    model: &Sequence,
    all: Vec<usize>,
    processes: &Processes,
) -> Result<Vec<usize>, CliError> {
    let (mut fit, mut last) = (Vec::new(), None);
    for micro_batches in all {
        let mut keeping = config.clone();
        keeping.pipeline.balance = gpipe::Balance::Cost;
        keeping.pipeline.remat = gpipe::Remat::Never.into();
        keeping.pipeline.schedule = ScheduleChoice::Named(Schedule::GPipe);
        keeping.pipeline.micro_batches = micro_batches;
        match demand::refuse(&keeping, model, processes) {
            Ok(()) => fit.push(micro_batches),
            Err(error) => {
                prose!("M = {micro_batches} is left out: {error}");
                last = Some(error);
            }
        }
    }
    // Machines differ in free memory, and all must measure the same.
    let told = processes.gathered(&fit)?;
    fit.retain(|own| told.iter().all(|other| other.contains(own)));
    match (fit.is_empty(), last) {
        (false, _) => Ok(fit),
        (true, Some(error)) => Err(error),
        (true, None) => {
            let reason = "no M fits the memory of the machines of all processes: use a larger \
                pipeline.micro_batches, or more stages";
            Err(CliError::Usage(reason.into()))
        }
    }
}

/// Brings a mini-batch of sentences to `samples` rows, the number that plans assume: their number
/// of sentences varies with their tokens. Rows are taken evenly, some twice if there are fewer.
fn same_samples(
    inputs: Tensors,
    targets: Tensors,
    samples: usize,
) -> Result<(Tensors, Tensors), CliError> {
    let samples = samples as i64;
    let first = inputs.positional().first();
    let own = first.and_then(|input| input.size().first().copied()).unwrap_or(0);
    if own == samples {
        return Ok((inputs, targets));
    }
    let rows: Vec<i64> = (0..samples).map(|row| row * own / samples).collect();
    let rows = Tensor::f_from_slice(&rows)?;
    let chosen = |tensor: &Tensor| tensor.f_index_select(0, &rows);
    Ok((inputs.try_map(chosen)?, targets.try_map(chosen)?))
}

/// The subject of a profile of `config`: what a profile must match.
pub(crate) fn subject(config: &Config, model: &Sequence) -> Result<Subject, CliError> {
    Ok(setup::pipeline(&config.uncapped(), model.clone())?.subject(&machine())?)
}

/// The default path of the profile of a configuration file. A number of threads for each stage that
/// is given beside it has a profile of its own.
pub(crate) fn default_path(arguments: &ConfigArguments) -> PathBuf {
    path_of_threads(arguments, arguments.threads_per_stage.unwrap_or(1))
}

/// The default path of the profile with `threads` threads for each stage.
pub(crate) fn path_of_threads(arguments: &ConfigArguments, threads: usize) -> PathBuf {
    let threads = if threads > 1 { format!(".threads-{threads}") } else { String::new() };
    PathBuf::from("out").join(format!("{}{threads}.profile.json", arguments.name()))
}

/// Where a short training keeps its profile beside that at `path`, which longer ones plan with.
pub(crate) fn path_of_short(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("short.{name}"))
}

/// The profile at `path`, or else that of a short training beside it, if there is one.
pub(crate) fn existing(path: PathBuf) -> Option<PathBuf> {
    let short = path_of_short(&path);
    [path, short].into_iter().find(|path| path.exists())
}

/// Writes a profile, whole or not at all.
pub(crate) fn write(path: &Path, profile: &Profile) -> Result<(), CliError> {
    write_aside(path, &profile.to_json()?)
}

/// Reads a profile.
pub(crate) fn read(path: &Path) -> Result<Profile, CliError> {
    let text = read_bounded(path, FILE_BYTES_MAX)?;
    Profile::from_json(&text, &path.display().to_string()).map_err(measure_again)
}

/// Adds the command to an error whose remedy is to measure again.
pub(crate) fn measure_again(error: gpipe::Error) -> CliError {
    CliError::Usage(format!("{error} with gpipe profile"))
}

/// A description of the processor and its number of cores.
pub(crate) fn machine() -> String {
    let cores = machine::cores();
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name"));
    let model =
        model.map_or("an unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':']));
    format!("{model}, {cores} cores")
}
