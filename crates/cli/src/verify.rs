//! `gpipe verify`: every loss, gradient and parameter, bit by bit, under every combination asked for.

use gpipe::{Pipeline, RematPolicies, StepReport};
use gpipe_checkpoint::{Checkpoints, RunInfo, Settings, folder};
use tch::{Kind, Tensor};

use crate::{
    CliError,
    args::VerifyArguments,
    config::{Config, flag},
    metrics::io,
    output::say,
    processes::{Processes, environment::Environment},
    schedule::ScheduleChoice,
    setup,
    task::{self, Batch, Task},
};

/// Steps that are compared unless --steps says otherwise.
const STEPS: u64 = 3;

/// One way to run the model.
#[derive(Clone)]
struct Variant {
    stages: usize,
    schedule: ScheduleChoice,
    remat: RematPolicies,
    micro_batches: usize,
}

/// What a run computed, in the order in which it was computed.
struct Computed {
    /// "step 2: gradient of head.weight" and its value.
    tensors: Vec<(String, Tensor)>,
    reports: Vec<StepReport>,
}

/// Runs all variants and compares each with the first.
pub(crate) fn run(arguments: &VerifyArguments, here: Option<&Environment>) -> Result<(), CliError> {
    Processes::refuse(here, "gpipe verify")?;
    let mut config = Config::load(&arguments.config)?;
    if arguments.config.steps.is_none() {
        config.train.steps = STEPS;
    }
    let variants = variants(arguments, &config)?;
    if config.pipeline.devices.0.len() > 1 {
        return Err(CliError::Usage(format!(
            "verify compares several numbers of stages, {} names a device for each of one number: name one device for all, such as --device {}",
            config.pipeline.devices, config.pipeline.devices.0[0]
        )));
    }
    let task = task::open(&config, None)?;
    let task = task.as_ref();
    say!("{}", task.summary());
    let shown = task::inputs(&config, config.train.mini_batch);
    let shown: Vec<String> = shown.iter().map(ToString::to_string).collect();
    say!(
        "{} steps of {} samples {}, {} thread(s) per stage",
        config.train.steps,
        config.train.mini_batch,
        shown.join(" and "),
        config.pipeline.threads_per_stage
    );
    let mut reference = None;
    let mut differs = false;
    let mut before: Option<&Variant> = None;
    for variant in &variants {
        // The reference is not interrupted.
        let first = before.replace(variant).filter(|_| arguments.resume);
        let found = train(&config, first, variant, task)?;
        let verdict = match &reference {
            None => "reference".to_owned(),
            Some(expected) => match first_difference(expected, &found)? {
                None => format!("identical: {} tensors", found.tensors.len()),
                Some(difference) => {
                    differs = true;
                    format!("DIFFERS first in {difference}")
                }
            },
        };
        print_line(variant, &found.reports, &verdict);
        reference.get_or_insert(found);
    }
    if differs {
        return Err(CliError::Differs);
    }
    say!("every loss, gradient and parameter is the same to the last bit");
    if arguments.resume {
        say!(
            "each but the first was begun as the one above it, saved after {} steps, and resumed from the files",
            config.train.steps / 2
        );
    }
    Ok(())
}

fn variants(arguments: &VerifyArguments, config: &Config) -> Result<Vec<Variant>, CliError> {
    let or_configured = |given: &[usize], configured: usize| {
        if given.is_empty() { vec![configured] } else { given.to_vec() }
    };
    let micro_batches = or_configured(&arguments.micro_batches, config.pipeline.micro_batches);
    let mut remats = Vec::new();
    for text in &arguments.remat {
        remats.push(flag("--remat", text)?);
    }
    if remats.is_empty() {
        remats.push(config.pipeline.remat.clone());
    }
    let mut variants = Vec::new();
    for &micro_batches in &micro_batches {
        for &stages in &arguments.stages {
            for text in &arguments.schedule {
                let schedule: ScheduleChoice = flag("--schedule", text)?;
                for remat in &remats {
                    let remat = remat.clone();
                    let schedule = schedule.clone();
                    variants.push(Variant { stages, schedule, remat, micro_batches });
                }
            }
        }
    }
    if variants.len() < 2 {
        return Err(CliError::Usage(
            "there is nothing to compare: give at least two values to --stages, --schedule, --remat or --micro-batches".into(),
        ));
    }
    Ok(variants)
}

fn build(config: &Config, variant: &Variant, task: &dyn Task) -> Result<Pipeline, CliError> {
    let mut config = config.clone();
    config.pipeline.stages = variant.stages;
    config.pipeline.schedule = variant.schedule.clone();
    config.pipeline.remat.clone_from(&variant.remat);
    config.pipeline.micro_batches = variant.micro_batches;
    let model = task::model(&config, task.vocabulary().size())?;
    Ok(setup::pipeline(&config, model)?.keep_gradients().build()?)
}

/// Trains as `first` says for the first half of the steps, if it says anything, then as `variant` says.
fn train(
    config: &Config,
    first: Option<&Variant>,
    variant: &Variant,
    task: &dyn Task,
) -> Result<Computed, CliError> {
    let mut pipeline = build(config, first.unwrap_or(variant), task)?;
    let make = task.training(0, 0)?;
    let mut result = Computed { tensors: Vec::new(), reports: Vec::new() };
    for step in 0..config.train.steps {
        if first.is_some() && step == config.train.steps / 2 {
            let resumed = build(config, variant, task)?;
            pipeline = through_files(pipeline, resumed)?;
        }
        let Batch { inputs, targets, .. } = task::made(&make, step)?;
        let report = pipeline.train_step(inputs, targets)?;
        let number = report.step;
        let loss = Tensor::f_from_slice(&[report.loss, report.grad_norm])?;
        result.tensors.push((format!("step {number}: loss and gradient norm"), loss));
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

/// `resumed`, with the state of `pipeline` from a checkpoint on disk.
fn through_files(mut pipeline: Pipeline, mut resumed: Pipeline) -> Result<Pipeline, CliError> {
    let folder = tempfile::tempdir().map_err(io(&std::env::temp_dir()))?;
    let mut checkpoints = Checkpoints::open(folder.path(), Settings::default())?;
    checkpoints.save(&mut pipeline, RunInfo::default())?;
    checkpoints.wait()?;
    let found = folder::find(folder.path())?.found;
    let missing = || CliError::Usage("the checkpoint that was just written is not there".into());
    found.ok_or_else(missing)?.restore(&mut resumed)?;
    Ok(resumed)
}

/// The name of the first tensor whose bits differ, and by how much.
fn first_difference(expected: &Computed, found: &Computed) -> Result<Option<String>, CliError> {
    if expected.tensors.len() != found.tensors.len() {
        let counts = (expected.tensors.len(), found.tensors.len());
        return Ok(Some(format!("the number of tensors: {} and {}", counts.0, counts.1)));
    }
    for ((name, a), (other, b)) in expected.tensors.iter().zip(&found.tensors) {
        if name != other || a.size() != b.size() {
            return Ok(Some(format!("'{name}' {:?} against '{other}' {:?}", a.size(), b.size())));
        }
        if !same_bits(a, b)? {
            let largest = a.f_sub(b)?.f_abs()?.f_max()?.f_double_value(&[])?;
            return Ok(Some(format!("{name} (largest difference {largest:.3e})")));
        }
    }
    Ok(None)
}

/// Compares as integers: 0 and -0 differ, equal NaNs do not.
fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool, CliError> {
    let kind = match a.kind() {
        Kind::Double => Kind::Int64,
        _ => Kind::Int,
    };
    let view = |tensor: &Tensor| tensor.f_contiguous()?.f_view_dtype(kind);
    Ok(a.kind() == b.kind() && view(a)?.f_equal(&view(b)?)?)
}

fn print_line(variant: &Variant, reports: &[StepReport], verdict: &str) {
    let overlap_ms: f64 = reports.iter().map(|report| report.overlap.as_ms()).sum();
    let step_ms: f64 = reports.iter().map(|report| report.time.as_ms()).sum();
    let loss = reports.last().map_or(f64::NAN, |report| report.loss);
    let overlap = if variant.stages > 1 {
        format!("two or more threads at once {overlap_ms:.0} of {step_ms:.0} ms")
    } else {
        format!("one thread, {step_ms:.0} ms")
    };
    say!(
        "K = {}  M = {}  {:<13} {:<16} loss {loss:.6}  {overlap}  {verdict}",
        variant.stages,
        variant.micro_batches,
        variant.schedule.to_string(),
        variant.remat.to_string(),
    );
}
