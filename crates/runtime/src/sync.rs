//! The synchronization primitives of links and failures: those of std or, under `--cfg loom`, those
//! of loom, which tries every interleaving (`tests/interleavings.rs`).

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool};
