//! Interruptible waits for c10d work: another thread aborts all of them after a failure, and those
//! that last too long.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpipe_bridge::c10d::{Error, Work};

/// Longest wait that only a standstill ends.
const WAIT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// All pending waits of a process.
#[derive(Default)]
pub(crate) struct Interrupt {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    interrupted: bool,
    next: u64,
    waiting: HashMap<u64, Waiting>,
    /// What else ends when the run fails.
    ends: Vec<Box<dyn Fn() + Send>>,
}

/// A wait that is under way.
struct Waiting {
    work: Work,
    since: Instant,
    /// The longest standstill, if that ends the wait.
    longest: Option<Duration>,
    /// Whether a standstill has ended it.
    stood_still: bool,
}

/// What ends a wait that nothing else ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Longest {
    /// So much time.
    Wait(Duration),
    /// So much time in which no device of any process came on. A step may take longer.
    Standstill(Duration),
}

impl Interrupt {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `work`, at most `longest`.
    pub(crate) fn wait(&self, work: &Work, longest: Longest) -> Result<(), Error> {
        let (wait, standstill) = match longest {
            Longest::Wait(longest) => (longest, None),
            // c10d itself would break the connection after the time that it is told to wait.
            Longest::Standstill(longest) => (WAIT_MAX, Some(longest)),
        };
        let number = {
            let mut state = self.lock();
            if state.interrupted {
                // Aborted, because the work is dropped without a wait and must no longer write to
                // its buffer.
                let _ = work.abort();
                return Err(interrupted());
            }
            state.next += 1;
            let number = state.next;
            let (work, since) = (work.clone(), Instant::now());
            let own = Waiting { work, since, longest: standstill, stood_still: false };
            state.waiting.insert(number, own);
            number
        };
        let done = work.wait(wait);
        let own = self.lock().waiting.remove(&number);
        match (done, own) {
            (Err(error), Some(Waiting { stood_still: true, since, .. })) => Err(Error {
                message: format!(
                    "no device came on in {:.1?}; raise the timeout if its work takes longer",
                    since.elapsed()
                ),
                ..error
            }),
            (done, _) => done,
        }
    }

    /// Ends the waits that a standstill ends. `moved`: how long ago a device last came on.
    pub(crate) fn end_standstills(&self, moved: Duration) {
        let mut ended = Vec::new();
        for own in self.lock().waiting.values_mut() {
            let longest = own.longest.unwrap_or(Duration::MAX);
            if !own.stood_still && own.since.elapsed().min(moved) > longest {
                own.stood_still = true;
                ended.push(own.work.clone());
            }
        }
        for work in ended {
            let _ = work.abort();
        }
    }

    /// Calls `end` when the run fails, on a thread of its own.
    pub(crate) fn and_end(&self, end: impl Fn() + Send + 'static) {
        let mut state = self.lock();
        if state.interrupted {
            drop(state);
            let ending = std::thread::Builder::new().name("gpipe-end".into());
            let _ = ending.spawn(end);
            return;
        }
        state.ends.push(Box::new(end));
    }

    /// Whether the run has failed.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.lock().interrupted
    }

    /// Ends every current and future wait.
    pub(crate) fn interrupt(&self) {
        let (waiting, ends): (Vec<Work>, Vec<_>) = {
            let mut state = self.lock();
            state.interrupted = true;
            (
                state.waiting.values().map(|own| own.work.clone()).collect(),
                std::mem::take(&mut state.ends),
            )
        };
        for work in waiting {
            let _ = work.abort();
        }
        // They may wait for a GPU that hangs, and nothing waits for them.
        let ending = std::thread::Builder::new().name("gpipe-end".into());
        let _ = ending.spawn(move || ends.into_iter().for_each(|end| end()));
    }
}

fn interrupted() -> Error {
    Error {
        operation: "waiting for another process".into(),
        peer: None,
        message: "the run has failed".into(),
    }
}
