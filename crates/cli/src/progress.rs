//! The progress of reading files and of training: a progress bar in a terminal, plain lines
//! elsewhere.

use std::{
    io::IsTerminal,
    path::Path,
    time::{Duration, Instant},
};

use gpipe::StepReport;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{complain, is_quiet, marked, say};

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A progress bar or plain lines.
pub(crate) struct Progress {
    shown: Shown,
    /// The unit of targets, such as `token`.
    unit: &'static str,
}

enum Shown {
    /// A bar, in a terminal.
    Bar(ProgressBar),
    /// Plain lines, elsewhere.
    Lines {
        /// Number of steps of the run.
        steps: u64,
        /// When the last line was printed.
        last: Option<Instant>,
    },
}

impl Progress {
    /// Progress of a run of `steps` steps, whose targets are counted in `unit`s.
    pub(crate) fn new(steps: u64, unit: &'static str) -> Self {
        if is_quiet() || !std::io::stderr().is_terminal() {
            return Self { shown: Shown::Lines { steps, last: None }, unit };
        }
        let bar = ProgressBar::new(steps);
        let template = "{bar:30} {pos}/{len} {msg} [{elapsed} < {eta}]";
        if let Ok(style) = ProgressStyle::with_template(&marked(format_args!("{template}"))) {
            bar.set_style(style);
        }
        Self { shown: Shown::Bar(bar), unit }
    }

    /// Reports step number `step` of the run.
    pub(crate) fn step(&mut self, step: u64, report: &StepReport) {
        let (per_s, unit) = (report.count / (report.time.as_ms() / 1e3), self.unit);
        let skipped = if report.skipped { "  skipped: float16 overflow" } else { "" };
        let message = format!(
            "loss {:.3}  {per_s:.0} {unit}s/s  bubble {:.0}%{skipped}",
            report.loss,
            100.0 * report.bubble
        );
        match &mut self.shown {
            Shown::Bar(bar) => {
                bar.set_message(message);
                bar.set_position(step);
            }
            Shown::Lines { steps, last } => {
                let due = last.is_none_or(|last| last.elapsed() >= LINE_EVERY);
                if due || step == *steps {
                    *last = Some(Instant::now());
                    say!("step {step}/{steps}  {message}");
                }
            }
        }
    }

    /// Prints a line between two steps.
    pub(crate) fn say(&self, line: &str) {
        match &self.shown {
            Shown::Bar(bar) if !bar.is_finished() => bar.suspend(|| say!("{line}")),
            _ => say!("{line}"),
        }
    }

    /// Prints a warning to standard error.
    pub(crate) fn warn(&self, line: &str) {
        match &self.shown {
            Shown::Bar(bar) if !bar.is_finished() => {
                bar.suspend(|| complain!("gpipe: warning: {line}"));
            }
            _ => complain!("gpipe: warning: {line}"),
        }
    }

    /// Ends the bar at the end of the run. The table that follows says more.
    pub(crate) fn finish(&self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

/// Progress of reading a file.
pub(crate) struct Reading {
    name: String,
    bytes: u64,
    begun: Instant,
    bar: Option<ProgressBar>,
    /// When the last line was printed.
    last: Instant,
}

impl Reading {
    /// Starts the progress of a file of `bytes` bytes.
    pub(crate) fn new(path: &Path, bytes: u64) -> Self {
        let name = path.display().to_string();
        let bar = (!is_quiet() && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(bytes).with_message(name.clone());
            let template = "{msg}  {bar:30} {bytes}/{total_bytes} [{elapsed} < {eta}]";
            if let Ok(style) = ProgressStyle::with_template(&marked(format_args!("{template}"))) {
                bar.set_style(style);
            }
            bar
        });
        let now = Instant::now();
        Self { name, bytes, begun: now, bar, last: now }
    }

    /// Reports that `done` bytes were read.
    pub(crate) fn tell(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.last.elapsed() >= LINE_EVERY {
            self.last = Instant::now();
            let spent = self.begun.elapsed().as_secs_f64();
            let left = spent * self.bytes.saturating_sub(done) as f64 / done.max(1) as f64;
            let percent = 100.0 * done as f64 / self.bytes.max(1) as f64;
            say!("{}: {percent:.0}% read, about {left:.0} s left", self.name);
        }
    }

    /// Removes the progress bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
