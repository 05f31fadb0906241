//! Readers of bytes from other processes, exposed for fuzzing only.

use gpipe_core::lower::{Topology, lower};

use crate::{pipeline, schedule::Schedule};

/// Reads a process's share of a step with two stages and two micro-batches.
///
/// # Errors
/// A description of what is wrong with the bytes.
pub fn share(bytes: &[u8]) -> Result<(), String> {
    let lists = Schedule::GPipe.actions(2, 2);
    let program = lower(&lists, &Topology::chain(2), 2).map_err(|error| error.to_string())?;
    pipeline::fuzzed(bytes, &program)
}
