//! `metrics.jsonl`: one line per step.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    time::Duration,
};

use gpipe::StepReport;
use serde::Serialize;

use crate::CliError;

/// A line of `metrics.jsonl`.
#[derive(Debug, Serialize)]
struct Line {
    step: u64,
    loss: f64,
    tokens: f64,
    tokens_per_s: f64,
    step_ms: f64,
    /// Waiting for the batch, before the step.
    data_wait_ms: f64,
    lr: f64,
    grad_norm: f64,
    bubble: f64,
    stages: Vec<StageLine>,
}

#[derive(Debug, Serialize)]
struct StageLine {
    busy_ms: f64,
    recompute_ms: f64,
    wait_ms: f64,
    optimizer_ms: f64,
    peak_bytes: u64,
    sent_bytes: u64,
}

/// The file, open for the length of a run.
pub(crate) struct Metrics {
    file: BufWriter<File>,
}

impl Metrics {
    /// Creates `path`.
    pub(crate) fn create(path: &Path) -> Result<Self, CliError> {
        let file = File::create(path).map_err(io(path))?;
        Ok(Self { file: BufWriter::new(file) })
    }

    /// Appends one step's line, and hands it to the system.
    pub(crate) fn write(
        &mut self,
        report: &StepReport,
        lr: f64,
        data_wait: Duration,
    ) -> Result<(), CliError> {
        let stages = report.stages.iter().map(|stage| StageLine {
            busy_ms: stage.busy().as_ms(),
            recompute_ms: stage.recompute.as_ms(),
            wait_ms: stage.wait.as_ms(),
            optimizer_ms: stage.optimizer.as_ms(),
            peak_bytes: stage.peak.0,
            sent_bytes: stage.sent.0,
        });
        let line = Line {
            step: report.step,
            loss: report.loss,
            tokens: report.count,
            tokens_per_s: report.count / (report.time.as_ms() / 1e3),
            step_ms: report.time.as_ms(),
            data_wait_ms: data_wait.as_secs_f64() * 1e3,
            lr,
            grad_norm: report.grad_norm,
            bubble: report.bubble,
            stages: stages.collect(),
        };
        let write = |file: &mut BufWriter<File>| {
            serde_json::to_writer(&mut *file, &line)?;
            file.write_all(b"\n")?;
            file.flush()
        };
        write(&mut self.file).map_err(io(Path::new("metrics.jsonl")))
    }
}

/// Adds the path to an error of the operating system.
pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CliError + use<> {
    let what = path.display().to_string();
    move |source| CliError::Io { what, source }
}
