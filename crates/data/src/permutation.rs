//! A pseudo-random permutation of `0..len` that is computed, not stored.
//!
//! A Feistel network permutes `0..4^k`, the smallest such range that contains `len`. A value
//! outside `0..len` is permuted again until it lands inside ("cycle walking": Black and Rogaway,
//! "Ciphers with arbitrary finite domains", 2002, section 3). The value must land, because its
//! cycle returns to its start. Landing takes fewer than 4 steps on average, because the range is
//! less than 4 times `len` (except for a `len` of 1).
//!
//! The obvious design, Fisher-Yates over a list, needs 8 bytes for each window, a new list for each
//! epoch, and state behind a function that should have none.

use crate::hash::mix;

/// Four rounds make a random-looking permutation from random-looking round functions (Luby and
/// Rackoff, 1988). Here the halves are small, so there are two more rounds.
const ROUNDS: u64 = 6;

/// A permutation of `0..len`, chosen by a key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// Creates a permutation. `len` must be 1 to 2^62.
    pub(crate) fn new(len: u64, key: u64) -> Self {
        let bits = len.max(2).next_power_of_two().trailing_zeros();
        Self { len, half_bits: bits.div_ceil(2), key }
    }

    /// The image of `index`, which must be less than `len`.
    pub(crate) fn at(&self, index: u64) -> u64 {
        let mut value = self.feistel(index);
        while value >= self.len {
            value = self.feistel(value);
        }
        value
    }

    /// A bijection on `0..4^half_bits`. Each round swaps the halves and adds to one half a value
    /// that depends only on the other, so each round can be inverted.
    fn feistel(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let scrambled = mix(self.key ^ mix((round << 32) ^ right)) & mask;
            (left, right) = (right, left ^ scrambled);
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(11),
            failure_persistence: None,
            ..ProptestConfig::with_cases(100)
        })]

        #[test]
        fn property_a_permutation_hits_everything_once(len in 1u64..3000, key: u64) {
            let permutation = Permutation::new(len, key);
            let mut hit: Vec<u64> = (0..len).map(|i| permutation.at(i)).collect();
            hit.sort_unstable();
            prop_assert!(hit.into_iter().eq(0..len));
        }
    }

    #[test]
    fn property_keys_shuffle_differently_and_neighbours_part() {
        let of = |key| {
            let permutation = Permutation::new(1000, key);
            (0..1000).map(|i| permutation.at(i)).collect::<Vec<_>>()
        };
        let (a, b) = (of(1), of(2));
        let same_place = a.iter().zip(&b).filter(|(a, b)| a == b).count();
        let still_neighbours = a.windows(2).filter(|w| w[0] + 1 == w[1]).count();
        // Both counts are Poisson with mean 1 for random permutations.
        assert!(same_place < 8, "{same_place}");
        assert!(still_neighbours < 8, "{still_neighbours}");
    }

    #[test]
    fn regression_large_ranges_stay_in_range() {
        let len = (1 << 40) + 1;
        let permutation = Permutation::new(len, 3);
        assert!((0..1000).all(|i| permutation.at(len - 1 - i) < len));
    }
}
