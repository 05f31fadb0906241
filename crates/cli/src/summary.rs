//! The table at the end of a run: where the time went.

use std::time::Duration;

use gpipe::{Bytes, StepReport};

use crate::output::say;

/// Sums over a run.
#[derive(Default)]
pub(crate) struct Summary {
    steps: u64,
    skipped: u64,
    /// What a target is called, and how many there were.
    unit: &'static str,
    targets: f64,
    step_ms: f64,
    /// Waiting for batches, between the steps.
    data_wait_ms: f64,
    /// Validating on the way, between the steps.
    validation_ms: f64,
    stages: Vec<StageSums>,
}

/// Sums of one stage.
#[derive(Default, Clone)]
struct StageSums {
    /// Forward, recompute, backward, optimizer, wait.
    parts_ms: [f64; 5],
    peak: u64,
    sent: u64,
}

const PARTS: [&str; 5] = ["forward", "recompute", "backward", "optimizer", "wait"];

impl Summary {
    /// Nothing yet; targets are called `unit`.
    pub(crate) fn new(unit: &'static str) -> Self {
        Self { unit, ..Self::default() }
    }

    pub(crate) fn add(&mut self, report: &StepReport, data_wait: Duration) {
        self.steps += 1;
        self.skipped += u64::from(report.skipped);
        self.targets += report.count;
        self.step_ms += report.time.as_ms();
        self.data_wait_ms += data_wait.as_secs_f64() * 1e3;
        self.stages.resize(report.stages.len(), StageSums::default());
        for (sums, stage) in self.stages.iter_mut().zip(&report.stages) {
            let parts =
                [stage.forward, stage.recompute, stage.backward, stage.optimizer, stage.wait];
            for (sum, part) in sums.parts_ms.iter_mut().zip(parts) {
                *sum += part.as_ms();
            }
            sums.peak = sums.peak.max(stage.peak.0);
            sums.sent += stage.sent.0;
        }
    }

    pub(crate) fn validated(&mut self, time: Duration) {
        self.validation_ms += time.as_secs_f64() * 1e3;
    }

    /// The share of devices x steps in which a device was not busy: what its `wait` sums up to.
    fn bubble(&self) -> f64 {
        let waits: f64 = self.stages.iter().map(|stage| stage.parts_ms[4]).sum();
        waits / (self.step_ms * self.stages.len().max(1) as f64)
    }

    /// The table; `elapsed_ms` is the whole run's, in which training stood still for checkpoints.
    pub(crate) fn print(&self, elapsed_ms: f64, saving: Duration) {
        if self.steps == 0 {
            return;
        }
        let steps = self.steps as f64;
        let saving_ms = saving.as_secs_f64() * 1e3;
        let unit = self.unit;
        say!(
            "trained {} steps, {:.0} {unit}s in {:.1} s: {:.1} ms/step, {:.0} {unit}s/s, bubble {:.1}%",
            self.steps,
            self.targets,
            elapsed_ms / 1e3,
            self.step_ms / steps,
            self.targets / (elapsed_ms / 1e3),
            100.0 * self.bubble()
        );
        if self.skipped > 0 {
            say!("{} steps were skipped because float16 gradients overflowed", self.skipped);
        }
        say!("where the time went, ms per step (% of the step):");
        let heads: Vec<String> = PARTS.iter().map(|part| format!("{part:>15}")).collect();
        say!("stage{}   peak memory   sent per step", heads.concat());
        for (number, stage) in self.stages.iter().enumerate() {
            let cells: Vec<String> = stage
                .parts_ms
                .iter()
                .map(|ms| format!("{:>9.1} ({:>2.0}%)", ms / steps, 100.0 * ms / self.step_ms))
                .collect();
            say!(
                "{number:>5}{}   {:>11}   {:>13}",
                cells.concat(),
                Bytes(stage.peak).to_string(),
                Bytes(stage.sent / self.steps.max(1)).to_string()
            );
        }
        let rest = elapsed_ms - self.step_ms - self.data_wait_ms - self.validation_ms - saving_ms;
        say!(
            "of {:.1} s: in steps {:.1}%, waiting for batches {:.1}%, validating {:.1}%, waiting for checkpoints {:.1}%, the rest {:.1}%",
            elapsed_ms / 1e3,
            100.0 * self.step_ms / elapsed_ms,
            100.0 * self.data_wait_ms / elapsed_ms,
            100.0 * self.validation_ms / elapsed_ms,
            100.0 * saving_ms / elapsed_ms,
            100.0 * rest.max(0.0) / elapsed_ms
        );
    }
}
