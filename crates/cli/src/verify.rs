//! `gpipe verify`: compares every loss, gradient and parameter bit by bit under all requested
//! combinations.
//!
//! With several processes, each process computes the reference alone and compares the tensors of
//! its stages with it. The verdict covers all processes.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use gpipe::{Pipeline, RematPolicies, StepReport};
use gpipe_checkpoint::{CheckpointError, Checkpoints, RunInfo, Settings, folder};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::VerifyArguments,
    config::Config,
    demand,
    files::io,
    initial_weights,
    numbers::counted,
    output::{prose, say},
    processes::{self, Processes},
    setup,
    task::{self, Batch, Task},
    values::ScheduleChoice,
};

/// Default number of steps to compare.
const STEPS: u64 = 3;

/// One way to run the model.
#[derive(Debug, Clone)]
struct Variant {
    stages: usize,
    schedule: ScheduleChoice,
    remat: RematPolicies,
    micro_batches: usize,
    /// Whether the processes run it together. Otherwise each process runs it alone.
    among: bool,
}

impl Variant {
    /// The configuration, run this way.
    fn of(&self, config: &Config) -> Config {
        let mut config = config.clone();
        config.pipeline.stages = self.stages;
        config.pipeline.schedule = self.schedule.clone();
        config.pipeline.remat.clone_from(&self.remat);
        config.pipeline.micro_batches = self.micro_batches;
        config
    }
}

/// What all variants are given: the data, the processes, and the folder whose weights they begin
/// with.
type Given<'a> = (&'a dyn Task, &'a Processes, Option<&'a Path>);

/// The values that a run computed, in order. With several processes, these are the values of this
/// process's stages.
struct Computed {
    /// Names such as "step 2: gradient of head.weight", with their values.
    tensors: Vec<(String, Tensor)>,
    reports: Vec<StepReport>,
}

/// The result of comparing one process's tensors.
#[derive(Serialize, Deserialize)]
struct Compared {
    /// Indices of the compared tensors in the reference.
    places: BTreeSet<usize>,
    /// Index of the first tensor that differs, with a description.
    difference: Option<(usize, String)>,
}

/// Runs all variants and compares each with the first.
pub(crate) fn run(arguments: &VerifyArguments, here: Option<&Environment>) -> Result<(), CliError> {
    let timeout_s = processes::timeout_s(&arguments.config);
    Processes::among(here, timeout_s, |processes| compare(arguments, processes))
}

fn compare(arguments: &VerifyArguments, processes: &Processes) -> Result<(), CliError> {
    let mut config = Config::load(&arguments.config)?;
    if arguments.config.steps.is_none() {
        config.train.steps = STEPS;
    }
    let variants = variants(arguments, &config, processes.count())?;
    if config.pipeline.devices.0.len() > 1 {
        return Err(CliError::Usage(format!(
            "verify compares several numbers of stages, so it takes one device for all: give \
            --device {}, not {}",
            config.pipeline.devices.0[0], config.pipeline.devices
        )));
    }
    setup::check_images(&config, processes)?;
    processes.agree_on(&config)?;
    processes.agree_on_facts(&[(
        "what is verified".into(),
        format!("{variants:?} {}", arguments.resume),
    )])?;
    variants.iter().try_for_each(|variant| setup::check(&variant.of(&config), None))?;
    let task = task::open(&config, None)?;
    let task = task.as_ref();
    processes.agree_on_data(&task.fingerprint())?;
    tell_what_is_verified(&config, task);
    let width = |name: fn(&Variant) -> String| {
        variants.iter().map(|variant| name(variant).len()).max().unwrap_or(0)
    };
    let widths = [width(|own| own.schedule.to_string()), width(|own| own.remat.to_string())];
    say!("ms: while two or more threads worked at once, of all");
    let from = arguments.config.from.as_deref();
    let mut reference = None;
    let mut differs = false;
    let mut before: Option<&Variant> = None;
    for variant in &variants {
        // The reference is not interrupted.
        let first = before.replace(variant).filter(|_| arguments.resume);
        let found = train(&config, first, variant, (task, processes, from))?;
        let verdict = match &reference {
            None => "reference".to_owned(),
            Some(expected) => match first_difference(expected, &found, variant, processes)? {
                None => format!("identical: {} tensors", expected.tensors.len()),
                Some(difference) => {
                    differs = true;
                    format!("DIFFERS first in {difference}")
                }
            },
        };
        print_line(variant, &found.reports, &verdict, processes.count(), widths);
        reference.get_or_insert(found);
    }
    if differs {
        return Err(CliError::Differs);
    }
    prose!("every loss, gradient and parameter is the same to the last bit");
    if arguments.resume {
        prose!(
            "each but the first was begun as the one above it, saved after {} steps, and resumed \
            from the files",
            config.train.steps / 2
        );
    }
    Ok(())
}

fn tell_what_is_verified(config: &Config, task: &dyn Task) {
    prose!("{}", task.summary());
    let shown = task::inputs(config, config.train.mini_batch);
    let shown: Vec<String> = shown.iter().map(ToString::to_string).collect();
    prose!(
        "{} of {} {}, {} per stage",
        counted(config.train.steps, "step"),
        counted(config.train.mini_batch, "sample"),
        shown.join(" and "),
        counted(config.pipeline.threads_per_stage, "thread")
    );
    if config.pipeline.replicas > 1 {
        let replicas = config.pipeline.replicas;
        prose!(
            "one pipeline is verified, not its {replicas} replicas: their sums of gradients are \
            in another order"
        );
    }
}

/// The variants to compare, the reference first. With several processes, each of them runs the
/// reference alone. They run together every variant that has a stage for each of them.
fn variants(
    arguments: &VerifyArguments,
    config: &Config,
    processes: usize,
) -> Result<Vec<Variant>, CliError> {
    let or_configured = |given: &[usize], configured: usize| {
        if given.is_empty() { vec![configured] } else { given.to_vec() }
    };
    let micro_batches = or_configured(&arguments.micro_batches, config.pipeline.micro_batches);
    let mut remats = arguments.remat.clone();
    if remats.is_empty() {
        remats.push(config.pipeline.remat.clone());
    }
    let mut variants = Vec::new();
    for &micro_batches in &micro_batches {
        for &stages in &arguments.stages {
            for schedule in &arguments.schedule {
                for remat in &remats {
                    let remat = remat.clone();
                    let schedule = schedule.clone();
                    let among = processes > 1 && stages >= processes;
                    variants.push(Variant { stages, schedule, remat, micro_batches, among });
                }
            }
        }
    }
    let first = variants.first().filter(|first| first.among).cloned();
    if let Some(first) = first {
        variants.insert(0, Variant { among: false, ..first });
    }
    if processes > 1 && variants.iter().all(|variant| !variant.among) {
        return Err(CliError::Usage(format!(
            "{processes} processes, and fewer stages in all that is compared: give --stages \
            {processes} or more, too"
        )));
    }
    if variants.len() < 2 {
        return Err(CliError::Usage(
            "there is nothing to compare: give at least two values to --stages, --schedule, \
            --remat or --micro-batches"
                .into(),
        ));
    }
    Ok(variants)
}

fn build(
    config: &Config,
    variant: &Variant,
    (task, processes, from): Given<'_>,
) -> Result<Pipeline, CliError> {
    let config = variant.of(config);
    let model = task::model(&config, task.vocabulary().size())?;
    demand::refuse(&config, &model, processes)?;
    let builder = match variant.among {
        true => setup::pipeline_among(&config, model, processes)?,
        false => setup::pipeline(&config, model)?,
    };
    let mut pipeline = builder.keep_gradients().build()?;
    if let Some(folder) = from {
        initial_weights::read_folder(&mut pipeline, folder)?;
    }
    Ok(pipeline)
}

/// Trains as `variant`. If `first` is given, the first half of the steps runs as `first`.
fn train(
    config: &Config,
    first: Option<&Variant>,
    variant: &Variant,
    (task, processes, from): Given<'_>,
) -> Result<Computed, CliError> {
    let given = (task, processes, from);
    let mut pipeline = build(config, first.unwrap_or(variant), given)?;
    let make = task.training(0, 0, task::ALL)?;
    let mut result = Computed { tensors: Vec::new(), reports: Vec::new() };
    for step in 0..config.train.steps {
        if let Some(first) = first.filter(|_| step == config.train.steps / 2) {
            let resumed = build(config, variant, given)?;
            pipeline = through_files(pipeline, resumed, first.among.then_some(processes))?;
        }
        let Batch { inputs, targets, .. } = task::made(&make, step)?;
        let report = pipeline.train_step(inputs, targets)?;
        let number = report.step;
        let value = Tensor::f_from_slice(&[report.loss, report.grad_norm])?;
        result.tensors.push((format!("step {number}: loss and gradient norm"), value));
        for (name, gradient) in pipeline.gradients()? {
            result.tensors.push((format!("step {number}: gradient of {name}"), gradient));
        }
        result.reports.push(report);
    }
    for (name, value) in pipeline.parameters()? {
        result.tensors.push((format!("after {} steps: {name}", config.train.steps), value));
    }
    Ok(result)
}

/// Saves the state of `pipeline` in a checkpoint on disk and restores it into `resumed`, which is
/// returned. The processes in `among` save the checkpoint together.
fn through_files(
    mut pipeline: Pipeline,
    mut resumed: Pipeline,
    among: Option<&Processes>,
) -> Result<Pipeline, CliError> {
    let own = || tempfile::tempdir().map_err(io(&std::env::temp_dir()));
    let is_first = among.is_none_or(Processes::is_first);
    let own = is_first.then(own).transpose()?;
    let path = || Ok(own.as_ref().map(|own| own.path().to_owned()).unwrap_or_default());
    let path = among.map_or_else(path, |processes| processes.decided(path))?;
    let mut checkpoints = match among.and_then(Processes::transport) {
        None => Checkpoints::open(&path, Settings::default())?,
        Some(transport) => Checkpoints::open_among(&path, Settings::default(), &transport)?,
    };
    checkpoints.save(&mut pipeline, RunInfo::default())?;
    checkpoints.wait()?;
    let found = folder::find(&path).map_err(|error| match error {
        CheckpointError::NotFound { path, reason } => CliError::Usage(format!(
            "{}: the checkpoint that was just written cannot be read: {reason}; processes of \
            several hosts need a TMPDIR that they share",
            path.display()
        )),
        other => other.into(),
    })?;
    let restored = found.checkpoint.restore(&mut resumed).map_err(CliError::from);
    // The first process's folder is deleted once all have read it.
    among.map_or(Ok(()), |processes| processes.all(Ok(())))?;
    restored?;
    Ok(resumed)
}

/// The first tensor, of all processes, that differs, with the size of the difference.
fn first_difference(
    expected: &Computed,
    found: &Computed,
    variant: &Variant,
    processes: &Processes,
) -> Result<Option<String>, CliError> {
    let compared = compared(expected, found)?;
    let all = processes.gathered(&compared)?;
    let lacks = |there: &BTreeSet<usize>| {
        let missing = expected.tensors.iter().enumerate().find(|(at, _)| !there.contains(at));
        missing.map(|(at, (name, _))| (at, format!("{name} (it is not there)")))
    };
    // Processes that run together each have a part of the tensors. Alone, each has all of them.
    let missing = match variant.among {
        true => lacks(&all.iter().flat_map(|own| &own.places).copied().collect()),
        false => all.iter().filter_map(|own| lacks(&own.places)).min(),
    };
    let differences = all.into_iter().enumerate().filter_map(|(rank, own)| {
        let (at, difference) = own.difference?;
        let alone = processes.are_several() && !variant.among;
        Some((at, if alone { format!("{difference} on rank {rank}") } else { difference }))
    });
    Ok(differences.chain(missing).min().map(|(_, difference)| difference))
}

fn compared(expected: &Computed, found: &Computed) -> Result<Compared, CliError> {
    let all = expected.tensors.iter().enumerate();
    let all: HashMap<&str, usize> = all.map(|(at, (name, _))| (name.as_str(), at)).collect();
    let mut result = Compared { places: BTreeSet::new(), difference: None };
    for (name, value) in &found.tensors {
        let Some(&at) = all.get(name.as_str()) else {
            let difference = format!("{name} (the reference does not have it)");
            return Ok(Compared { difference: Some((0, difference)), ..result });
        };
        let difference = difference(&expected.tensors[at].1, value)?;
        let difference = difference.map(|how| (at, format!("{name} {how}")));
        result.difference = result.difference.into_iter().chain(difference).min();
        result.places.insert(at);
    }
    Ok(result)
}

fn difference(a: &Tensor, b: &Tensor) -> Result<Option<String>, CliError> {
    if a.size() != b.size() {
        return Ok(Some(format!("({:?} against {:?})", a.size(), b.size())));
    }
    if same_bits(a, b)? {
        return Ok(None);
    }
    let largest = a.f_sub(b)?.f_abs()?.f_max()?.f_double_value(&[])?;
    Ok(Some(format!("(largest difference {largest:.3e})")))
}

/// Compares values as integers: 0 and -0 differ, and identical NaNs are equal.
fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool, CliError> {
    let kind = match a.kind() {
        Kind::Double => Kind::Int64,
        _ => Kind::Int,
    };
    let view = |tensor: &Tensor| tensor.f_contiguous()?.f_view_dtype(kind);
    Ok(a.kind() == b.kind() && view(a)?.f_equal(&view(b)?)?)
}

/// Prints a line of the table. `widths` are those of the schedules and of the policies.
fn print_line(
    variant: &Variant,
    reports: &[StepReport],
    verdict: &str,
    processes: usize,
    [schedule, remat]: [usize; 2],
) {
    let overlap_ms: f64 = reports.iter().map(|report| report.overlap.as_ms()).sum();
    let step_ms: f64 = reports.iter().map(|report| report.time.as_ms()).sum();
    let loss = reports.last().map_or(f64::NAN, |report| report.loss);
    let place = match (processes, variant.among) {
        (1, _) => String::new(),
        (_, true) => format!("in {processes} processes  "),
        (_, false) => "in one process   ".into(),
    };
    prose!(
        "K {}  M {}  {:schedule$}  {:remat$}  {place}loss {loss:.6}  \
        {overlap_ms:>5.0} of {step_ms:.0} ms  {verdict}",
        variant.stages,
        variant.micro_batches,
        variant.schedule.to_string(),
        variant.remat.to_string(),
    );
}
