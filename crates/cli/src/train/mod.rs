//! `gpipe train`.
//!
//! - [`start`]: from nothing, or from a checkpoint
//! - [`begun`]: what its folder says from the start, and what all processes must have been told
//! - [`run_lock`]: the run's folder; [`records`]: its metrics
//! - [`saving`]: when checkpoints are saved
//! - [`exchange`]: what processes ask of each other after a step
//! - [`signals`]: Ctrl-C and SIGTERM
//! - [`validation`]: what is held out, measured on the way and at the end
//! - [`step_trace`]: the file of the latest step
//! - here: the loop, and what goes on beside it

mod begun;
mod exchange;
mod records;
mod run_lock;
mod saving;
mod signals;
mod start;
pub(crate) mod step_trace;
mod validation;

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use gpipe::{Pipeline, StepReport};
use gpipe_checkpoint::{Checkpoint, manifest::TrainPosition, weights};
use gpipe_data::{Loaded, Loader, LoaderSettings};
use tch::Tensor;

use self::{
    begun::{set_aside, told, write_begun},
    exchange::Asked,
    run_lock::RunLock,
    saving::Saving,
    signals::{Stop, name},
    start::Start,
    step_trace::StepTrace,
};
use crate::{
    CliError,
    args::TrainArguments,
    config::{Config, OnNan},
    demand, facts, init,
    metrics::{Metrics, Seen},
    output::{complain, say},
    plan,
    plan_file::PlanFile,
    processes::{self, Processes, environment::Environment},
    progress::Progress,
    run_folder::{AVERAGES, PLAN, WEIGHTS, config_of},
    setup,
    summary::Summary,
    task::{self, Batch, MakeBatch, Task, Vocabulary, classification::tell_unreadable},
};

/// So many mini-batches in a row that are no numbers are no accident, and end the run.
const NAN_IN_A_ROW: u64 = 10;

/// Trains, evaluates, and writes the run's files.
pub(crate) fn run(arguments: &TrainArguments, here: Option<&Environment>) -> Result<(), CliError> {
    // Before a folder is looked for.
    if arguments.init.is_some() && arguments.resume.as_deref().is_some_and(|from| from != "auto") {
        return Err(CliError::Usage(
            "--init starts anew and --resume goes on: give one of them, or --resume auto".into(),
        ));
    }
    let mut config = arguments.pipeline.config.clone();
    if let (None, Some(from)) = (&config.config, &arguments.resume) {
        config.config = config_of(Path::new(from));
    }
    let deadline_s = processes::deadline_s(&config);
    Processes::among(here, deadline_s, |processes| train(arguments, processes))
}

fn train(arguments: &TrainArguments, processes: &Processes) -> Result<(), CliError> {
    processes.agree_on_facts(&told(arguments))?; // the first process's are followed
    let wanted = plan::wanted(arguments.plan.as_deref())?; // before any work
    let mut start = Start::find(arguments, processes)?;
    setup::check_images(&start.config, processes)?;
    processes.agree_on(&start.config)?;
    processes.replicate(start.config.pipeline.replicas)?;
    let init = arguments.init.as_deref().map(init::open).transpose()?;
    let (init, given) = match (&start.checkpoint, init) {
        (Some(checkpoint), _) => (None, Some(Vocabulary::of_checkpoint(checkpoint)?)),
        (None, Some(init)) => {
            let vocabulary = Vocabulary::of_weights(&start.config, &init.from, init.vocabulary)?;
            (Some(init.file), vocabulary)
        }
        (None, None) => (None, None),
    };
    // A text model's tokenizer is kept; an image model's classes are those of the data, whatever it was trained for.
    let (fixed, earlier) = match (start.checkpoint.is_some(), given) {
        (false, Some(Vocabulary::Classes(classes))) => (None, Some(classes)),
        (_, given) => (given, None),
    };
    let task = task::open(&start.config, fixed)?;
    say!("{}", task.summary());
    processes.agree_on_data(&task.fingerprint())?;
    let mut position = position(start.checkpoint.as_ref(), task.fingerprint())?;
    let model = task::model(&start.config, task.vocabulary().size())?;
    let known = &arguments.pipeline.config;
    let model_of = (task.as_ref(), &model);
    let plan = plan::for_training(wanted, known, &mut start.config, model_of, processes)?;
    let plan = match plan {
        // A run that goes on follows its plan, unless it was told to go on in another way.
        None if start.checkpoint.is_some() && start.out.path().join(PLAN).exists() => {
            let own = PlanFile::read(&start.out.path().join(PLAN)).ok();
            own.filter(|plan| plan.is_followed(&start.config))
        }
        plan => plan,
    };
    let config = start.config.clone();
    describe(&config, &model);
    demand::check(&config, &model, processes)?;
    let mut pipeline = setup::pipeline_among(&config, model, processes)?.build()?;
    say!("layers per stage: {:?}", pipeline.balance());
    let fed = pipeline.samples_fed(config.train.mini_batch)?;
    let make = task.training(position.batches, position.samples, fed)?;
    match (&start.checkpoint, init) {
        (Some(checkpoint), _) => checkpoint.restore(&mut pipeline)?,
        (None, Some(file)) => {
            let fresh = fresh(earlier, task.vocabulary());
            init::load(&mut pipeline, file, &config, arguments, fresh)?;
        }
        (None, None) => {}
    }

    start.out.keep();
    let out = start.out.path();
    let vocabulary = task.vocabulary();
    let is_first = processes.is_first();
    let written = is_first.then(|| {
        write_begun(out, &config, plan.as_ref(), vocabulary)?;
        records::open(&start, &position, pipeline.steps() + 1)
    });
    let metrics = processes.all(written.transpose())?;
    let mut run = Run {
        metrics,
        progress: Progress::new(config.train.steps, task::unit(&config)),
        summary: Summary::new(task::unit(&config)),
        saving: Saving::new(&config, vocabulary, &start, processes)?,
        stop: Stop::install()?,
        trace: StepTrace::new(out, config.pipeline.memory.0.clone(), plan.as_ref()),
        nan_in_a_row: 0,
        told: BTreeSet::new(),
        task: task.as_ref(),
        processes,
        claim: &start.out,
        out,
        config: &config,
    };
    if is_first && position.batches < config.train.steps {
        // A run that goes on has not ended any more: nobody shall take these for its weights.
        for name in [WEIGHTS, AVERAGES] {
            set_aside(out, name)?;
        }
    }
    let begin = Instant::now();
    run.train(&mut pipeline, make, &mut position)?;
    run.progress.finish();
    run.summary.print(begin.elapsed().as_secs_f64() * 1e3, run.saving.blocked);
    if let Some(plan) = &plan {
        run.summary.compare(&plan.predicted);
    }
    run.end(&mut pipeline, &mut position)
}

/// The parameters that start afresh though the weights of `--init` have them: the softmax, where the network was trained for the
/// `earlier` classes, and these are others.
fn fresh(earlier: Option<Vec<String>>, vocabulary: &Vocabulary) -> &'static [&'static str] {
    match (earlier, vocabulary) {
        (Some(earlier), Vocabulary::Classes(classes)) if earlier != *classes => {
            &["classifier.weight", "classifier.bias", "auxiliary.weight", "auxiliary.bias"]
        }
        _ => &[],
    }
}

/// Where the run is in its data, which must be those of the checkpoint.
fn position(checkpoint: Option<&Checkpoint>, data: String) -> Result<TrainPosition, CliError> {
    let Some(checkpoint) = checkpoint else {
        return Ok(TrainPosition { data, ..TrainPosition::default() });
    };
    let position = checkpoint.manifest().progress.clone();
    if position.data == data {
        return Ok(position);
    }
    Err(CliError::Usage(format!(
        "the training data are not those of {}: the run would go on elsewhere in others; bring them back, or start another run (--init takes its weights)",
        checkpoint.folder().display()
    )))
}

/// What goes on beside the training.
struct Run<'a> {
    /// Of the process that writes them.
    metrics: Option<Metrics>,
    progress: Progress,
    summary: Summary,
    saving: Saving,
    stop: Stop,
    trace: StepTrace,
    nan_in_a_row: u64,
    /// Images that were told to be unreadable.
    told: BTreeSet<String>,
    task: &'a dyn Task,
    processes: &'a Processes,
    claim: &'a RunLock,
    out: &'a Path,
    config: &'a Config,
}

impl Run<'_> {
    /// After the last step: the validation, and what stays of the run.
    fn end(
        &mut self,
        pipeline: &mut Pipeline,
        position: &mut TrainPosition,
    ) -> Result<(), CliError> {
        self.check_folder()?;
        self.write_trace(pipeline);
        let validated = self.validate(pipeline, position);
        self.tell_unreadable();
        if let Err(error) = validated {
            return Err(self.left(pipeline, position, error));
        }
        let (size, unit) = (self.task.vocabulary().size() as f64, task::unit(self.config));
        say!("(a uniform guess: {:.4} nats/{unit})", size.ln());
        self.check_folder()?;
        let saved = self.saving.end(pipeline, position, &mut self.metrics, &self.progress);
        self.processes.meet_replicas()?;
        // Where there is no room for a checkpoint, there may yet be some for the weights.
        self.write_weights(WEIGHTS, &pipeline.parameters()?)?;
        if self.config.optimizer.average > 0.0 {
            self.write_weights(AVERAGES, &pipeline.averages()?)?;
        }
        if let Some(metrics) = &self.metrics {
            metrics.tell_lost();
        }
        self.check_folder()?; // or all that was written lies somewhere else, or nowhere
        saved?;
        say!("files: {}", self.out.display());
        Ok(())
    }

    /// Sees, in all processes, that the run's folder is still the one that it began in.
    fn check_folder(&self) -> Result<(), CliError> {
        self.processes.decided(|| self.claim.check())
    }

    /// The parameters of all processes' stages, of which `own` are this one's, in one file.
    fn write_weights(&self, name: &str, own: &[(String, Tensor)]) -> Result<(), CliError> {
        if !self.processes.saves() {
            return Ok(());
        }
        let (path, facts) = (self.out.join(name), facts::of(self.config));
        match self.processes.transport() {
            None => weights::save_with(&path, own, &facts)?,
            Some(transport) => weights::save_among(&path, own, &facts, &transport)?,
        }
        Ok(())
    }

    /// The file of the latest step, which the first process writes.
    fn write_trace(&self, pipeline: &mut Pipeline) {
        if self.processes.is_first() {
            self.trace.write(pipeline);
        }
    }

    /// The steps from `position` on. Whatever ends them early, the state before it is saved.
    fn train(
        &mut self,
        pipeline: &mut Pipeline,
        make: MakeBatch,
        position: &mut TrainPosition,
    ) -> Result<(), CliError> {
        let steps = self.config.train.steps;
        if position.batches >= steps {
            say!("all {steps} steps are done: --steps N trains more");
            return Ok(());
        }
        let result = self.steps(pipeline, make, position);
        self.tell_unreadable();
        let Err(error) = result else { return Ok(()) };
        self.progress.finish();
        Err(self.left(pipeline, position, error))
    }

    /// Saves the state before `error` ends the run.
    fn left(
        &mut self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        error: CliError,
    ) -> CliError {
        if matches!(error, CliError::FolderGone { .. }) {
            self.processes.fail(&error);
            return error; // nothing is written in another folder's place
        }
        self.write_trace(pipeline);
        if self.processes.are_several() && !error.is_of_all() {
            // The others cannot come to save with this one.
            self.processes.fail(&error);
            let out = self.out.display();
            complain!(
                "gpipe: nothing was saved at the end: gpipe train --resume {out} goes on from the last checkpoint, if there is one"
            );
            return error;
        }
        match self.saving.leave(pipeline, position, &mut self.metrics, &self.progress) {
            Ok(()) => {
                let out = self.out.display();
                complain!(
                    "gpipe: the state after step {} is saved: gpipe train --resume {out} goes on",
                    position.batches
                );
            }
            Err(not_saved) => complain!("gpipe: the state could not be saved: {not_saved}"),
        }
        if let Err(lost) = self.processes.meet_replicas() {
            complain!("gpipe: {lost}");
        }
        error
    }

    fn steps(
        &mut self,
        pipeline: &mut Pipeline,
        make: MakeBatch,
        position: &mut TrainPosition,
    ) -> Result<(), CliError> {
        let steps = self.config.train.steps;
        let deadline = Duration::from_secs(self.config.pipeline.deadline_s);
        let ahead = LoaderSettings { deadline, depth: self.config.train.batches_ahead };
        let loader = Loader::start(position.batches..steps, ahead, make)?;
        if due(self.config, position) {
            self.validate(pipeline, position)?; // which an interrupted run left out
        }
        for loaded in loader {
            self.claim.check()?;
            let Loaded { batch, waited, .. } = loaded?;
            let Batch { inputs, targets, samples } = batch;
            let result = pipeline.train_step(inputs, targets);
            let seen = TrainPosition {
                batches: position.batches + 1,
                samples: position.samples + samples,
                evaluated: false,
                ..position.clone()
            };
            match result {
                Ok(report) => {
                    *position = TrainPosition {
                        tokens: seen.tokens + report.count as u64,
                        skipped: seen.skipped + u64::from(report.skipped),
                        ..seen
                    };
                    self.step(&report, samples, position, waited);
                    if self.processes.is_first() {
                        self.trace.step(pipeline, &report);
                    }
                }
                Err(error) => {
                    self.may_skip(error, position.batches + 1)?;
                    *position = TrainPosition { skipped: seen.skipped + 1, ..seen };
                    if let Some(metrics) = &mut self.metrics {
                        metrics.not_finite(pipeline.steps(), samples, seen_of(position));
                    }
                }
            }
            let Asked { mut signal, save } = self.asked()?;
            if signal.is_none() && due(self.config, position) {
                self.validate(pipeline, position)?;
                signal = self.asked()?.signal;
            }
            self.stop(signal, position)?;
            if position.batches < steps {
                let told = (&mut self.metrics, &self.progress);
                if self.saving.step(pipeline, position, save, told) {
                    self.processes.meet_replicas()?;
                }
            } // the last one is saved after the validation at the end, which may make it the best
        }
        Ok(())
    }

    /// Tells of the images that were left out since it was last told.
    fn tell_unreadable(&mut self) {
        let all = self.task.unreadable();
        let new: Vec<_> =
            all.into_iter().filter(|(name, _)| self.told.insert(name.clone())).collect();
        tell_unreadable(&new);
    }

    /// What is asked of the run now, of any of its processes.
    fn asked(&self) -> Result<Asked, CliError> {
        Asked { signal: self.stop.asked(), save: self.saving.is_time() }.of_all(self.processes)
    }

    fn stop(&self, signal: Option<i32>, position: &TrainPosition) -> Result<(), CliError> {
        match signal {
            Some(signal) if position.batches < self.config.train.steps => {
                let (signal_name, step) = (name(signal).to_owned(), position.batches);
                Err(CliError::Interrupted { signal, signal_name, step })
            }
            _ => Ok(()), // the end of the run is as near
        }
    }

    /// After a step.
    fn step(
        &mut self,
        report: &StepReport,
        samples: u64,
        position: &TrainPosition,
        waited: Duration,
    ) {
        self.nan_in_a_row = 0;
        if let Some(metrics) = &mut self.metrics {
            metrics.step(report, samples, seen_of(position), waited);
        }
        self.progress.step(position.batches, report);
        self.summary.add(report, waited);
    }

    /// After a step that failed: nothing, if it may be left out.
    fn may_skip(&mut self, error: gpipe::Error, number: u64) -> Result<(), CliError> {
        if !error.is_not_finite() {
            return Err(error.into());
        }
        if self.config.train.on_nan == OnNan::Stop {
            return Err(CliError::Nan { step: number, source: error });
        }
        self.nan_in_a_row += 1;
        if self.nan_in_a_row > NAN_IN_A_ROW {
            return Err(CliError::NanInARow { count: self.nan_in_a_row, source: error });
        }
        self.progress.warn(&format!("step {number} is skipped: {error}"));
        Ok(())
    }
}

/// Whether a validation on the way is left to be made.
fn due(config: &Config, position: &TrainPosition) -> bool {
    let (batches, every) = (position.batches, config.train.validate_every);
    let is_on_the_way = batches > 0 && batches < config.train.steps;
    is_on_the_way && every > 0 && batches.is_multiple_of(every) && !position.evaluated
}

fn seen_of(position: &TrainPosition) -> Seen {
    Seen { tokens: position.tokens, samples: position.samples }
}

fn describe(config: &Config, model: &gpipe::Sequence) {
    let pipeline = &config.pipeline;
    if pipeline.replicas > 1 {
        say!("{} replicas, each on its part of every mini-batch", pipeline.replicas);
    }
    say!(
        "{} parameters in {} layers; K = {} on {}, M = {}, {}, re-materialization {}, {}",
        model.parameter_count(),
        model.len(),
        pipeline.stages,
        pipeline.devices,
        pipeline.micro_batches,
        pipeline.schedule,
        pipeline.remat,
        pipeline.dtype
    );
}
