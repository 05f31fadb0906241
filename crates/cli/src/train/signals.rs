//! SIGINT (Ctrl-C), SIGTERM and, unless it is ignored (`nohup`), SIGHUP: a terminal that closes.
//! Before the first step, a signal ends the run. After it, the first
//! signal makes the run save and stop, and the second ends it at once. The second is one that comes
//! a second later or more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use signal_hook::{
    iterator::Signals,
    low_level::{emulate_default_handler, signal_name},
};

use crate::{
    CliError,
    output::{complain, is_quiet},
    signals::ends,
};

/// Whether a run of this process has begun, which has something to save.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// A signal that follows the first one sooner than this is the same request.
const REPEAT: Duration = Duration::from_secs(1);

/// Until the run begins, says what a signal ends.
pub(crate) fn tell_before_the_first_step() -> Result<(), CliError> {
    watch(|signal| {
        if !HAS_BEGUN.load(Ordering::SeqCst) {
            complain!("gpipe: {}: ended before the first step: nothing was saved", name(signal));
            let _ = emulate_default_handler(signal); // ends the process
        }
    })
}

/// Calls `each` on a thread of its own for every signal, for the rest of the process.
fn watch(mut each: impl FnMut(i32) + Send + 'static) -> Result<(), CliError> {
    let failed = |source| CliError::Io { what: "signals".into(), source };
    let mut signals = Signals::new(ends()).map_err(failed)?;
    let all = move || signals.forever().for_each(&mut each);
    thread::Builder::new().name("gpipe-signals".into()).spawn(all).map_err(failed)?;
    Ok(())
}

/// A request to stop the run.
#[derive(Debug, Clone)]
pub(crate) struct Stop(Arc<AtomicI32>);

impl Stop {
    /// Handles the signals for the rest of the process.
    pub(crate) fn install() -> Result<Self, CliError> {
        let stop = Self(Arc::new(AtomicI32::new(0)));
        let asked = Arc::clone(&stop.0);
        // Of several replicas in one process, one says it.
        let is_quiet = is_quiet();
        let mut first = None::<Instant>;
        watch(move |signal| {
            if asked.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                // `timeout` and schedulers send a signal to the process and then to its group.
                if first.is_some_and(|first| first.elapsed() < REPEAT) {
                    return;
                }
                let _ = emulate_default_handler(signal); // ends the process
            }
            first = Some(Instant::now());
            if !is_quiet {
                complain!(
                    "gpipe: {}: saving after this step; a second signal ends the run at once, \
                    without saving",
                    name(signal)
                );
            }
        })?;
        HAS_BEGUN.store(true, Ordering::SeqCst);
        Ok(stop)
    }

    /// The signal that requested the stop, if any.
    pub(crate) fn asked(&self) -> Option<i32> {
        Some(self.0.load(Ordering::SeqCst)).filter(|&signal| signal != 0)
    }
}

/// The name of a signal.
pub(crate) fn name(signal: i32) -> &'static str {
    signal_name(signal).unwrap_or("a signal")
}
