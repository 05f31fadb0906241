//! SplitMix64 (Steele, Lea & Flood 2014): random numbers that depend only on their key.
//!
//! gpipe never draws from a stateful generator where order could matter. The k-th number under a
//! key is a pure function of both, so the number of stages, threads or micro-batches cannot change
//! it.

/// Scrambles 64 bits: a bijection in which every input bit changes every output bit with
/// probability close to one half.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(MULTIPLIERS[0]);
    z = (z ^ (z >> 27)).wrapping_mul(MULTIPLIERS[1]);
    z ^ (z >> 31)
}

/// The multipliers of [`mix`], for code that implements it with other arithmetic.
pub const MULTIPLIERS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// The distance between two keys of [`at`]: 2^64 divided by the golden ratio.
pub const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Combines several parts, in order, into one key.
///
/// ```
/// use gpipe_core::splitmix::key;
/// assert_ne!(key(&[1, 2]), key(&[2, 1]));
/// ```
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0x0067_7069_7065, |hash, &part| {
        mix(mix(part.wrapping_add(GAMMA)) ^ hash.wrapping_mul(GAMMA))
    })
}

/// The number at position `index` of the stream that `key` names.
pub fn at(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(GAMMA.wrapping_mul(index.wrapping_add(1))))
}

/// A stream that is read in sequence, for callers with only one order.
#[derive(Debug, Clone)]
pub struct Stream {
    key: u64,
    next: u64,
}

impl Stream {
    /// The stream that `key` names, from its beginning.
    pub fn new(key: u64) -> Self {
        Self { key, next: 0 }
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.next += 1;
        at(self.key, self.next - 1)
    }

    /// A number below `bound`, which must not be 0. The bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }
}
