//! Batches made ahead of the step that uses them.
//!
//! ```text
//!   thread     make 0 | make 1 | make 2 | (full: waits) | make 3 ...
//!   queue                0        0 1      0 1             1 2          at most `depth` batches, in order
//!   caller                                  takes 0: step 0 ....  takes 1: step 1 ...
//! ```
//!
//! A [`Loader`] changes when a batch is made, never which: it calls a function of the step, one
//! step after another, so that a run that is resumed at step 1000 starts a loader there and gets
//! what it would have got. The obvious design, several workers that race, would need a place to
//! sort their results, and making a batch of tokens costs far less than a step.
//!
//! Absent: what a batch is, and any knowledge of steps beyond their number.

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

/// How far ahead, and how long to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderSettings {
    /// Batches in the queue at most, 1 to [`LOADER_DEPTH_MAX`]. One more is being made.
    pub depth: usize,
    /// Longest wait for one batch, and for the thread to end when the loader is dropped.
    pub deadline: Duration,
}

impl Default for LoaderSettings {
    /// 2 batches, 5 minutes.
    fn default() -> Self {
        Self { depth: 2, deadline: Duration::from_secs(300) }
    }
}

/// A batch that a [`Loader`] made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded<T> {
    /// The step that it is for.
    pub step: u64,
    /// What the function gave for that step.
    pub batch: T,
    /// How long the caller waited for it: 0 where it was there already.
    pub waited: Duration,
}

/// Calls a function of the step on a thread of its own, ahead of who iterates.
///
/// Gives one item per step, in order. The first error, which names its step, is the last item. The
/// thread waits without a deadline for room in the queue, because a step may take as long as it
/// likes; dropping the loader ends that wait and the thread.
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
    /// None after the last item.
    queue: Option<Receiver<Result<T>>>,
    /// None once it is known to have ended, or to be stuck.
    thread: Option<Thread>,
}

/// The thread, and a channel that closes at its end: a join has no deadline.
struct Thread {
    handle: JoinHandle<()>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Loader<T> {
    /// Starts making the batches of `steps`.
    ///
    /// # Errors
    /// A depth out of range; a system that gives no thread.
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

    /// The next batch from the queue, and how long that took.
    fn take(&mut self, step: u64) -> Result<(T, Duration)> {
        let gone = || Error::LoaderPanicked { step, reason: "its thread is gone".into() };
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        match queue.try_recv() {
            Ok(batch) => return Ok((batch?, Duration::ZERO)),
            Err(TryRecvError::Disconnected) => return Err(gone()),
            Err(TryRecvError::Empty) => {}
        }
        let start = Instant::now();
        match queue.recv_timeout(self.settings.deadline) {
            Ok(batch) => Ok((batch?, start.elapsed())),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                self.thread = None; // It is left alone: waiting for it once more would not help.
                Err(Error::LoaderLate { step, waited: self.settings.deadline })
            }
        }
    }
}

/// The thread's work: makes and hands over, until the last step, an error, or a loader that is
/// gone.
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
    /// Ends the thread, after the batch that it is making. One that is stuck for the deadline is
    /// left alone.
    fn drop(&mut self) {
        self.queue = None; // Without a receiver the thread's next hand-over fails, and it returns.
        if let Some(Thread { handle, ended }) = self.thread.take()
            && ended.recv_timeout(self.settings.deadline) == Err(RecvTimeoutError::Disconnected)
        {
            let _ = handle.join(); // Its panics were caught and handed over.
        }
    }
}

impl<T> Debug for Loader<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { steps, settings, .. } = self;
        f.debug_struct("Loader").field("steps", steps).field("settings", settings).finish()
    }
}
