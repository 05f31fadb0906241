//! What links and failures wait and lock with: std's, or loom's under `--cfg loom`, which tries
//! every interleaving (`tests/interleavings.rs`).

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool};
