//! When checkpoints are saved, what they record, and what is reported about them.

use std::time::{Duration, Instant};

use gpipe::{Bytes, Pipeline};
use gpipe_checkpoint::{
    Checkpoint, CheckpointError, Checkpoints, RunInfo, Saved, Settings,
    manifest::{Best, TrainPosition},
};

use super::start::Start;
use crate::{
    CliError,
    config::{Config, Every},
    faults,
    metrics::Metrics,
    processes::Processes,
    progress::Progress,
    run_folder::CHECKPOINTS,
    task::Vocabulary,
};

/// A run's checkpoints.
pub(super) struct Saving {
    /// `None` in a replica that does not save.
    checkpoints: Option<Checkpoints>,
    every: Every,
    keep_best: bool,
    config: String,
    /// Names and contents of the vocabulary's files.
    vocabulary: Vec<(String, Vec<u8>)>,
    best: Option<Best>,
    /// When the last save began, or the run.
    last: Instant,
    /// Position of the last checkpoint in the run's folder.
    at: Option<u64>,
    /// Time that training waited for checkpoints.
    pub blocked: Duration,
}

impl Saving {
    /// Checkpoints of a run that starts as `start`.
    pub(super) fn new(
        config: &Config,
        vocabulary: &Vocabulary,
        start: &Start,
        processes: &Processes,
    ) -> Result<Self, CliError> {
        let from = start.checkpoint.as_ref();
        let folder = start.out.path().join(CHECKPOINTS);
        let settings = Settings {
            keep: config.checkpoint.keep,
            keep_best: config.checkpoint.keep_best,
            timeout: Duration::from_secs(config.checkpoint.timeout_s),
            files: faults::files(),
        };
        let checkpoints = match processes.transport() {
            _ if !processes.saves() => None,
            None => Some(Checkpoints::open(&folder, settings)?),
            Some(transport) => Some(Checkpoints::open_among(&folder, settings, &transport)?),
        };
        // Only a checkpoint in this run's folder counts.
        let folder = folder.canonicalize().ok();
        let is_own = |from: &&Checkpoint| {
            from.folder().canonicalize().is_ok_and(|from| from.parent() == folder.as_deref())
        };
        Ok(Self {
            checkpoints,
            every: config.checkpoint.every,
            keep_best: config.checkpoint.keep_best,
            config: config.resolved().to_toml()?,
            vocabulary: vocabulary.files()?,
            best: start.best,
            last: Instant::now(),
            at: from.filter(is_own).map(|from| from.manifest().progress.batches),
            blocked: Duration::ZERO,
        })
    }

    /// Whether it is time to save, by this process's clock.
    pub(super) fn is_time(&self) -> bool {
        matches!(self.every, Every::Time(time) if self.last.elapsed() >= time)
    }

    /// Saves between two steps if a checkpoint is due or `is_time`, and reports the outcome of the
    /// last save.
    ///
    /// Returns whether all processes save. A failed write is reported and does not end the run.
    pub(super) fn step(
        &mut self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        is_time: bool,
        (metrics, progress): (&mut Option<Metrics>, &Progress),
    ) -> bool {
        let batches = position.batches;
        let is_best = self.keep_best && self.best.is_some_and(|best| best.batches == batches);
        let is_due = matches!(self.every, Every::Steps(steps) if batches.is_multiple_of(steps));
        let saves = is_time || is_due || is_best;
        let outcome = match saves {
            true => self.save(pipeline, position, metrics),
            false => self.checkpoints.as_mut().map_or(Ok(None), Checkpoints::poll),
        };
        tell(outcome, progress);
        saves
    }

    /// Records a validation's loss. The checkpoint with the lowest loss is the best.
    pub(super) fn validated(&mut self, batches: u64, loss: f64) {
        if loss.is_finite() && self.best.is_none_or(|best| loss < best.loss) {
            self.best = Some(Best { batches, loss });
        }
    }

    /// Begins to save, unless this position is saved already. Returns the outcome of the previous
    /// save, or an error if this one could not begin.
    fn save(
        &mut self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        metrics: &mut Option<Metrics>,
    ) -> Result<Option<Saved>, CheckpointError> {
        // Every replica takes part in a save, also one that writes nothing: its part of a sharded
        // optimizer's state may be wanted elsewhere.
        let is_saved = self.at == Some(position.batches);
        let Some(checkpoints) = self.checkpoints.as_mut().filter(|_| !is_saved) else {
            pipeline.share_state()?;
            return Ok(None);
        };
        let start = Instant::now();
        let records = metrics.as_mut().and_then(Metrics::records);
        let info = RunInfo {
            progress: TrainPosition { records, ..position.clone() },
            best: self.best,
            config: self.config.clone(),
            files: self.vocabulary.clone(),
        };
        let before = checkpoints.wait();
        self.last = Instant::now();
        checkpoints.save(pipeline, info)?;
        self.at = Some(position.batches);
        self.blocked += start.elapsed();
        before
    }

    /// Saves at the end of the run.
    pub(super) fn end(
        &mut self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        metrics: &mut Option<Metrics>,
        progress: &Progress,
    ) -> Result<(), CliError> {
        // If checkpoints are kept, the newest must not be behind the end, or the run would resume
        // from there.
        if self.every != Every::Never || self.keep_best || self.at.is_some() {
            self.leave(pipeline, position, metrics, progress)?;
        }
        Ok(())
    }

    /// Saves before the run ends for any reason. The state is on disk when this returns.
    pub(super) fn leave(
        &mut self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        metrics: &mut Option<Metrics>,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        if self.at != Some(position.batches) {
            let before = self.checkpoints.as_mut().map_or(Ok(None), Checkpoints::wait);
            tell(before, progress); // so that later messages are about this checkpoint
        }
        self.save(pipeline, position, metrics)?;
        let outcome = self.checkpoints.as_mut().map_or(Ok(None), Checkpoints::wait)?;
        tell(Ok(outcome), progress);
        Ok(())
    }
}

/// Reports the outcome of a save. A failed save does not end the run: the next one may succeed, and
/// the previous checkpoint still exists.
fn tell(outcome: Result<Option<Saved>, CheckpointError>, progress: &Progress) {
    match outcome {
        Ok(None) => {}
        Ok(Some(Saved { folder, batches, bytes, copied, written, untidy })) => {
            progress.say(&format!(
                "saved step {batches}: {} ({}; copied in {:.0} ms, written in {:.2} s meanwhile)",
                folder.display(),
                Bytes(bytes),
                1e3 * copied.as_secs_f64(),
                written.as_secs_f64()
            ));
            if let Some(reason) = untidy {
                progress.warn(&format!("the checkpoint is complete, but {reason}"));
            }
        }
        Err(error) => progress.warn(&format!(
            "a checkpoint was not saved: {error}; the run goes on, and tries again at the next one"
        )),
    }
}
