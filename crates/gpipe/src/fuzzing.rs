//! Readers of what comes from other processes, for fuzzing: nothing that users need.

use gpipe_core::lower::{Topology, lower};

use crate::{pipeline, schedule::Schedule};

/// Reads a process's part of a step of two stages and two micro-batches.
///
/// # Errors
/// What is wrong with it.
pub fn share(bytes: &[u8]) -> Result<(), String> {
    let lists = Schedule::GPipe.actions(2, 2);
    let program = lower(&lists, &Topology::chain(2), 2).map_err(|error| error.to_string())?;
    pipeline::fuzzed(bytes, &program)
}
