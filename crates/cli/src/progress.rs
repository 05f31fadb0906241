//! Progress: a bar in a terminal, lines that stay, and signs of life elsewhere.
//!
//! - [`Progress`]: the steps of a training
//! - [`Work`]: everything else that takes time, such as reading and measuring

use std::{
    io::IsTerminal,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gpipe::StepReport;
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    numbers::{seconds, short, time},
    output::{complain, is_quiet, marked, prose},
};

/// About this many lines in a run, unless the user says how often.
const LINES: u64 = 12;
/// Without a terminal, a line appears at least this often, unless the user says how often.
const LINE_EVERY: Duration = Duration::from_secs(60);
/// Without a terminal, longer work tells how far it is this often.
const WORK_EVERY: Duration = Duration::from_secs(10);
/// How often a bar is drawn again while nothing is reported.
const TICK: Duration = Duration::from_millis(500);
/// Columns below which a bar leaves no room for words.
const NARROW: u16 = 60;

/// Whether this process draws bars.
fn draws() -> bool {
    !is_quiet() && std::io::stderr().is_terminal()
}

/// A bar of `all` whose last part takes what the width of the terminal leaves.
fn bar(all: u64, done: &str) -> ProgressBar {
    let bar = ProgressBar::new(all);
    let columns = terminal_size::terminal_size_of(std::io::stderr());
    let is_narrow = columns.is_some_and(|(terminal_size::Width(columns), _)| columns < NARROW);
    let drawn = if is_narrow { "" } else { "{bar:20} " };
    let template = marked(format_args!("{drawn}{done} [{{eta}}] {{wide_msg}}"));
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}

/// The progress of a training.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    /// Number of steps of the run.
    steps: u64,
    /// Number of steps between two lines.
    every: u64,
    /// Whether lines also follow the clock.
    by_clock: bool,
    /// Where and when this process began.
    begun: Option<(u64, Instant)>,
    /// When the last line was printed.
    last: Option<Instant>,
    /// The unit of targets, such as `token`.
    unit: &'static str,
    /// What the loss contains beside the cross entropy.
    includes: Option<&'static str>,
}

impl Progress {
    /// Progress of a run of `steps` steps, with a line every `log_every` steps; 0 chooses about a
    /// dozen lines. Targets are counted in `unit`s. The loss `includes` more than the cross
    /// entropy, perhaps.
    pub(crate) fn new(
        steps: u64,
        log_every: u64,
        unit: &'static str,
        includes: Option<&'static str>,
    ) -> Self {
        let bar = draws().then(|| bar(steps, "{pos}/{len}"));
        let every = if log_every == 0 { rounded(steps / LINES) } else { log_every };
        let by_clock = log_every == 0 && bar.is_none();
        Self { bar, steps, every, by_clock, begun: None, last: None, unit, includes }
    }

    /// Reports step number `step` of the run.
    pub(crate) fn step(&mut self, step: u64, report: &StepReport) {
        let now = Instant::now();
        let (first, begun) = *self.begun.get_or_insert((step, now));
        let message = self.message(report);
        if let Some(bar) = &self.bar {
            bar.set_message(message.clone());
            bar.set_position(step);
        }
        let is_late = self.by_clock && self.last.is_some_and(|last| last.elapsed() >= LINE_EVERY);
        let is_round = step == first || step == self.steps || step.is_multiple_of(self.every);
        if !(is_round || is_late) {
            return;
        }
        self.last = Some(now);
        // The first step also warms up, and its own time is not known here.
        let left = self.steps.saturating_sub(step) as f64;
        let each = now.duration_since(begun).as_secs_f64() / (step - first).max(1) as f64;
        let rest = match step > first && left > 0.0 {
            true => format!("  {} left", time(seconds(left * each))),
            false => String::new(),
        };
        self.say(&format!("step {step}/{}  {message}{rest}", self.steps));
    }

    fn message(&self, report: &StepReport) -> String {
        let (per_s, unit) = (report.count / (report.time.as_ms() / 1e3), self.unit);
        let includes = self.includes.map_or(String::new(), |what| format!(" with {what}"));
        let skipped = if report.skipped { "  skipped: float16 overflow" } else { "" };
        format!(
            "loss {:.3}{includes}  lr {:.1e}  grad {:.2}  {} {unit}s/s  bubble {:.0}%{skipped}",
            report.loss,
            report.lr,
            report.grad_norm,
            short(per_s),
            100.0 * report.bubble
        )
    }

    /// Begins `what` between two steps, which has `all` parts; 0 if their number is not known.
    pub(crate) fn between(&self, what: &str, all: u64) -> Work {
        match &self.bar {
            Some(bar) if !bar.is_finished() => {
                Work::shown(what.to_owned(), all, Shown::Beside(bar.clone()))
            }
            _ => Work::new(what, all),
        }
    }

    /// Prints a line between two steps.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) if !bar.is_finished() => bar.suspend(|| prose!("{line}")),
            _ => prose!("{line}"),
        }
    }

    /// Prints a warning to standard error.
    pub(crate) fn warn(&self, line: &str) {
        match &self.bar {
            Some(bar) if !bar.is_finished() => {
                bar.suspend(|| complain!("gpipe: warning: {line}"));
            }
            _ => complain!("gpipe: warning: {line}"),
        }
    }

    /// Ends the bar at the end of the run. The table that follows says more.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A round number of steps of about `steps`: 1, 2 or 5 times a power of ten.
fn rounded(steps: u64) -> u64 {
    let mut power = 1;
    while steps >= 10 * power {
        power *= 10;
    }
    let digit = match steps / power {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 5,
    };
    digit * power
}

/// The progress of work that may take long: a bar in a terminal, and elsewhere a line every ten
/// seconds. It also shows life while nothing is reported.
pub(crate) struct Work {
    what: String,
    /// Number of parts; 0 if it is not known.
    all: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    /// The part at work, if it has a name.
    part: Arc<Mutex<String>>,
    begun: Instant,
    shown: Shown,
}

/// Where the progress of work is shown.
enum Shown {
    Nowhere,
    Bar(ProgressBar),
    /// In the words beside the bar of a training.
    Beside(ProgressBar),
    /// In lines of a thread, until the sender is dropped.
    Lines(Sender<()>, JoinHandle<()>),
}

impl Work {
    /// Begins `what`, which has `all` parts, such as bytes; 0 if their number is not known.
    pub(crate) fn new(what: impl Into<String>, all: u64) -> Self {
        let mut work = Self::shown(what.into(), all, Shown::Nowhere);
        if draws() {
            let bar = bar(all, if all == 0 { "{elapsed}" } else { "{percent}%" });
            bar.set_message(work.what.clone());
            bar.enable_steady_tick(TICK);
            work.shown = Shown::Bar(bar);
        } else if !is_quiet() {
            let (sender, ended) = channel();
            let (what, all, begun) = (work.what.clone(), Arc::clone(&work.all), work.begun);
            let (done, part) = (Arc::clone(&work.done), Arc::clone(&work.part));
            let lines = move || {
                while ended.recv_timeout(WORK_EVERY) == Err(RecvTimeoutError::Timeout) {
                    let [done, all] = [&done, &all].map(|own| own.load(Ordering::Relaxed));
                    // Standard output may be a result that another program reads.
                    let part = part.lock().map_or(String::new(), |part| part.clone());
                    complain!("{what}: {}{part}", so_far(done, all, begun.elapsed()));
                }
            };
            // Without a thread there is no progress, and the work goes on.
            if let Ok(lines) = thread::Builder::new().name("gpipe-progress".into()).spawn(lines) {
                work.shown = Shown::Lines(sender, lines);
            }
        }
        work
    }

    fn shown(what: String, all: u64, shown: Shown) -> Self {
        let [done, all] = [0, all].map(|own| Arc::new(AtomicU64::new(own)));
        Self { what, all, done, part: Arc::default(), begun: Instant::now(), shown }
    }

    /// Reports that `done` parts are done.
    pub(crate) fn tell(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
        match &self.shown {
            Shown::Bar(bar) => bar.set_position(done),
            Shown::Beside(bar) => {
                let all = self.all.load(Ordering::Relaxed);
                let so_far = so_far(done, all, self.begun.elapsed());
                bar.set_message(format!("{}: {so_far}", self.what));
            }
            Shown::Nowhere | Shown::Lines(..) => {}
        }
    }

    /// Reports that of `all` parts `done` are done, and names the next one.
    pub(crate) fn next(&self, part: &str, done: u64, all: u64) {
        self.all.store(all, Ordering::Relaxed);
        self.tell(done);
        if let Shown::Bar(bar) = &self.shown {
            bar.set_length(all);
            bar.set_message(format!("{}: {part}", self.what));
        }
        if let Ok(mut own) = self.part.lock() {
            *own = format!(": {part}");
        }
    }

    /// Reports that one more part is done.
    pub(crate) fn advance(&self) {
        self.tell(self.done.load(Ordering::Relaxed) + 1);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.shown, Shown::Nowhere) {
            Shown::Bar(bar) => bar.finish_and_clear(),
            Shown::Lines(sender, lines) => {
                drop(sender);
                let _ = lines.join();
            }
            Shown::Nowhere | Shown::Beside(_) => {}
        }
    }
}

/// How far work is after `spent`.
fn so_far(done: u64, all: u64, spent: Duration) -> String {
    if done == 0 || done > all {
        return format!("{} so far", time(spent));
    }
    let left = spent.as_secs_f64() * (all - done) as f64 / done as f64;
    let left = time(seconds(left));
    format!("{:.0}%, about {left} left", 100.0 * done as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_a_run_has_about_a_dozen_lines_at_round_steps() {
        for steps in 1..5000 {
            let every = rounded(steps / LINES);
            let lines = steps / every;
            assert!(lines <= 24 && (steps < 12 || lines >= 6), "{steps}: every {every}");
            let text = every.to_string();
            assert!(text[1..].bytes().all(|c| c == b'0') && "125".contains(&text[..1]), "{text}");
        }
    }

    #[test]
    fn oracle_work_says_how_far_it_is() {
        let spent = Duration::from_secs(30);
        assert_eq!(so_far(0, 0, spent), "30 s so far");
        assert_eq!(so_far(0, 9, spent), "30 s so far");
        assert_eq!(so_far(1, 4, spent), "25%, about 90 s left");
        assert_eq!(so_far(4, 4, spent), "100%, about 0 s left");
    }
}
