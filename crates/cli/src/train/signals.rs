//! SIGINT (Ctrl-C) and SIGTERM: the first signal makes the run save and stop, the second ends it at
//! once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    thread,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::{emulate_default_handler, signal_name},
};

use crate::{
    CliError,
    output::{complain, is_quiet},
};

/// A request to stop the run.
#[derive(Debug, Clone)]
pub(crate) struct Stop(Arc<AtomicI32>);

impl Stop {
    /// Handles both signals for the rest of the process.
    pub(crate) fn install() -> Result<Self, CliError> {
        let stop = Self(Arc::new(AtomicI32::new(0)));
        let failed = |source| CliError::Io { what: "signals".into(), source };
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed)?;
        let asked = Arc::clone(&stop.0);
        // Of several replicas in one process, one says it.
        let is_quiet = is_quiet();
        let watch = move || {
            for signal in signals.forever() {
                if asked.swap(signal, Ordering::SeqCst) != 0 {
                    let _ = emulate_default_handler(signal); // ends the process
                }
                if !is_quiet {
                    complain!(
                        "gpipe: {}: saving after this step; a second signal ends the run at once, \
                        without saving",
                        name(signal)
                    );
                }
            }
        };
        thread::Builder::new().name("gpipe-signals".into()).spawn(watch).map_err(failed)?;
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
