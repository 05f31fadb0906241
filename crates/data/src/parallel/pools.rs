//! Groups pairs of similar lengths and cuts them into mini-batches.
//!
//! Padding is wasted work, so the pairs of a mini-batch should have similar lengths. Sorting a
//! whole epoch would achieve this, but the model would see long sentences for an hour and short
//! ones for the next. Fixed buckets by length leave remainders, which are state. A pool is in
//! between: the pairs of several mini-batches are sorted and cut, and the mini-batches are
//! shuffled.
//!
//! ```text
//!   drawn     de 7:5   is 3:4   de 9:8   zu 3:2   is 8:9   de 4:4 ...      source : target tokens
//!   sorted    zu 3:2   is 3:4   de 4:4   de 7:5 | de 9:8   is 8:9 ...      by the longer side
//!   cut                          4 rows x 5 = 20 | 2 rows x 9 = 18 ...     similar padded targets
//! ```
//!
//! Pairs are sorted by the longer side, not by the target. Sources of targets of one length differ
//! by a third, and the longest of several hundred by far more. With lengths like those of
//! sentences, this order makes padding a fifth of a mini-batch's tokens instead of a half.

use super::PairSet;

/// A pair of a pool. The derived order of the fields is the order in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Drawn {
    /// Length of the longer side, in tokens.
    longer: usize,
    /// Length of the target, in tokens.
    pub(super) target: usize,
    pub(super) source: usize,
    /// Index of the language in the set.
    pub(super) language: usize,
    pub(super) pair: usize,
}

/// Pairs of a set, sorted by the lengths of their longer sides.
pub(super) fn sorted(set: &PairSet, pairs: impl Iterator<Item = (usize, usize)>) -> Vec<Drawn> {
    let drawn = |(language, pair)| {
        let (source, target) = (set.source(language, pair).len(), set.target(language, pair).len());
        Drawn { longer: source.max(target), target, source, language, pair }
    };
    let mut pool: Vec<Drawn> = pairs.map(drawn).collect();
    pool.sort_unstable(); // Equal elements are the same pair.
    pool
}

/// Lengths of the longest source and of the longest target, in tokens.
pub(super) fn longest(pairs: &[Drawn]) -> (usize, usize) {
    let source = pairs.iter().map(|pair| pair.source).max();
    let target = pairs.iter().map(|pair| pair.target).max();
    (source.unwrap_or(0), target.unwrap_or(0))
}

/// Cuts pairs greedily into runs of at most `target_tokens`, padding included. A longer pair gets a
/// separate run.
pub(super) fn pack(pool: &[Drawn], target_tokens: usize) -> Vec<&[Drawn]> {
    let mut runs = Vec::new();
    let (mut run, mut longest, mut rest) = (0usize, 0, pool);
    for pair in pool {
        longest = pair.target.max(longest);
        if run > 0 && (run + 1).saturating_mul(longest) > target_tokens {
            let (full, after) = rest.split_at_checked(run).unwrap_or((rest, &[]));
            runs.push(full);
            (run, longest, rest) = (0, pair.target, after);
        }
        run += 1;
    }
    if run > 0 {
        runs.push(rest);
    }
    runs
}

/// Cuts pairs into `batches` runs and minimizes the padded target tokens of the largest run. There
/// must be at least `batches` pairs.
pub(super) fn cut(pool: &[Drawn], batches: usize) -> Vec<&[Drawn]> {
    // Finds the smallest sufficient limit by bisection, because a greater limit never makes more
    // runs.
    let (mut least, mut enough) = (0, padded(pool));
    while least < enough {
        let middle = least + (enough - least) / 2;
        if pack(pool, middle).len() <= batches {
            enough = middle;
        } else {
            least = middle + 1;
        }
    }
    let mut runs = pack(pool, enough);
    while runs.len() < batches {
        halve_largest(&mut runs);
    }
    runs
}

/// Number of target tokens, padding included.
fn padded(run: &[Drawn]) -> usize {
    run.len().saturating_mul(longest(run).1)
}

/// Halves the run with the most padded target tokens among those of at least two pairs.
fn halve_largest(runs: &mut Vec<&[Drawn]>) {
    let tokens = |at: &usize| runs.get(*at).filter(|run| run.len() > 1).map(|run| padded(run));
    let largest = (0..runs.len()).max_by_key(tokens).unwrap_or(0);
    let run = runs.get(largest).copied().unwrap_or_default();
    let (first, second) = run.split_at_checked(run.len() / 2).unwrap_or((run, &[]));
    runs.splice(largest..(largest + 1).min(runs.len()), [first, second]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    fn pool(lengths: Vec<(usize, usize)>) -> Vec<Drawn> {
        let drawn = |(pair, (source, target)): (usize, (usize, usize))| Drawn {
            longer: source.max(target),
            target,
            source,
            language: 0,
            pair,
        };
        let mut pool: Vec<Drawn> = lengths.into_iter().enumerate().map(drawn).collect();
        pool.sort_unstable();
        pool
    }

    /// The smallest possible size of the largest of `batches` runs, by trying all cuts.
    fn best(pool: &[Drawn], batches: usize) -> usize {
        if batches == 1 {
            return padded(pool);
        }
        let first = 1..=pool.len() + 1 - batches;
        first.map(|at| padded(&pool[..at]).max(best(&pool[at..], batches - 1))).min().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(23),
            failure_persistence: None,
            ..ProptestConfig::with_cases(300)
        })]

        #[test]
        fn oracle_the_largest_run_is_as_small_as_can_be(
            lengths in prop::collection::vec((1usize..12, 1usize..12), 1..13), batches in 1usize..6,
        ) {
            prop_assume!(batches <= lengths.len());
            let pool = pool(lengths);
            let runs = cut(&pool, batches);
            prop_assert_eq!(runs.len(), batches);
            prop_assert!(runs.iter().all(|run| !run.is_empty()));
            prop_assert_eq!(runs.concat(), pool.clone());
            let largest = runs.iter().map(|run| padded(run)).max();
            prop_assert_eq!(largest, Some(best(&pool, batches)));
        }

        #[test]
        fn property_runs_are_as_long_as_they_may_be(
            lengths in prop::collection::vec((1usize..40, 1usize..40), 0..60), limit in 0usize..100,
        ) {
            let pool = pool(lengths);
            let runs = pack(&pool, limit);
            prop_assert_eq!(runs.concat(), pool.clone());
            for (run, next) in runs.iter().zip(runs.iter().skip(1)) {
                let longest = longest(run).1.max(next[0].target);
                prop_assert!((run.len() + 1) * longest > limit);
            }
            prop_assert!(runs.iter().all(|run| run.len() == 1 || padded(run) <= limit));
        }

        #[test]
        fn property_runs_of_a_large_pool_are_nearly_equal(
            lengths in prop::collection::vec((1usize..60, 1usize..60), 1500..2000),
        ) {
            let pool = pool(lengths);
            let tokens: Vec<usize> = cut(&pool, 32).into_iter().map(padded).collect();
            let (least, most) = (tokens.iter().min().unwrap(), tokens.iter().max().unwrap());
            prop_assert!(least * 2 > *most, "{:?}", tokens);
        }
    }

    #[test]
    fn oracle_a_pool_by_hand() {
        // Three targets of 2, two of 3 and one of 6: each run has 6 target tokens.
        let pool = pool(vec![(3, 3), (1, 2), (2, 6), (2, 2), (3, 2), (1, 2)]);
        let order: Vec<usize> = pool.iter().map(|pair| pair.pair).collect();
        assert_eq!(order, [1, 5, 3, 4, 0, 2]);
        let runs: Vec<usize> = cut(&pool, 3).into_iter().map(<[Drawn]>::len).collect();
        assert_eq!(runs, [3, 2, 1]);
    }
}
