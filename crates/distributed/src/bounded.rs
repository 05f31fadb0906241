//! Puts a deadline on calls that may block forever.
//!
//! c10d's store calls wait for an answer without a deadline. A server that was stopped, or that is
//! not a store at all, blocks its callers. So each call of a meeting runs on a separate thread, and
//! a call that does not return leaves its thread behind.

use std::{
    sync::mpsc::{RecvTimeoutError, sync_channel},
    time::{Duration, Instant},
};

use gpipe::processes::PeerError;

/// How often a waiting caller checks whether another process has failed.
const LOOK: Duration = Duration::from_millis(20);

/// Why a call has no result.
#[derive(Debug)]
pub(crate) enum GaveUp {
    /// It did not return in time.
    Late,
    /// Another process failed in the meantime, or was found to be silent.
    Failed(PeerError),
    /// The system could not start a thread for the call.
    NoThread(std::io::Error),
}

/// The error of a thread that could not be started.
pub(crate) fn no_thread(error: &std::io::Error) -> String {
    format!(
        "no thread to meet the other processes: {error}; raise the limit on threads (ulimit -u)"
    )
}

/// Runs `call` on a new thread and returns its result. Gives up after `longest`, or as soon as
/// `failed` returns an error.
pub(crate) fn within<T: Send + 'static>(
    longest: Duration,
    failed: impl Fn() -> Option<PeerError>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GaveUp> {
    let (done, result) = sync_channel(1);
    let run = move || {
        // The caller may have given up.
        let _ = done.send(call());
    };
    let thread = std::thread::Builder::new().name("gpipe-join".into()).spawn(run);
    thread.map_err(GaveUp::NoThread)?;
    let end = Instant::now() + longest;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match result.recv_timeout(left.min(LOOK)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(GaveUp::Late),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(failed) = failed() {
            return Err(GaveUp::Failed(failed));
        }
        if left.is_zero() {
            return Err(GaveUp::Late);
        }
    }
}

#[cfg(test)]
mod tests {
    // tests may panic
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn oracle_a_call_that_ends_gives_its_result() {
        assert_eq!(within(LONG, || None, || 7).unwrap(), 7);
    }

    #[test]
    fn fault_a_call_that_does_not_end_is_given_up() {
        let (hold, held) = sync_channel::<()>(0);
        let call = move || held.recv().is_ok();
        assert!(matches!(within(SHORT, || None, call), Err(GaveUp::Late)));
        drop(hold);
        let (hold, held) = sync_channel::<()>(0);
        let why = PeerError { process: Some(3), reason: "it was stopped".into() };
        let found = within(LONG, || Some(why.clone()), move || held.recv().is_ok());
        assert!(matches!(found, Err(GaveUp::Failed(found)) if found == why));
        drop(hold);
    }
}
