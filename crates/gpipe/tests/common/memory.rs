//! Tensor memory of the whole process.

use gpipe_bridge::memory::{ARENAS, stats};

/// Bytes of live tensors, in all arenas.
pub fn live() -> u64 {
    (0..ARENAS).map(|arena| stats(arena).unwrap().live).sum()
}
