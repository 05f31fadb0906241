//! The steps of a training, and what happens between them.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use gpipe::{Pipeline, StepReport};
use gpipe_checkpoint::{manifest::TrainPosition, weights};
use gpipe_data::{Loaded, Loader, LoaderSettings};
use tch::Tensor;

use super::{
    exchange::Asked,
    run_lock::RunLock,
    saving::Saving,
    signals::{Stop, name},
    step_trace::StepTrace,
};
use crate::{
    CliError,
    config::{Config, OnNan},
    facts,
    metrics::{Metrics, Totals},
    output::{complain, say},
    processes::Processes,
    progress::Progress,
    run_folder::{AVERAGES, WEIGHTS},
    summary::Summary,
    task::{self, Batch, MakeBatch, Task, classification::tell_unreadable},
};

/// Maximum number of non-finite mini-batches in a row. More are no accident and end the run.
const NAN_IN_A_ROW: u64 = 10;

/// A training in progress.
pub(super) struct Run<'a> {
    /// The metrics, in the process that writes them.
    pub(super) metrics: Option<Metrics>,
    pub(super) progress: Progress,
    pub(super) summary: Summary,
    pub(super) saving: Saving,
    pub(super) stop: Stop,
    pub(super) trace: StepTrace,
    pub(super) nan_in_a_row: u64,
    /// Unreadable images that have been reported.
    pub(super) told: BTreeSet<String>,
    pub(super) task: &'a dyn Task,
    pub(super) processes: &'a Processes,
    pub(super) claim: &'a RunLock,
    pub(super) out: &'a Path,
    pub(super) config: &'a Config,
}

impl Run<'_> {
    /// Ends a run after its last step: validates, and writes the final files.
    pub(super) fn end(
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
        if !position.evaluated
            && let Some(signal) = self.asked()?.signal
        {
            let signal_name = name(signal).to_owned();
            let asked = CliError::Interrupted { signal, signal_name, step: position.batches };
            return Err(self.left(pipeline, position, asked));
        }
        let (size, unit) = (self.task.vocabulary().size() as f64, task::unit(self.config));
        say!("(a uniform guess: {:.4} nats/{unit})", size.ln());
        self.check_folder()?;
        let saved = self.saving.end(pipeline, position, &mut self.metrics, &self.progress);
        self.processes.meet_replicas()?;
        // There may be room for the weights even if there is none for a checkpoint.
        self.write_weights(WEIGHTS, &pipeline.parameters()?)?;
        if self.config.optimizer.average > 0.0 {
            self.write_weights(AVERAGES, &pipeline.averages()?)?;
        }
        if let Some(metrics) = &self.metrics {
            metrics.tell_lost();
        }
        self.check_folder()?; // or the files above are elsewhere or gone
        saved?;
        say!("files: {}", self.out.display());
        Ok(())
    }

    /// Checks, in all processes, that the run's folder is still the one in which it began.
    fn check_folder(&self) -> Result<(), CliError> {
        self.processes.decided(|| self.claim.check())
    }

    /// Writes the parameters of all stages to one file. `own` are those of this process's stages.
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

    /// Writes the file of the latest step, on rank 0.
    fn write_trace(&self, pipeline: &mut Pipeline) {
        if self.processes.is_first() {
            self.trace.write(pipeline);
        }
    }

    /// Trains the steps after `position`. If something ends them early, the state is saved.
    pub(super) fn train(
        &mut self,
        pipeline: &mut Pipeline,
        make: MakeBatch,
        position: &mut TrainPosition,
    ) -> Result<(), CliError> {
        let steps = self.config.train.steps;
        if position.batches >= steps {
            let done = position.batches;
            let more = done.saturating_mul(2);
            let beyond = match done > steps {
                true => format!(" (the run is at step {done})"),
                false => String::new(),
            };
            say!("all {steps} steps are done{beyond}: --steps {more} goes on to step {more}");
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
            return error; // nothing may be written to a folder that replaced this one
        }
        self.write_trace(pipeline);
        if self.processes.are_several() && !error.is_of_all() {
            // The other processes cannot take part in a save.
            self.processes.fail(&error);
            let out = self.out.display();
            complain!(
                "gpipe: nothing was saved at the end; to continue from the last checkpoint, if \
                there is one: gpipe train --resume {out}"
            );
            return error;
        }
        match self.saving.leave(pipeline, position, &mut self.metrics, &self.progress) {
            Ok(()) => {
                let out = self.out.display();
                let skips = match is_of_training_image(&error) {
                    true => {
                        " --set images.on_unreadable=skip, which leaves the image out. Do not \
                        replace or remove the file: a run must keep its data"
                    }
                    false => "",
                };
                complain!(
                    "gpipe: the state after step {} is saved; to continue: gpipe train \
                    --resume {out}{skips}",
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
        let timeout = Duration::from_secs(self.config.pipeline.timeout_s);
        let ahead = LoaderSettings { timeout, depth: self.config.train.prefetch };
        let make_alone = move |number| {
            gpipe::compute_on_this_thread_alone();
            make(number)
        };
        let loader = Loader::start(position.batches..steps, ahead, make_alone)?;
        if due(self.config, position) {
            self.validate(pipeline, position)?; // an interrupted run left this validation out
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
                        metrics.not_finite(pipeline.steps(), samples, totals_of(position));
                    }
                }
            }
            let begin = Instant::now();
            let Asked { mut signal, save } = self.asked()?;
            if self.processes.are_several() {
                self.summary.exchanged(begin.elapsed());
            }
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
            } // the last step is saved after the final validation, which may make it the best
        }
        Ok(())
    }

    /// Warns about images that were left out since the last call.
    pub(super) fn tell_unreadable(&mut self) {
        let all = self.task.unreadable();
        let new: Vec<_> =
            all.into_iter().filter(|(name, _)| self.told.insert(name.clone())).collect();
        tell_unreadable(&new);
    }

    /// The current requests to any of the run's processes.
    pub(super) fn asked(&self) -> Result<Asked, CliError> {
        Asked { signal: self.stop.asked(), save: self.saving.is_time() }.of_all(self.processes)
    }

    fn stop(&self, signal: Option<i32>, position: &TrainPosition) -> Result<(), CliError> {
        match signal {
            Some(signal) if position.batches < self.config.train.steps => {
                let (signal_name, step) = (name(signal).to_owned(), position.batches);
                Err(CliError::Interrupted { signal, signal_name, step })
            }
            _ => Ok(()), // the end of the run is just as near
        }
    }

    /// Records a step.
    fn step(
        &mut self,
        report: &StepReport,
        samples: u64,
        position: &TrainPosition,
        waited: Duration,
    ) {
        self.nan_in_a_row = 0;
        if let Some(metrics) = &mut self.metrics {
            metrics.step(report, samples, totals_of(position), waited);
        }
        self.progress.step(position.batches, report);
        self.summary.add(report, waited);
    }

    /// Decides whether to skip a failed step. Returns its error if it must end the run.
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

/// Whether a validation during the run is due and not done yet.
pub(super) fn due(config: &Config, position: &TrainPosition) -> bool {
    let (batches, every) = (position.batches, config.train.validate_every);
    let is_on_the_way = batches > 0 && batches < config.train.steps;
    is_on_the_way && every > 0 && batches.is_multiple_of(every) && !position.evaluated
}

fn totals_of(position: &TrainPosition) -> Totals {
    Totals { tokens: position.tokens, samples: position.samples }
}

/// Whether the loader could not read an image, which is of the data that a run must keep.
fn is_of_training_image(error: &CliError) -> bool {
    let CliError::Data(gpipe_data::Error::Loader { source, .. }) = error else { return false };
    matches!(source.downcast_ref(), Some(gpipe_data::Error::Image { .. }))
}
