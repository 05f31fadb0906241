//! Ways to use a machine's cores: a pipeline with a thread for each stage, fewer stages with
//! several threads each, and replicas of a shorter pipeline.
//!
//! A replica's step includes the sum of gradients. It moves about 4 + 3 (R - 1) times the bytes of
//! the gradients through memory: each replica's thread collects its own and stores the sums, and
//! one of them adds those of all. How fast that is, is measured here.

use std::{fmt::Display, path::Path, thread, time::Instant};

use gpipe::{Bytes, Device, Nanos};
use gpipe_core::plan::{Found, PlanDevice};
use tch::{Kind, Tensor};

use crate::{
    CliError,
    config::{Config, OnUnreadableChoice},
    numbers::counted,
    output::prose,
    plan_choices::{Choices, file, find},
    plan_costs::measured,
    plan_file::{Deployment, PlanFile, Source},
    processes::REPLICAS_MAX,
    profile, task,
};

/// Elements of a tensor that is added to measure sums: 32 MiB.
const ELEMENTS: i64 = 8 << 20;
/// How often it is added; the fastest counts.
const TIMES: usize = 5;
/// Bytes that one addition moves, per byte of the tensor.
const MOVED: u64 = 3;

/// A way to use the cores, with the best plan for it.
pub(crate) struct Way {
    pub deployment: Deployment,
    pub source: Source,
    pub devices: Vec<PlanDevice>,
    pub config: Config,
    pub found: Found,
    /// The time of the sums of gradients in a step.
    pub sums: Nanos,
}

impl Way {
    /// The predicted time of a step, with the sums.
    pub(crate) fn step(&self) -> Nanos {
        self.found.prediction.step() + self.sums
    }

    /// The way in words.
    pub(crate) fn text(&self) -> String {
        let plan = &self.found.plan;
        let Deployment { replicas, threads } = self.deployment;
        let mut text = counted(plan.balance.len(), "stage");
        if replicas > 1 {
            text = format!("{replicas} replicas of {text}");
        }
        let each =
            if threads > 1 { format!(", {threads} threads for each") } else { String::new() };
        let sums = match self.sums {
            Nanos(0) => String::new(),
            sums => format!(" (of which {sums} for sums of gradients)"),
        };
        let (m, schedule) = (plan.micro_batches, &plan.schedule);
        format!("{text}{each}, M {m}, {schedule}: {}{sums}", self.step())
    }

    /// The plan's file, which says which way it is.
    pub(crate) fn file(&self) -> PlanFile {
        let Self { source, devices, config, found, sums, deployment } = self;
        let mut own = file(source, devices, config, found);
        own.deployment = Some(*deployment);
        own.predicted.step += *sums;
        let later = |[low, high]: [Nanos; 2]| [low + *sums, high + *sums];
        own.predicted.interval = own.predicted.interval.map(later);
        own
    }
}

/// The best plans of other ways to use the devices' cores than one pipeline with a thread for each
/// stage. `of_threads` gives the costs of stages with several threads, if they are known.
pub(crate) fn planned(
    (config, devices, costs): (&Config, &[PlanDevice], &Source),
    choices: &Choices,
    of_threads: impl Fn(&Config, Deployment) -> Result<Option<Source>, CliError>,
) -> Result<Vec<Way>, CliError> {
    let mut all = Vec::new();
    // Training refuses this setting with several replicas (`setup::check_images`).
    let skips = config.images.on_unreadable == OnUnreadableChoice::Skip;
    if skips && devices.len() > 1 {
        prose!("left out: replicas: images.on_unreadable = \"skip\" is for one replica");
    }
    for (deployment, config, devices) in others(config, devices) {
        let Deployment { replicas, threads } = deployment;
        if replicas > 1 && (skips || choices.one_replica) {
            continue;
        }
        let left_out = |error: &dyn Display| {
            let (stages, replicas) =
                (counted(devices.len(), "stage"), counted(replicas, "replica"));
            prose!("left out: {replicas} of {stages} with {}: {error}", counted(threads, "thread"));
        };
        let mut choices = Choices { is_quiet: true, ..choices.clone() };
        if choices.keeps_sizes && replicas > 1 {
            let m = config.pipeline.micro_batches;
            if !m.is_multiple_of(replicas) || !config.train.mini_batch.is_multiple_of(replicas) {
                left_out(&format!(
                    "M = {m} is not for {replicas} replicas with the same batch norms"
                ));
                continue;
            }
            choices.micro_batches = vec![m / replicas];
        }
        let source = match threads {
            1 => Ok(Some(costs.clone())),
            _ => of_threads(&config, deployment),
        };
        let found = match source {
            Ok(Some(mut source)) => {
                // A cut or policies for another number of stages are not for this way.
                find(&mut source, &devices, &config, choices).map(|found| (source, found))
            }
            Ok(None) => continue,
            Err(error) => Err(error),
        };
        let (source, found) = match found {
            Ok(found) => found,
            Err(error) => {
                left_out(&error);
                continue;
            }
        };
        let gradients = source.costs.layers.iter().map(|layer| layer.gradients).sum();
        let sums = time_of_sums(replicas, gradients)?;
        all.push(Way { deployment, source, devices, config, found, sums });
    }
    Ok(all)
}

/// The configurations and devices of other ways to use `devices` than one pipeline: for each number
/// of replicas and of threads, what is left for stages.
fn others(config: &Config, devices: &[PlanDevice]) -> Vec<(Deployment, Config, Vec<PlanDevice>)> {
    let is_cpu = config.pipeline.devices.0.iter().all(|device| *device == Device::Cpu);
    let own = config.pipeline.threads_per_stage;
    if !is_cpu || config.pipeline.replicas > 1 || own > 1 {
        return Vec::new();
    }
    let count = devices.len();
    let mut all = Vec::new();
    for replicas in (1..=count).filter(|&replicas| count.is_multiple_of(replicas)) {
        let left = count / replicas;
        for threads in (1..=left).filter(|&threads| left.is_multiple_of(threads)) {
            let is_one_pipeline = replicas == 1 && threads == 1;
            let are_too_many = config.samples_of_a_pipeline() < replicas || replicas > REPLICAS_MAX;
            if is_one_pipeline || are_too_many {
                continue;
            }
            let mut other = config.clone();
            other.pipeline.replicas = replicas;
            other.pipeline.threads_per_stage = threads;
            other.set_stages(left / threads, false);
            let deployment = Deployment { replicas, threads };
            all.push((deployment, other, devices[..left / threads].to_vec()));
        }
    }
    all
}

/// The costs of stages with several threads, if they were measured into a file at `path`.
pub(crate) fn costs_of_threads(
    config: &Config,
    path: Option<&Path>,
) -> Result<Option<Source>, CliError> {
    let threads = config.pipeline.threads_per_stage;
    let Some(path) = path else {
        prose!(
            "left out: {threads} threads for each stage, which were not measured: gpipe profile \
            --threads-per-stage {threads} --stages {}",
            config.pipeline.stages
        );
        return Ok(None);
    };
    let found = profile::read(path)?;
    let size = usize::try_from(found.subject.classes).unwrap_or(0);
    let model = task::model(config, size)?;
    let own = profile::subject(config, &model)?;
    let checked = found.subject.check(&own, &path.display().to_string());
    checked.map_err(profile::measure_again)?;
    Ok(Some(measured(found, path)))
}

/// The time that `replicas` replicas take to add `gradients` bytes each, in one process.
///
/// # Errors
/// There is no memory or thread for the measurement.
fn time_of_sums(replicas: usize, gradients: Bytes) -> Result<Nanos, CliError> {
    if replicas < 2 {
        return Ok(Nanos(0));
    }
    let failed = |source| CliError::Io { what: "measuring sums of gradients".into(), source };
    let slowest = thread::scope(|scope| {
        let begun: Vec<_> = (0..replicas)
            .map(|_| thread::Builder::new().spawn_scoped(scope, time_of_addition))
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        let mut slowest = 0.0_f64;
        for own in begun {
            let panicked = || failed(std::io::Error::other("its thread panicked"));
            slowest = slowest.max(own.join().map_err(|_| panicked())??);
        }
        Ok::<_, CliError>(slowest)
    })?;
    let per_byte = slowest / (MOVED as f64 * 4.0 * ELEMENTS as f64);
    let moved = (4 + MOVED * (replicas as u64 - 1)) as f64 * gradients.0 as f64;
    Ok(Nanos((moved * per_byte * 1e9) as u64))
}

/// Seconds of one addition on one thread.
fn time_of_addition() -> Result<f64, CliError> {
    let _no_grad = tch::no_grad_guard();
    gpipe::compute_on_this_thread_alone();
    let mut sum = Tensor::f_ones([ELEMENTS], (Kind::Float, tch::Device::Cpu))?;
    let other = sum.f_ones_like()?;
    let mut fastest = f64::MAX;
    for _ in 0..TIMES {
        let start = Instant::now();
        let _ = sum.f_add_(&other)?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}
