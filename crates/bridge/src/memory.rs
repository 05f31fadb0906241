//! Counted, capped and reused CPU memory, in arenas: one for each stage.
//!
//! A block is charged to the arena that its thread had entered when it was allocated, and is credited
//! there whichever thread frees it. It sees every tensor; it does not see what oneDNN and MKL allocate
//! for themselves.

use crate::{Result, ffi::bridged};

/// Number of arenas; arena 0 is where a thread starts.
pub const ARENAS: u32 = 1024;

/// What an arena holds, in bytes of tensor payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Held by tensors now.
    pub live: u64,
    /// Most held at once since the last [`reset_peak`].
    pub peak: u64,
    /// Freed by tensors and kept for reuse; `live + kept` never exceeds the arena's highest `live`.
    pub kept: u64,
}

/// Why an allocation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes live in the arena at that moment.
    pub live: u64,
    /// The arena's cap; `None` when the system itself had no memory left.
    pub cap: Option<u64>,
}

/// Charges this thread's later allocations to `arena` (below [`ARENAS`]).
///
/// # Errors
/// An arena that does not exist.
pub fn enter(arena: u32) -> Result<()> {
    Ok(bridged::enter_arena(arena)?)
}

/// What `arena` holds now.
///
/// # Errors
/// An arena that does not exist.
pub fn stats(arena: u32) -> Result<Stats> {
    let bridged::MemoryStats { live, peak, kept } = bridged::arena_stats(arena)?;
    Ok(Stats { live, peak, kept })
}

/// Starts a new measurement of `peak` from what is live now.
///
/// # Errors
/// An arena that does not exist.
pub fn reset_peak(arena: u32) -> Result<()> {
    Ok(bridged::reset_arena_peak(arena)?)
}

/// Lets `arena` hold at most `bytes` (`None`: no cap). An allocation over it fails with libtorch's
/// out-of-memory error, and [`take_refusal`] in the same thread says what was asked.
///
/// # Errors
/// An arena that does not exist.
pub fn set_cap(arena: u32, bytes: Option<u64>) -> Result<()> {
    Ok(bridged::set_arena_cap(arena, bytes.unwrap_or(u64::MAX))?)
}

/// Gives the blocks that `arena` keeps for reuse back to the system.
///
/// # Errors
/// An arena that does not exist.
pub fn trim(arena: u32) -> Result<()> {
    Ok(bridged::trim_arena(arena)?)
}

/// This thread's last refused allocation, if there was one since the last call.
pub fn take_refusal() -> Option<Refusal> {
    let refusal = bridged::take_refusal().ok()?;
    refusal.refused.then_some(Refusal {
        requested: refusal.requested,
        live: refusal.live,
        cap: (refusal.cap != u64::MAX).then_some(refusal.cap),
    })
}
