//! The tensors of the whole process.

use gpipe_bridge::memory::{ARENAS, stats};

/// Bytes of tensors that live, in whatever arena.
pub fn live() -> u64 {
    (0..ARENAS).map(|arena| stats(arena).unwrap().live).sum()
}
