//! Readers of what comes from other processes, for fuzzing: nothing that users need.

use gpipe_bridge::memory::{self, Arena};
use gpipe_core::Bytes;

use crate::{facts as told, wire};

/// Most bytes of the message whose header is read.
const MOST: Bytes = Bytes(64 << 10);
/// What an allocator rounds up, for each of a header's tensors.
const ROUNDING: Bytes = Bytes(64 << 10);

/// What reading a header came to.
#[derive(Debug)]
pub struct Read {
    /// What is wrong with it.
    pub result: Result<(), String>,
    /// Bytes of memory for tensors that were asked for beyond what a message of its size may take.
    pub beyond: Option<u64>,
}

/// Reads a header, and makes all the tensors that it tells of; too short ones are filled with
/// zeros.
///
/// # Errors
/// The memory of tensors cannot be counted here.
pub fn header(bytes: &[u8]) -> Result<Read, gpipe_bridge::Error> {
    let arena = Arena::acquire()?;
    memory::enter(arena.id())?;
    memory::set_cap(arena.id(), Some((MOST + ROUNDING).0))?;
    let result = wire::fuzzed(bytes, MOST);
    let beyond = memory::take_refusal().map(|refusal| refusal.requested);
    memory::enter(0)?;
    Ok(Read { result, beyond })
}

/// Headers of some messages, to start from.
///
/// # Errors
/// None is known.
pub fn headers() -> Result<Vec<Vec<u8>>, String> {
    wire::samples()
}

/// Reads facts; whether they read as the same once they are written again.
pub fn facts(bytes: &[u8]) -> bool {
    let facts = told::decode(bytes);
    told::decode(&told::encode(&facts)) == facts
}
