//! CPU memory with accounting, caps and reuse, in arenas: one for each stage.
//!
//! A block is charged to the arena that the allocating thread had entered, and credited to it
//! whichever thread frees it. Every tensor is counted. Memory that oneDNN and MKL allocate for
//! themselves is not.
//!
//! The feature `allocator` replaces libtorch's CPU allocator with this one, before `main` and for
//! the whole process. Without it no CPU memory is counted, capped or kept: see [`IS_COUNTED`].

use std::sync::{Mutex, PoisonError};

use crate::{Error, Result, ffi::bridged};

/// Number of arenas; a thread starts in arena 0.
pub const ARENAS: u32 = 4096;

/// Whether CPU memory is counted and can be capped: true with the feature `allocator`.
pub const IS_COUNTED: bool = cfg!(feature = "allocator");

/// Memory of an arena, in bytes of tensor payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Bytes that tensors hold now.
    pub live: u64,
    /// Highest `live` since the last [`reset_peak`].
    pub peak: u64,
    /// Bytes freed by tensors and kept for reuse; `live + kept` never exceeds the highest `live`
    /// since the last [`trim`].
    pub kept: u64,
}

/// Why an allocation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Requested bytes.
    pub requested: u64,
    /// Bytes live in the arena at that moment.
    pub live: u64,
    /// The arena's cap; `None` when the system itself had no memory left.
    pub cap: Option<u64>,
}

/// An arena with a single owner. Dropping it returns its kept blocks to the system; blocks still
/// live follow when they are freed. The arena can be acquired again once none of its blocks is
/// live.
#[derive(Debug)]
pub struct Arena(u32);

/// Arenas below `next` have been handed out; those in `returned` were given back.
struct Pool {
    next: u32,
    returned: Vec<u32>,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { next: 1, returned: Vec::new() });

impl Arena {
    /// Acquires an unused arena, without a cap.
    ///
    /// # Errors
    /// All arenas are in use.
    pub fn acquire() -> Result<Self> {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = |&arena: &u32| stats(arena).is_ok_and(|stats| stats.live == 0);
        let arena = match pool.returned.iter().position(empty) {
            Some(at) => pool.returned.swap_remove(at),
            None if pool.next < ARENAS => {
                pool.next += 1;
                pool.next - 1
            }
            None => return Err(Error(format!("all {ARENAS} memory arenas are in use"))),
        };
        trim(arena)?;
        reset_peak(arena)?;
        set_cap(arena, None)?;
        Ok(Self(arena))
    }

    /// The arena's number, for the functions of this module.
    pub fn id(&self) -> u32 {
        self.0
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Cannot fail for an existing arena.
        let _ = bridged::close_arena(self.0);
        POOL.lock().unwrap_or_else(PoisonError::into_inner).returned.push(self.0);
    }
}

/// Charges this thread's later allocations to `arena` (below [`ARENAS`]).
///
/// # Errors
/// The arena does not exist.
pub fn enter(arena: u32) -> Result<()> {
    Ok(bridged::enter_arena(arena)?)
}

/// Returns the memory statistics of `arena`.
///
/// # Errors
/// The arena does not exist.
pub fn stats(arena: u32) -> Result<Stats> {
    let bridged::MemoryStats { live, peak, kept } = bridged::arena_stats(arena)?;
    Ok(Stats { live, peak, kept })
}

/// Resets `peak` to what is live now.
///
/// # Errors
/// The arena does not exist.
pub fn reset_peak(arena: u32) -> Result<()> {
    Ok(bridged::reset_arena_peak(arena)?)
}

/// Sets the cap of `arena` in bytes (`None`: no cap). An allocation beyond it fails with libtorch's
/// out-of-memory error; [`take_refusal`] in the same thread then returns the details.
///
/// # Errors
/// The arena does not exist.
pub fn set_cap(arena: u32, bytes: Option<u64>) -> Result<()> {
    Ok(bridged::set_arena_cap(arena, bytes.unwrap_or(u64::MAX))?)
}

/// Returns the blocks that `arena` keeps for reuse to the system. What it may keep later is bounded
/// by the highest `live` from now on.
///
/// # Errors
/// The arena does not exist.
pub fn trim(arena: u32) -> Result<()> {
    Ok(bridged::trim_arena(arena)?)
}

/// Makes the C library keep freed memory for the rest of the process, instead of returning large
/// blocks to the system. Scratch memory of oneDNN and MKL, which does not come from the arenas,
/// then costs no page faults. This is a choice for a program, not for a library. Returns whether it
/// took effect.
pub fn keep_freed_memory() -> bool {
    bridged::keep_freed_memory()
}

/// Takes this thread's last refused allocation, if there was one since the last call.
pub fn take_refusal() -> Option<Refusal> {
    let refusal = bridged::take_refusal().ok()?;
    refusal.refused.then_some(Refusal {
        requested: refusal.requested,
        live: refusal.live,
        cap: (refusal.cap != u64::MAX).then_some(refusal.cap),
    })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    const MIB: i64 = 1 << 18; // float32 elements

    fn floats(elements: i64) -> std::result::Result<Tensor, tch::TchError> {
        Tensor::f_zeros([elements], (Kind::Float, Device::Cpu))
    }

    #[test]
    fn oracle_live_and_peak_bytes_are_exact() {
        let arena = Arena::acquire().unwrap();
        enter(arena.id()).unwrap();
        let (a, b) = (floats(MIB).unwrap(), floats(2 * MIB).unwrap());
        assert_eq!(stats(arena.id()).unwrap(), Stats { live: 3 << 20, peak: 3 << 20, kept: 0 });
        drop(a);
        assert_eq!(
            stats(arena.id()).unwrap(),
            Stats { live: 2 << 20, peak: 3 << 20, kept: 1 << 20 }
        );
        let again = floats(MIB).unwrap(); // reuses the kept block
        assert_eq!(stats(arena.id()).unwrap(), Stats { live: 3 << 20, peak: 3 << 20, kept: 0 });
        drop((again, b));
        reset_peak(arena.id()).unwrap();
        assert_eq!(stats(arena.id()).unwrap(), Stats { live: 0, peak: 0, kept: 3 << 20 });
        enter(0).unwrap();
    }

    #[test]
    fn property_a_block_returns_to_the_arena_it_came_from() {
        let arena = Arena::acquire().unwrap();
        enter(arena.id()).unwrap();
        let tensor = floats(MIB).unwrap();
        enter(0).unwrap();
        std::thread::spawn(move || drop(tensor)).join().unwrap();
        assert_eq!(stats(arena.id()).unwrap(), Stats { live: 0, peak: 1 << 20, kept: 1 << 20 });
        trim(arena.id()).unwrap();
        assert_eq!(stats(arena.id()).unwrap().kept, 0);
    }

    #[test]
    fn regression_a_dropped_arena_keeps_nothing_that_is_freed_after_it() {
        // A stage's arena was dropped before its parameters, and then kept all their memory.
        let arena = Arena::acquire().unwrap();
        let id = arena.id();
        enter(id).unwrap();
        let tensor = floats(MIB).unwrap();
        enter(0).unwrap();
        drop(arena);
        drop(tensor);
        let Stats { live, kept, .. } = stats(id).unwrap();
        assert_eq!((live, kept), (0, 0));
    }

    #[test]
    fn fault_what_the_system_refuses_raises_neither_peak_nor_bound() {
        let arena = Arena::acquire().unwrap();
        enter(arena.id()).unwrap();
        let before = stats(arena.id()).unwrap();
        let error = floats(1 << 50).unwrap_err().to_string();
        assert!(error.contains("the system has no"), "{error}");
        assert_eq!(stats(arena.id()).unwrap(), before);
        assert_eq!(take_refusal().and_then(|refusal| refusal.cap), None);
        enter(0).unwrap();
    }

    /// An allocation that the system refused restored the peak that it had seen before. That
    /// discarded a higher peak set by another thread in the meantime.
    #[test]
    fn regression_a_refusal_does_not_forget_another_threads_peak() {
        let arena = Arena::acquire().unwrap();
        let id = arena.id();
        let both = std::sync::Barrier::new(2);
        let found: Vec<Stats> = std::thread::scope(|scope| {
            scope.spawn(|| {
                enter(id).unwrap();
                for _ in 0..5000 {
                    both.wait();
                    drop(floats(1 << 50));
                    both.wait();
                }
            });
            enter(id).unwrap();
            let round = |_| {
                trim(id).unwrap();
                reset_peak(id).unwrap();
                both.wait();
                drop(floats(MIB).unwrap());
                both.wait();
                stats(id).unwrap()
            };
            (0..5000).map(round).collect()
        });
        enter(0).unwrap();
        // Asserted only here: a panic in the loop would leave the other thread blocked at the
        // barrier.
        let lost = found.iter().filter(|found| found.peak != 1 << 20).count();
        assert_eq!(lost, 0, "of {} rounds", found.len());
    }

    #[test]
    fn property_live_and_kept_never_exceed_the_highest_live() {
        let arena = Arena::acquire().unwrap();
        enter(arena.id()).unwrap();
        let mut highest = 0;
        for size in 1..40 {
            let tensors: Vec<_> =
                (0..3).map(|i| floats((size * 7919 + i * 104_729) % MIB + 1)).collect();
            highest = highest.max(stats(arena.id()).unwrap().live);
            drop(tensors);
            let Stats { live, kept, .. } = stats(arena.id()).unwrap();
            assert!(live + kept <= highest, "{live} + {kept} > {highest}");
        }
        enter(0).unwrap();
    }

    #[test]
    fn fault_over_the_cap_is_an_error_that_says_what_was_asked() {
        let arena = Arena::acquire().unwrap();
        set_cap(arena.id(), Some(5 << 20)).unwrap();
        enter(arena.id()).unwrap();
        let held = floats(4 * MIB).unwrap();
        let refused = floats(2 * MIB).unwrap_err().to_string();
        assert!(refused.contains("out of memory"), "{refused}");
        let expected = Refusal { requested: 2 << 20, live: 4 << 20, cap: Some(5 << 20) };
        assert_eq!((take_refusal(), take_refusal()), (Some(expected), None));
        drop(held);
        drop(floats(5 * MIB).unwrap());
        enter(0).unwrap();
        assert!(enter(ARENAS).is_err());
    }
}
