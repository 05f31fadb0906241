//! Links: bounded queues between stages.
//!
//! A wait on a link ends with a message, with a free slot, with a failure, or at the deadline. The
//! runtime's hot path waits nowhere else.
//!
//! A message is moved, never copied. Slots carry times, so on a virtual clock a full link delays
//! its sender exactly as `gpipe_core::simulate` does.

use std::{
    collections::{HashMap, VecDeque},
    sync::PoisonError,
    time::Duration,
};

use gpipe_core::{Direction, EdgeId, MicroBatch, Nanos, lower::Program};

use crate::{
    stage::{Verdict, Vote},
    sync::{Condvar, Mutex, MutexGuard},
};

/// What moves on a link.
#[derive(Debug)]
pub enum Message<V> {
    /// Activations, gradients, tied gradients or their sums.
    Value(V),
    /// A stage's part of the global gradient norm.
    Vote(Vote),
    /// The decision on the update.
    Verdict(Verdict),
}

/// A message in a link's queue.
#[derive(Debug)]
pub struct Queued<V> {
    /// The message's micro-batch, if it has one; the receiver checks it.
    pub micro_batch: Option<MicroBatch>,
    /// When the message can be received.
    pub arrival: Nanos,
    /// The message.
    pub message: Message<V>,
}

/// Why a wait ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitEnd {
    /// A worker or another process failed.
    Poisoned,
    /// `patience` returned false.
    Expired,
}

/// A bounded queue: one direction of one edge.
#[derive(Debug)]
pub struct Link<V> {
    state: Mutex<State<V>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<V> {
    queue: VecDeque<Queued<V>>,
    /// The free slots, each with the time at which it became free.
    free: VecDeque<Nanos>,
    /// When the last message leaves the link.
    busy_until: Nanos,
    poisoned: bool,
}

impl<V> Link<V> {
    /// Creates a link that holds at most `capacity` messages.
    pub fn new(capacity: usize) -> Self {
        let state = State {
            queue: VecDeque::with_capacity(capacity),
            free: VecDeque::from(vec![Nanos(0); capacity]),
            busy_until: Nanos(0),
            poisoned: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free slot, takes it, and returns when it became free. Every `slice`, `patience`
    /// decides whether to keep waiting.
    ///
    /// # Errors
    /// [`WaitEnd`]
    pub fn reserve(
        &self,
        slice: Duration,
        patience: impl FnMut() -> bool,
    ) -> Result<Nanos, WaitEnd> {
        self.wait(slice, patience, |state| state.free.pop_front())
    }

    /// Puts a message in the slot that [`Link::reserve`] took. `arrival` receives the time until
    /// which earlier messages occupy the link. It returns the time until which this message
    /// occupies the link, and the time at which it can be received.
    pub fn put(
        &self,
        micro_batch: Option<MicroBatch>,
        message: Message<V>,
        arrival: impl FnOnce(Nanos) -> (Nanos, Nanos),
    ) {
        let mut state = self.lock();
        let (busy_until, arrival) = arrival(state.busy_until);
        state.busy_until = busy_until;
        state.queue.push_back(Queued { micro_batch, arrival, message });
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the next message and takes it. Its slot stays occupied until [`Link::release`].
    ///
    /// # Errors
    /// [`WaitEnd`]
    pub fn take(
        &self,
        slice: Duration,
        patience: impl FnMut() -> bool,
    ) -> Result<Queued<V>, WaitEnd> {
        self.wait(slice, patience, |state| state.queue.pop_front())
    }

    /// Frees the slot of a message that was taken, at the given time.
    pub fn release(&self, at: Nanos) {
        self.lock().free.push_back(at);
        self.changed.notify_all();
    }

    /// Ends every current and future wait on this link.
    pub fn poison(&self) {
        self.lock().poisoned = true;
        self.changed.notify_all();
    }

    fn wait<T>(
        &self,
        slice: Duration,
        mut patience: impl FnMut() -> bool,
        mut ready: impl FnMut(&mut State<V>) -> Option<T>,
    ) -> Result<T, WaitEnd> {
        let mut state = self.lock();
        loop {
            if state.poisoned {
                return Err(WaitEnd::Poisoned);
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            let waited = self.changed.wait_timeout(state, slice);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() && !patience() {
                return Err(WaitEnd::Expired);
            }
        }
    }
}

/// All links of one step. Each step makes new ones, so nothing of a failed step remains in them.
#[derive(Debug)]
pub struct Links<V> {
    links: HashMap<(EdgeId, Direction), Link<V>>,
}

impl<V> Links<V> {
    /// Creates a link for each direction of each edge of `program`; `capacity` gives how many
    /// messages it holds.
    pub fn new(program: &Program, capacity: impl Fn(EdgeId, Direction) -> usize) -> Self {
        let halves = (0..program.topology.edges.len()).flat_map(|edge| {
            let edge = EdgeId::from_index(edge);
            [(edge, Direction::Forward), (edge, Direction::Backward)]
        });
        let link = |(edge, direction)| ((edge, direction), Link::new(capacity(edge, direction)));
        Self { links: halves.map(link).collect() }
    }

    /// The link for one direction of an edge.
    pub fn get(&self, edge: EdgeId, direction: Direction) -> Option<&Link<V>> {
        self.links.get(&(edge, direction))
    }

    /// Ends every current and future wait on every link.
    pub fn poison(&self) {
        self.links.values().for_each(Link::poison);
    }
}
