//! Metrics that a run writes as it trains: `metrics.jsonl` and TensorBoard's event file.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use gpipe::StepReport;
use gpipe_observe::{
    metrics::{self, Evaluation, Record, Stage, Step},
    tensorboard,
};

use crate::{CliError, output::complain};

/// File of a run's losses and times.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// Folder of TensorBoard's files, inside a run's folder.
const TENSORBOARD: &str = "tensorboard";

/// What a run has trained on so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub tokens: u64,
    pub samples: u64,
}

/// The open metrics files of a run.
///
/// A failed write, for example on a full disk, does not end the run. It is reported once, and later
/// records may succeed.
pub(crate) struct Metrics {
    lines: metrics::Writer,
    events: tensorboard::Writer,
    /// Number of step records in `metrics.jsonl`.
    records: u64,
    /// Number of records that could not be written, and the reason.
    lost: u64,
    reason: String,
}

impl Metrics {
    /// Creates `metrics.jsonl` and a file in `tensorboard/`, both in `folder`.
    pub(crate) fn create(folder: &Path) -> Result<Self, CliError> {
        let lines = metrics::Writer::create(&folder.join(METRICS))?;
        let (events, now) = (folder.join(TENSORBOARD), SystemTime::now());
        let events = match events.is_dir() {
            // The run starts over, so its earlier events are not part of the curve.
            true => tensorboard::Writer::resume(&events, now, 1)?,
            false => tensorboard::Writer::create(&events, now)?,
        };
        Ok(Self { lines, events, records: 0, lost: 0, reason: String::new() })
    }

    /// Reopens the files in `folder` and keeps the records that `keep` selects. `step` is written
    /// next.
    pub(crate) fn resume(
        folder: &Path,
        step: u64,
        mut keep: impl FnMut(&Record) -> bool,
    ) -> Result<Self, CliError> {
        let mut records = 0;
        let lines = metrics::Writer::resume(&folder.join(METRICS), |record| {
            let kept = keep(record);
            records += u64::from(kept && matches!(record, Record::Step(_)));
            kept
        })?;
        let (events, now) = (folder.join(TENSORBOARD), SystemTime::now());
        let events = tensorboard::Writer::resume(&events, now, step)?;
        Ok(Self { lines, events, records, lost: 0, reason: String::new() })
    }

    /// Syncs `metrics.jsonl` and returns its number of step records, which a checkpoint stores.
    /// `None` if the sync fails.
    ///
    /// The sync comes first because a checkpoint must not survive records that it counts.
    pub(crate) fn records(&mut self) -> Option<u64> {
        self.lines.sync().is_ok().then_some(self.records)
    }

    /// Records a step of `samples` samples. The loop waited `data_wait` for its batch, and `totals`
    /// include it.
    pub(crate) fn step(
        &mut self,
        report: &StepReport,
        samples: u64,
        totals: Totals,
        data_wait: Duration,
    ) {
        self.write(&Record::Step(step(report, samples, totals, data_wait)));
    }

    /// Records a skipped mini-batch of `samples` samples that was not finite. `step` is the last
    /// applied step.
    pub(crate) fn not_finite(&mut self, step: u64, samples: u64, totals: Totals) {
        self.write(&Record::Step(Step {
            step,
            skipped: true,
            simulated_gpus: gpipe::Device::gpus_are_simulated(),
            loss: f64::NAN,
            grad_norm: f64::NAN,
            // Zeros would be drawn as values.
            clip_scale: f64::NAN,
            lr: f64::NAN,
            tokens_per_s: f64::NAN,
            bubble: f64::NAN,
            samples,
            tokens_total: totals.tokens,
            samples_total: totals.samples,
            ..Step::default()
        }));
    }

    /// Records an evaluation.
    pub(crate) fn evaluation(&mut self, evaluation: Evaluation) {
        self.write(&Record::Evaluation(evaluation));
    }

    fn write(&mut self, record: &Record) {
        let lines = self.lines.write(record).map_err(|error| error.to_string());
        self.records += u64::from(lines.is_ok() && matches!(record, Record::Step(_)));
        // A skipped step has the number of the one before it, and would replace its point.
        let skipped = matches!(record, Record::Step(step) if step.skipped);
        let events = match skipped {
            true => Ok(()),
            false => {
                self.events.write(record, SystemTime::now()).map_err(|error| error.to_string())
            }
        };
        if let Err(reason) = lines.and(events) {
            if self.lost == 0 {
                complain!("gpipe: warning: {reason}; the run goes on");
            }
            (self.lost, self.reason) = (self.lost + 1, reason);
        }
    }

    /// Warns at the end about records that are missing.
    pub(crate) fn tell_lost(&self) {
        if self.lost > 0 {
            complain!("gpipe: warning: {} records were not written: {}", self.lost, self.reason);
        }
    }
}

fn step(report: &StepReport, samples: u64, totals: Totals, data_wait: Duration) -> Step {
    let stages = report.devices.iter().map(|stage| Stage {
        forward_ms: stage.forward.as_ms(),
        recompute_ms: stage.recompute.as_ms(),
        backward_ms: stage.backward.as_ms(),
        optimizer_ms: stage.optimizer.as_ms(),
        communication_ms: stage.communication.as_ms(),
        fill_drain_ms: stage.fill_drain.as_ms(),
        imbalance_ms: stage.imbalance.as_ms(),
        stalls_ms: stage.stalls.as_ms(),
        idle_ms: stage.wait.as_ms(),
        peak_bytes: stage.peak.0,
        sent_bytes: stage.sent.0,
        offloaded_bytes: stage.offloaded.0,
        offload_wait_ms: (stage.offloaded.0 > 0).then(|| stage.offload_wait.as_ms()),
    });
    Step {
        simulated_gpus: gpipe::Device::gpus_are_simulated(),
        step: report.step,
        skipped: report.skipped,
        loss: report.loss,
        tokens: report.count as u64,
        samples,
        tokens_total: totals.tokens,
        samples_total: totals.samples,
        tokens_per_s: report.count / (report.time.as_ms() / 1e3),
        step_ms: report.time.as_ms(),
        data_wait_ms: data_wait.as_secs_f64() * 1e3,
        lr: report.lr,
        grad_norm: report.grad_norm,
        clip_scale: report.clip_scale,
        loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
        bubble: report.bubble,
        metrics: report.metrics.iter().map(|m| (m.name.clone(), m.value())).collect(),
        stages: stages.collect(),
    }
}
