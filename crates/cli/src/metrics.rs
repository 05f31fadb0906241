//! What a run writes as it goes: from a step's report to `metrics.jsonl` and to TensorBoard's event file.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use gpipe::StepReport;
use gpipe_observe::{
    metrics::{self, Evaluation, Record, Stage, Step},
    tensorboard,
};

use crate::CliError;

/// What a run has trained on so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    pub tokens: u64,
    pub samples: u64,
}

/// The files, open for the length of a run.
pub(crate) struct Metrics {
    lines: metrics::Writer,
    events: tensorboard::Writer,
}

impl Metrics {
    /// Creates `metrics.jsonl` and a file in `tensorboard/`, both in `folder`.
    pub(crate) fn create(folder: &Path) -> Result<Self, CliError> {
        Ok(Self {
            lines: metrics::Writer::create(&folder.join("metrics.jsonl"))?,
            events: tensorboard::Writer::create(&folder.join("tensorboard"), SystemTime::now())?,
        })
    }

    /// After a step of `samples` samples, for whose batch the loop waited; `seen` counts them, too.
    pub(crate) fn step(
        &mut self,
        report: &StepReport,
        samples: u64,
        seen: Seen,
        data_wait: Duration,
    ) -> Result<(), CliError> {
        self.write(&Record::Step(step(report, samples, seen, data_wait)))
    }

    /// After an evaluation.
    pub(crate) fn evaluation(&mut self, evaluation: Evaluation) -> Result<(), CliError> {
        self.write(&Record::Evaluation(evaluation))
    }

    fn write(&mut self, record: &Record) -> Result<(), CliError> {
        self.lines.write(record)?;
        Ok(self.events.write(record, SystemTime::now())?)
    }
}

fn step(report: &StepReport, samples: u64, seen: Seen, data_wait: Duration) -> Step {
    let stages = report.stages.iter().map(|stage| Stage {
        forward_ms: stage.forward.as_ms(),
        recompute_ms: stage.recompute.as_ms(),
        backward_ms: stage.backward.as_ms(),
        optimizer_ms: stage.optimizer.as_ms(),
        wait_ms: stage.wait.as_ms(),
        peak_bytes: stage.peak.0,
        sent_bytes: stage.sent.0,
    });
    Step {
        step: report.step,
        skipped: report.skipped,
        loss: report.loss,
        tokens: report.count as u64,
        samples,
        tokens_total: seen.tokens,
        samples_total: seen.samples,
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

/// Adds the path to an error of the operating system.
pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CliError + use<> {
    let what = path.display().to_string();
    move |source| CliError::Io { what, source }
}
