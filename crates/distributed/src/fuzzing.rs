//! Readers of what comes from other processes, for fuzzing: nothing that users need.

use crate::{facts as told, wire};

/// Reads a header, and makes the tensors that it tells of where they are small; too short ones are filled with zeros.
///
/// # Errors
/// What is wrong with it.
pub fn header(bytes: &[u8]) -> Result<(), String> {
    wire::fuzzed(bytes)
}

/// Headers of some messages, to start from.
///
/// # Errors
/// None is known.
pub fn headers() -> Result<Vec<Vec<u8>>, String> {
    wire::samples()
}

/// Reads facts; written again they read as the same.
pub fn facts(bytes: &[u8]) -> bool {
    let facts = told::decode(bytes);
    told::decode(&told::encode(&facts)) == facts
}
