//! Closures for the stages of a pool, sent without a borrow of the pool.

use std::sync::{Arc, Weak, mpsc};

use crate::{stage::StageExecutor, worker::Command};

/// Sends closures to the stages of a pool and waits for no answer. It does not keep the pool's
/// threads: after the pool is gone it does nothing.
pub struct Errands<E: StageExecutor> {
    workers: Vec<Weak<mpsc::Sender<Command<E>>>>,
}

impl<E: StageExecutor> Errands<E> {
    pub(super) fn new<'w>(
        workers: impl Iterator<Item = &'w Arc<mpsc::Sender<Command<E>>>>,
    ) -> Self {
        Self { workers: workers.map(Arc::downgrade).collect() }
    }

    /// Calls a visitor with the stages of each device, in the device's thread, after what it was
    /// told before.
    pub fn send_all<F>(&self, mut visitor: impl FnMut() -> F)
    where
        F: FnOnce(&mut [E]) + Send + 'static,
    {
        for commands in self.workers.iter().filter_map(Weak::upgrade) {
            // A thread that is gone has nothing left to visit.
            let _ = commands.send(Command::Visit(Box::new(visitor())));
        }
    }
}
