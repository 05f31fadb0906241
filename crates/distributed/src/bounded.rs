//! Calls that may wait for ever, with a deadline.
//!
//! c10d's calls to a store wait for its answer without one: a server that was stopped, or that is
//! no store, holds its callers. So each call of a meeting runs on a thread of its own, which is
//! left behind where it does not end.

use std::{
    sync::mpsc::{RecvTimeoutError, sync_channel},
    time::{Duration, Instant},
};

use gpipe::processes::PeerError;

/// How often somebody looks whether another process has failed meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Why a call has no result.
#[derive(Debug)]
pub(crate) enum GaveUp {
    /// It did not end in time.
    Late,
    /// Another process failed meanwhile, or was found to be silent.
    Failed(PeerError),
    /// The system has no thread for it.
    NoThread(std::io::Error),
}

/// The result of `call`, for which nobody waits longer than `longest`, nor once something has
/// `failed`.
pub(crate) fn within<T: Send + 'static>(
    longest: Duration,
    failed: impl Fn() -> Option<PeerError>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GaveUp> {
    let (done, result) = sync_channel(1);
    let run = move || {
        // Whoever asked may have given up.
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
    #![allow(clippy::unwrap_used)] // tests may panic

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
