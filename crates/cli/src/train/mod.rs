//! `gpipe train`, in phases: resolve, agree, open the data, plan, build, run.
//!
//! - [`start`]: from the beginning, or from a checkpoint
//! - [`begun`]: the files that describe the run, and the arguments that all processes share
//! - [`run_lock`]: the run's folder; [`records`]: its metrics
//! - [`steps`]: the loop over steps, and what happens between them
//! - [`saving`]: when checkpoints are saved
//! - [`exchange`]: requests that processes exchange after a step
//! - [`signals`]: Ctrl-C, SIGTERM and SIGHUP
//! - [`validation`]: measures held-out data, during the run and at the end
//! - [`step_trace`]: the file of the latest step
//! - here: the phases

mod begun;
mod exchange;
mod records;
mod run_lock;
mod saving;
mod signals;
mod start;
pub(crate) mod step_trace;
mod steps;
mod validation;

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use gpipe::{Pipeline, Schedule, Sequence};
use gpipe_checkpoint::{Checkpoint, manifest::TrainPosition};

use self::{
    begun::{set_aside, told, write_begun},
    saving::Saving,
    signals::{Stop, tell_before_the_first_step},
    start::Start,
    step_trace::StepTrace,
    steps::Run,
};
use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    demand,
    initial_weights::{self, Init},
    numbers::short,
    output::{complain, prose, say},
    plan_file::PlanFile,
    plan_training::{self, Wanted},
    processes::Processes,
    progress::Progress,
    run_folder::{AVERAGES, PLAN, WEIGHTS, config_of},
    setup,
    summary::Summary,
    task::{self, MakeBatch, Task, Vocabulary, sequence},
};

/// Trains, evaluates, and writes the run's files.
pub(crate) fn run(arguments: &TrainArguments, here: Option<&Environment>) -> Result<(), CliError> {
    tell_before_the_first_step()?;
    // Checked before any folder is looked for.
    let from = arguments.pipeline.config.from.is_some();
    let begins = [(arguments.init.is_some(), "--init"), (from, "--from")];
    let begins = begins.iter().find(|(is_given, _)| *is_given);
    if let Some((_, flag)) = begins
        && arguments.resume.as_deref().is_some_and(|from| from != "auto")
    {
        return Err(CliError::Usage(format!(
            "{flag} starts anew and --resume goes on: give one of them, or --resume auto"
        )));
    }
    let mut config = arguments.pipeline.config.clone();
    if let (None, Some(from)) = (&config.config, &arguments.resume) {
        config.config = config_of(Path::new(from));
    }
    let planned = arguments.plan.origin.as_deref().filter(|plan| *plan != "auto");
    let planned = planned.and_then(|path| PlanFile::read(Path::new(path)).ok()?.deployment);
    let replicas = arguments.pipeline.replicas.or(planned.map(|planned| planned.replicas));
    if let Some(replicas) = replicas {
        config.set.push(format!("pipeline.replicas={replicas}"));
    }
    let planned = Mutex::new(None);
    Processes::among_replicas(here, &config, |processes| {
        *hold(&planned) = train(arguments, processes, None)?;
        Ok(())
    })?;
    let Some(planned) = hold(&planned).take() else { return Ok(()) };
    config.set.push(format!("pipeline.replicas={}", planned.plan.replicas()));
    Processes::among_replicas(None, &config, |processes| {
        train(arguments, processes, Some(&planned)).map(drop)
    })
}

/// A run whose plan was made before its replicas began.
struct Planned {
    /// Where the run starts. The first replica takes it.
    start: Mutex<Option<Start>>,
    plan: PlanFile,
}

fn hold<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the phases in order. All processes of a run go through them together. Stops after the plan
/// if it is one of several replicas, which must begin before the run goes on as `planned`.
fn train(
    arguments: &TrainArguments,
    processes: &Processes,
    planned: Option<&Planned>,
) -> Result<Option<Planned>, CliError> {
    let (mut start, wanted) = resolve(arguments, processes, planned)?;
    agree(&start.config, processes)?;
    let mut data = open_data(arguments, &start, processes)?;
    if planned.is_none() {
        prose!("{}", data.task.summary());
    }
    let model = task::model(&start.config, data.task.vocabulary().size())?;
    let of = (data.task.as_ref(), &model);
    let wanted = plan_training::made(wanted, &arguments.pipeline, &start.config, of, processes)?;
    if !processes.are_several()
        && let Some((_, plan)) = wanted.as_ref().and_then(Wanted::plan)
        && plan.replicas() > 1
    {
        return Ok(Some(Planned { plan: plan.clone(), start: Mutex::new(Some(start)) }));
    }
    let plan = follow_plan(wanted, arguments, &mut start, &model)?;
    let (pipeline, make) = build(arguments, &start, &mut data, model, processes)?;
    run_steps(start, data, plan, pipeline, make, processes)?;
    Ok(None)
}

/// Phase 1: determines the configuration, the run's folder, the checkpoint to resume from, and the
/// requested plan.
fn resolve(
    arguments: &TrainArguments,
    processes: &Processes,
    planned: Option<&Planned>,
) -> Result<(Start, Option<Wanted>), CliError> {
    processes.agree_on_facts(&told(arguments))?; // the first process's arguments are followed
    let wanted = match planned {
        Some(Planned { plan, .. }) => Some(Wanted::made(plan.clone())),
        None => plan_training::wanted(&arguments.plan, arguments.pipeline.stages)?,
    };
    let first = || match planned.and_then(|planned| hold(&planned.start).take()) {
        Some(start) => Ok(start),
        None => Start::first(arguments),
    };
    let mut start = Start::find(arguments, processes, first)?;
    if let Some((origin, plan)) = wanted.as_ref().and_then(Wanted::plan) {
        plan_training::deploy(origin, plan, &mut start.config, arguments.pipeline.replicas);
    }
    Ok((start, wanted))
}

/// Phase 2: checks that all processes have the same configuration and can share the images.
fn agree(config: &Config, processes: &Processes) -> Result<(), CliError> {
    setup::check_images(config, processes)?;
    processes.agree_on(config)?;
    processes.replicate(config.pipeline.replicas)
}

/// The data of a training, and what they imply for the initial weights.
struct TrainingData {
    task: Box<dyn Task>,
    /// The run's position in the data.
    position: TrainPosition,
    /// The weights of `--init` or `--from`, until they are loaded.
    init: Option<Init>,
    /// Parameters that start from random values although the weights of `--init` have them.
    reinitialized: &'static [&'static str],
}

/// Phase 3: opens the data, with the vocabulary of the checkpoint or of the initial weights.
fn open_data(
    arguments: &TrainArguments,
    start: &Start,
    processes: &Processes,
) -> Result<TrainingData, CliError> {
    let init = match (&arguments.pipeline.config.from, &arguments.init) {
        (Some(folder), _) => Some(initial_weights::open_folder(folder)?),
        (None, init) => init.as_deref().map(initial_weights::open).transpose()?,
    };
    let (init, given) = match (&start.checkpoint, init) {
        (Some(checkpoint), _) => {
            (None, Some(Vocabulary::of_checkpoint(checkpoint, start.config.end())?))
        }
        (None, Some(mut init)) => {
            let beside = init.vocabulary.take();
            let vocabulary = Vocabulary::of_weights(&start.config, &init.from, beside)?;
            (Some(init), vocabulary)
        }
        (None, None) if start.config.lora.rank != 0 => {
            return Err(CliError::Usage(
                "lora.rank: adapters need a trained model: name its folder with --from FOLDER, or \
                its weights with --init FILE"
                    .into(),
            ));
        }
        (None, None) => (None, None),
    };
    // A text model keeps its tokenizer. An image model takes its classes from the data, whatever it
    // was trained for.
    let (fixed, earlier) = match (start.checkpoint.is_some(), given) {
        (false, Some(Vocabulary::Classes(classes))) => (None, Some(classes)),
        (_, given) => (given, None),
    };
    let task = plan_training::open(&arguments.plan, &start.config, fixed)?;
    processes.agree_on_data(&task.fingerprint())?;
    processes.agree_on_held_out(&task.held_out_fingerprint())?;
    let position = position(start.checkpoint.as_ref(), task.fingerprint())?;
    let reinitialized = reinitialized(earlier, task.vocabulary());
    Ok(TrainingData { task, position, init, reinitialized })
}

/// Phase 4: changes the configuration to follow the plan, if there is one.
fn follow_plan(
    wanted: Option<Wanted>,
    arguments: &TrainArguments,
    start: &mut Start,
    model: &Sequence,
) -> Result<Option<PlanFile>, CliError> {
    let plan = plan_training::follow(wanted, &arguments.pipeline, &mut start.config, model)?;
    Ok(match plan {
        // A resumed run follows its plan, unless the configuration differs from it now.
        None if start.checkpoint.is_some() && start.out.path().join(PLAN).exists() => {
            let own = PlanFile::read(&start.out.path().join(PLAN)).ok();
            own.filter(|plan| plan.is_followed(&start.config))
        }
        plan => plan,
    })
}

/// Phase 5: builds the pipeline with its initial parameters, and the function that makes
/// mini-batches.
fn build(
    arguments: &TrainArguments,
    start: &Start,
    data: &mut TrainingData,
    model: Sequence,
    processes: &Processes,
) -> Result<(Pipeline, MakeBatch), CliError> {
    let config = &start.config;
    describe(config, &model);
    let steps = config.train.steps.saturating_sub(data.position.batches);
    demand::check(config, &model, processes, steps)?;
    let mut builder = setup::pipeline_among(config, model, processes)?;
    // The weights of a folder fit, so no parameter keeps an initial value.
    if data.init.is_some() && arguments.pipeline.config.from.is_some() {
        builder = builder.given_parameters();
    }
    let mut pipeline = builder.build()?;
    say!("layers per stage: {:?}", pipeline.balance());
    let fed = pipeline.samples_fed(config.train.mini_batch)?;
    let make = data.task.training(data.position.batches, data.position.samples, fed)?;
    match (&start.checkpoint, data.init.take()) {
        (Some(checkpoint), _) => checkpoint.restore(&mut pipeline)?,
        (None, Some(init)) => {
            initial_weights::load(&mut pipeline, init, config, arguments, data.reinitialized)?;
        }
        (None, None) => {}
    }
    Ok((pipeline, make))
}

/// Phase 6: runs the steps, and writes the files of the run.
fn run_steps(
    mut start: Start,
    mut data: TrainingData,
    plan: Option<PlanFile>,
    mut pipeline: Pipeline,
    make: MakeBatch,
    processes: &Processes,
) -> Result<(), CliError> {
    start.out.keep();
    let (config, out, position) = (&start.config, start.out.path(), &mut data.position);
    let vocabulary = data.task.vocabulary();
    let is_first = processes.is_first();
    let written = is_first.then(|| {
        write_begun(out, config, plan.as_ref(), vocabulary)?;
        records::open(&start, position, pipeline.steps() + 1)
    });
    let metrics = processes.all(written.transpose())?;
    let mut run = Run {
        metrics,
        progress: Progress::new(
            config.train.steps,
            config.train.log_every,
            task::unit(config),
            task::beside_nats(config),
        ),
        summary: Summary::new(task::unit(config)),
        saving: Saving::new(config, vocabulary, &start, processes)?,
        stop: Stop::install()?,
        trace: StepTrace::new(out, config.pipeline.memory.0.clone(), plan.as_ref()),
        nan_in_a_row: 0,
        told: BTreeSet::new(),
        task: data.task.as_ref(),
        processes,
        claim: &start.out,
        out,
        config,
    };
    if is_first && position.batches < config.train.steps {
        // A resumed run is not finished any more, so these must not be taken for its final weights.
        for name in [WEIGHTS, AVERAGES] {
            set_aside(out, name)?;
        }
    }
    let begin = Instant::now();
    run.train(&mut pipeline, make, position)?;
    run.progress.finish();
    run.summary.print(begin.elapsed().as_secs_f64() * 1e3, run.saving.blocked);
    if let Some(plan) = &plan {
        run.summary.compare(&plan.predicted);
    }
    run.end(&mut pipeline, position)
}

/// The parameters of the classifier, if the initial weights have the `earlier` classes and the data
/// have others.
fn reinitialized(earlier: Option<Vec<String>>, vocabulary: &Vocabulary) -> &'static [&'static str] {
    match (earlier, vocabulary) {
        (Some(earlier), Vocabulary::Classes(classes)) if earlier != *classes => {
            &["classifier.weight", "classifier.bias", "auxiliary.weight", "auxiliary.bias"]
        }
        _ => &[],
    }
}

/// The run's position in its data, which must be those of the checkpoint.
fn position(checkpoint: Option<&Checkpoint>, data: String) -> Result<TrainPosition, CliError> {
    let Some(checkpoint) = checkpoint else {
        return Ok(TrainPosition { data, ..TrainPosition::default() });
    };
    let position = checkpoint.manifest().progress.clone();
    if position.data == data {
        return Ok(position);
    }
    Err(CliError::Usage(format!(
        "the training data differ from those of {}, so the run cannot resume: bring the old data \
        back, or start another run (--init takes its weights)",
        checkpoint.folder().display()
    )))
}

fn describe(config: &Config, model: &gpipe::Sequence) {
    let pipeline = &config.pipeline;
    if pipeline.replicas > 1 {
        let shards = match pipeline.shard_optimizer {
            true => "; each keeps a part of the optimizer state",
            false => "",
        };
        say!("{} replicas, each on its part of every mini-batch{shards}", pipeline.replicas);
    }
    if let Some(lora) = config.lora.adapters() {
        let own = model
            .parameters()
            .into_iter()
            .filter(|(name, _)| name.ends_with(gpipe::LORA_A) || name.ends_with(gpipe::LORA_B));
        let sizes: Vec<i64> = own.map(|(_, shape)| shape.iter().product()).collect();
        say!(
            "trained: {} parameters of adapters of rank {} on {} linear layers; the rest is frozen",
            short(sizes.iter().sum::<i64>() as f64),
            lora.rank,
            sizes.len() / 2
        );
    }
    say!(
        "{} parameters in {} layers; K = {} on {}, M = {}, {}, {},\n  re-materialization {}",
        short(model.parameter_count() as f64),
        model.len(),
        pipeline.stages,
        pipeline.devices,
        pipeline.micro_batches,
        pipeline.schedule,
        pipeline.dtype,
        pipeline.remat
    );
    if let Ok(network) = config.network()
        && sequence(config) as i64 > network.positions()
    {
        complain!(
            "gpipe: warning: rows have {} tokens, and the model was trained on {} positions: it \
            has to learn those after them; data.sequence sets the length of rows",
            sequence(config),
            network.positions()
        );
    }
    if let Ok(Schedule::Custom(own)) = pipeline.schedule.schedule()
        && !own.omitted().is_empty()
    {
        say!("schedule {}: {}", pipeline.schedule, own.omitted());
    }
}
