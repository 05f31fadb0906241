//! Shares parameters out over replicas, so that each one keeps and updates a part of the optimizer
//! state (ZeRO stage 1: Rajbhandari et al. 2020, section 5.1).
//!
//! A parameter is never divided, because some optimizers see whole matrices.

use crate::units::Bytes;

/// The shard of each parameter, given the bytes of each one's state: the largest first, each to the
/// shard with the fewest bytes so far (Graham 1969). The largest shard has at most 4/3 of the bytes
/// that it has in the best division.
///
/// ```
/// use gpipe_core::{Bytes, shard::shards};
/// assert_eq!(shards(&[3, 5, 2, 4].map(Bytes), 2), [1, 0, 0, 1]);
/// ```
pub fn shards(bytes: &[Bytes], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(bytes[index])); // stable: equal ones stay in order
    // Shards beyond the number of parameters stay empty.
    let mut loads = vec![Bytes(0); count.clamp(1, bytes.len().max(1))];
    let mut found = vec![0; bytes.len()];
    for index in order {
        let least = (0..loads.len()).min_by_key(|&shard| loads[shard]).unwrap_or(0);
        loads[least] += bytes[index];
        found[index] = least;
    }
    found
}

/// The bytes of the largest shard.
pub fn largest(bytes: &[Bytes], count: usize) -> Bytes {
    if count <= 1 {
        return bytes.iter().copied().sum(); // the usual case, which a planner asks for often
    }
    let mut loads = vec![Bytes(0); count.min(bytes.len())];
    for (shard, &own) in shards(bytes, count).into_iter().zip(bytes) {
        loads[shard] += own;
    }
    loads.into_iter().max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splitmix::Stream;

    #[test]
    fn property_shards_are_balanced_and_depend_on_sizes_alone() {
        let mut random = Stream::new(7);
        for _ in 0..500 {
            let (parameters, count) = (random.below(30), 1 + random.below(5));
            let bytes: Vec<Bytes> =
                (0..parameters).map(|_| Bytes(random.below(1000) as u64)).collect();
            let found = shards(&bytes, count);
            assert_eq!(found, shards(&bytes, count));
            assert!(found.len() == parameters && found.iter().all(|&shard| shard < count));
            // Graham's bound: at most the mean, and one parameter.
            let (sum, most) = (bytes.iter().map(|own| own.0).sum::<u64>(), bytes.iter().max());
            let bound = sum.div_ceil(count as u64) + most.map_or(0, |own| own.0);
            assert!(largest(&bytes, count).0 <= bound, "{bytes:?} in {count}");
            // The order of the parameters does not change the largest shard.
            let mut sorted = bytes.clone();
            sorted.sort();
            assert_eq!(largest(&bytes, count), largest(&sorted, count));
        }
        assert_eq!(largest(&[], 3), Bytes(0));
        assert_eq!(largest(&[Bytes(2), Bytes(3)], 1), Bytes(5));
    }
}
