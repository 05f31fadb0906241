//! Entry points for fuzzing: the readers of data from other processes. Users do not need them.

use gpipe_bridge::memory::{self, Arena};
use gpipe_core::Bytes;

use crate::{facts as told, wire};

/// Size of the message whose header is read.
const MOST: Bytes = Bytes(64 << 10);
/// Allowance for what the allocator adds when it rounds up the sizes of a header's tensors.
const ROUNDING: Bytes = Bytes(64 << 10);

/// The outcome of reading a header.
#[derive(Debug)]
pub struct Read {
    /// What is wrong with the header, if anything.
    pub result: Result<(), String>,
    /// Size of an allocation that exceeded what a message of this size may take, if there was one.
    pub beyond: Option<u64>,
}

/// Reads a header and creates all tensors that it describes. Short input is padded with zeros.
///
/// # Errors
/// This build cannot count the memory of tensors.
pub fn header(bytes: &[u8]) -> Result<Read, gpipe_bridge::Error> {
    let arena = Arena::acquire()?;
    memory::enter(arena.id())?;
    memory::set_cap(arena.id(), Some((MOST + ROUNDING).0))?;
    let result = wire::fuzzed(bytes, MOST);
    let beyond = memory::take_refusal().map(|refusal| refusal.requested);
    memory::enter(0)?;
    Ok(Read { result, beyond })
}

/// Sample headers, as a corpus to start from.
///
/// # Errors
/// No cause is known.
pub fn headers() -> Result<Vec<Vec<u8>>, String> {
    wire::samples()
}

/// Reads facts, and returns whether they survive encoding and decoding.
pub fn facts(bytes: &[u8]) -> bool {
    let facts = told::decode(bytes);
    told::decode(&told::encode(&facts)) == facts
}
