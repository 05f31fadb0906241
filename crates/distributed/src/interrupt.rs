//! Interruptible waits for c10d work: after a failure another thread aborts every wait at once.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpipe_bridge::c10d::{Error, Work};

/// All pending waits of a process.
#[derive(Default)]
pub(crate) struct Interrupt {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    interrupted: bool,
    next: u64,
    waiting: HashMap<u64, Work>,
    /// What else ends when the run fails.
    ends: Vec<Box<dyn Fn() + Send>>,
}

impl Interrupt {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `work`, at most `longest`.
    pub(crate) fn wait(&self, work: &Work, longest: Duration) -> Result<(), Error> {
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
            state.waiting.insert(number, work.clone());
            number
        };
        let done = work.wait(longest);
        self.lock().waiting.remove(&number);
        done
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
            (state.waiting.values().cloned().collect(), std::mem::take(&mut state.ends))
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
