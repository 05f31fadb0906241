//! Prefetches batches before the step that uses them.
//!
//! ```text
//!   thread     make 0 | make 1 | make 2 | (full: waits) | make 3 ...
//!   queue                0        0 1      0 1             1 2          at most `depth`, in order
//!   caller                                  takes 0: step 0 ....  takes 1: step 1 ...
//! ```
//!
//! A [`Loader`] changes when a batch is made, never which batch. It calls a function of the step,
//! one step after another. A run that resumes at step 1000 starts a loader there and gets the same
//! batches. The obvious design, several racing workers, would need to reorder their results, and
//! making a batch of tokens costs far less than a step.
//!
//! The loader knows nothing about batches, and about steps only their number.

pub use crate::bounds::LOADER_DEPTH_MAX;
use std::{
    any::Any,
    fmt::Debug,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, channel, sync_channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{Error, Result};

/// How far to prefetch, and how long to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderSettings {
    /// Maximum number of batches in the queue, 1 to [`LOADER_DEPTH_MAX`]. One more is being made.
    pub depth: usize,
    /// Timeout for one batch, and for the thread to end when the loader is dropped.
    pub timeout: Duration,
}

impl Default for LoaderSettings {
    /// A depth of 2 batches and a timeout of 5 minutes.
    fn default() -> Self {
        Self { depth: 2, timeout: Duration::from_secs(300) }
    }
}

/// A batch that a [`Loader`] made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded<T> {
    /// The step of the batch.
    pub step: u64,
    /// The function's result for that step.
    pub batch: T,
    /// How long the caller waited for the batch. 0 if it was ready.
    pub waited: Duration,
}

/// Calls a function of the step on a separate thread, ahead of the iterating caller.
///
/// The loader yields one item per step, in order. The first error, which names its step, is the
/// last item. The thread waits without a timeout for room in the queue, because a step may take
/// arbitrarily long. Dropping the loader ends that wait and the thread.
///
/// ```
/// use std::sync::Arc;
/// use gpipe_data::{Loader, LoaderSettings, TokenSet, TrainBatches};
///
/// # fn main() -> gpipe_data::Result<()> {
/// let tokens = Arc::new(TokenSet { tokens: (0..100).collect(), bytes: 100 });
/// let batches = TrainBatches::new(tokens, 8, 2, 42)?; // An Arc: the thread shares the tokens.
/// let ahead = batches.clone();
/// let loader = Loader::start(10..13, LoaderSettings::default(), move |step| {
///     Ok::<_, gpipe_data::Error>(ahead.batch(step))
/// })?;
/// for loaded in loader {
///     let loaded = loaded?;
///     assert_eq!(loaded.batch, batches.batch(loaded.step));
/// }
/// # Ok(())
/// # }
/// ```
pub struct Loader<T> {
    steps: Range<u64>,
    settings: LoaderSettings,
    /// `None` after the last item.
    queue: Option<Receiver<Result<T>>>,
    /// `None` once the thread is known to have ended, or to be stuck.
    thread: Option<Thread>,
}

/// The thread, with a channel that closes when it ends, because a join cannot time out.
struct Thread {
    handle: JoinHandle<()>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Loader<T> {
    /// Starts making the batches of `steps`.
    ///
    /// # Errors
    /// Fails if the depth is out of range, or if the system cannot start a thread.
    pub fn start<E>(
        steps: Range<u64>,
        settings: LoaderSettings,
        make: impl Fn(u64) -> Result<T, E> + Send + 'static,
    ) -> Result<Self>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if !(1..=LOADER_DEPTH_MAX).contains(&settings.depth) {
            return Err(Error::LoaderDepth { depth: settings.depth });
        }
        let (sender, queue) = sync_channel(settings.depth);
        let (alive, ended) = channel();
        let ahead = steps.clone();
        let body = move || {
            let _alive = alive;
            fill(ahead, &sender, make);
        };
        let thread = std::thread::Builder::new().name("gpipe-loader".into());
        let handle = thread.spawn(body).map_err(|source| Error::LoaderThread { source })?;
        Ok(Self { steps, settings, queue: Some(queue), thread: Some(Thread { handle, ended }) })
    }

    /// Takes the next batch from the queue, and returns how long that took.
    fn take(&mut self, step: u64) -> Result<(T, Duration)> {
        let gone = || Error::LoaderPanicked { step, reason: "its thread is gone".into() };
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        match queue.try_recv() {
            Ok(batch) => return Ok((batch?, Duration::ZERO)),
            Err(TryRecvError::Disconnected) => return Err(gone()),
            Err(TryRecvError::Empty) => {}
        }
        let start = Instant::now();
        match queue.recv_timeout(self.settings.timeout) {
            Ok(batch) => Ok((batch?, start.elapsed())),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                self.thread = None; // The thread is abandoned: waiting once more would not help.
                Err(Error::LoaderLate { step, waited: self.settings.timeout })
            }
        }
    }
}

/// The thread's body: makes and sends batches until the last step, an error, or a dropped loader.
fn fill<T, E>(steps: Range<u64>, queue: &SyncSender<Result<T>>, make: impl Fn(u64) -> Result<T, E>)
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    for step in steps {
        let made = match catch_unwind(AssertUnwindSafe(|| make(step))) {
            Ok(made) => made.map_err(|error| Error::Loader { step, source: error.into() }),
            Err(panic) => Err(Error::LoaderPanicked { step, reason: message(panic.as_ref()) }),
        };
        let is_last = made.is_err();
        if queue.send(made).is_err() || is_last {
            return;
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it gave no message".to_owned())
}

impl<T: Send + 'static> Iterator for Loader<T> {
    type Item = Result<Loaded<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.queue.as_ref()?;
        let Some(step) = self.steps.next() else {
            self.queue = None;
            return None;
        };
        let taken = self.take(step);
        if taken.is_err() {
            self.queue = None;
        }
        Some(taken.map(|(batch, waited)| Loaded { step, batch, waited }))
    }
}

impl<T> Drop for Loader<T> {
    /// Ends the thread after the batch that it is making. A thread that is stuck beyond the timeout
    /// is abandoned.
    fn drop(&mut self) {
        self.queue = None; // The thread's next send fails without a receiver, and it returns.
        if let Some(Thread { handle, ended }) = self.thread.take()
            && ended.recv_timeout(self.settings.timeout) == Err(RecvTimeoutError::Disconnected)
        {
            let _ = handle.join(); // Its panics were caught and sent.
        }
    }
}

impl<T> Debug for Loader<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { steps, settings, .. } = self;
        f.debug_struct("Loader").field("steps", steps).field("settings", settings).finish()
    }
}
