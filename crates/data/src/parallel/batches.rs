//! Mini-batches of pairs for training, by number.

use std::ops::Deref;

use gpipe_core::splitmix;

use super::mixture::Mixture;
use super::pools::{Drawn, cut, longest, sorted};
use super::{PairError, PairSet};
use crate::permutation::Permutation;
use crate::{BATCH_TOKENS_MAX, IGNORE, Result};

/// Stream number that separates the order of a pool's mini-batches from other uses of the seed.
const MINI_BATCHES_STREAM: u64 = 6;

/// Mini-batches per pool. With lengths like those of sentences (log-normal), padding adds a quarter
/// more tokens with 16 mini-batches, a fifth with 32 and a sixth with 64. A larger pool takes
/// longer, and the pool is rebuilt for each mini-batch. With 32 this takes about 3 ms for 2,000
/// target tokens, less than a hundredth of the training step.
const POOL_BATCHES: u64 = 32;

/// A mini-batch of pairs in rows, padded to the longest row.
///
/// Rows are sorted by source length, so the rows of a micro-batch differ less in length than those
/// of the mini-batch. Padding common to all rows of a micro-batch can then be cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairBatch {
    /// Input of the encoder: tag, tokens, end, padding. Shape: `[samples, source_length]`.
    pub sources: Vec<i64>,
    /// Length of the longest source, in tokens.
    pub source_length: usize,
    /// Input of the decoder: begin, tokens, padding. Shape: `[samples, target_length]`.
    pub inputs: Vec<i64>,
    /// Expected output of the decoder: tokens, end, then [`IGNORE`]. Shape:
    /// `[samples, target_length]`.
    pub targets: Vec<i64>,
    /// Length of the longest target, in tokens.
    pub target_length: usize,
    /// Number of rows.
    pub samples: usize,
    /// Index of each row's language in the set. Shape: `[samples]`.
    pub languages: Vec<usize>,
}

impl PairBatch {
    /// Puts pairs into rows, shortest source first, then shortest target.
    pub(super) fn new(set: &PairSet, pairs: &[Drawn]) -> Self {
        let mut rows = pairs.to_vec();
        rows.sort_unstable_by_key(|row| (row.source, row.target, row.language, row.pair));
        let (source_length, target_length) = longest(&rows);
        let mut batch = Self {
            sources: Vec::with_capacity(rows.len() * source_length),
            source_length,
            inputs: Vec::with_capacity(rows.len() * target_length),
            targets: Vec::with_capacity(rows.len() * target_length),
            target_length,
            samples: 0,
            languages: rows.iter().map(|row| row.language).collect(),
        };
        for row in &rows {
            batch.push(set, row);
        }
        batch
    }

    fn push(&mut self, set: &PairSet, row: &Drawn) {
        let ids = |tokens: &[u32]| tokens.iter().map(|token| i64::from(*token)).collect::<Vec<_>>();
        let source = ids(set.source(row.language, row.pair));
        let target = ids(set.target(row.language, row.pair));
        let known = target.split_last().map_or(&[][..], |(_end, known)| known);
        let pad = i64::from(set.pad());
        self.samples += 1;
        self.sources.extend(source);
        self.sources.resize(self.samples * self.source_length, pad);
        self.inputs.push(i64::from(set.begin()));
        self.inputs.extend(known);
        self.inputs.resize(self.samples * self.target_length, pad);
        self.targets.extend(&target);
        self.targets.resize(self.samples * self.target_length, IGNORE);
    }

    /// Number of targets that count, which are those that are not padding.
    pub fn target_tokens(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORE).count()
    }
}

/// Rejects a mini-batch that would not fit in memory.
pub(super) fn check_shape(rows: usize, source_length: usize, target_length: usize) -> Result<()> {
    let tokens = source_length.checked_add(target_length).and_then(|both| both.checked_mul(rows));
    match tokens {
        Some(1..=BATCH_TOKENS_MAX) => Ok(()),
        _ => Err(PairError::BatchShape { rows, source_length, target_length }.into()),
    }
}

/// Options of [`TrainPairs`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainPairsOptions {
    /// Mean number of target tokens per mini-batch, without padding.
    pub target_tokens: usize,
    /// Temperature T of the mixture of languages. 1 keeps the data's proportions; a higher value
    /// favours small languages.
    pub temperature: f64,
    /// Determines the order.
    pub seed: u64,
}

/// Shuffled mini-batches of pairs. [`TrainPairs::batch`] is a pure function of (set, options,
/// number).
///
/// Each language's share of the pairs is proportional to the power 1/T of its number of pairs. The
/// share holds to within one pair in every pool (32 mini-batches or more). Each pair of a language
/// comes once before any comes again. Within a mini-batch, lengths differ little.
///
/// The set is borrowed (`&PairSet`) or shared (`Arc<PairSet>`, for the thread of a
/// [`Loader`](crate::Loader)).
///
/// ```
/// use gpipe_data::parallel::*;
///
/// # fn main() -> gpipe_data::Result<()> {
/// let pair = |source: &str, target: &str| Pair { source: source.into(), target: target.into() };
/// let language = |code: &str, train| Language { code: code.into(), train, validation: vec![] };
/// let german = vec![pair("Datei öffnen", "Open a file"), pair("Beenden", "Quit")];
/// let corpus = ParallelCorpus {
///     languages: vec![language("de", german), language("is", vec![pair("Hætta", "Quit")])],
/// };
/// let options = VocabularyOptions { tokens: 300, ..VocabularyOptions::default() };
/// let vocabulary = TranslationVocabulary::train(&corpus, &options)?;
/// let set = PairSet::encode(&vocabulary, &corpus, Side::Train, 256)?;
///
/// let options = TrainPairsOptions { target_tokens: 64, temperature: 5.0, seed: 42 };
/// let batches = TrainPairs::new(&set, &options)?;
/// let batch = batches.batch(1_000)?; // No need to ask for the 1,000 before it.
/// let first = &batch.sources[..batch.source_length];
/// let language = set.languages().nth(batch.languages[0]).unwrap_or_default();
/// assert_eq!(first[0], i64::from(vocabulary.tag(language)?));
/// assert_eq!(batch.inputs[0], i64::from(vocabulary.begin()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TrainPairs<S> {
    set: S,
    mixture: Mixture,
    /// Mean number of pairs per mini-batch.
    pairs: u64,
    /// Mini-batches per pool.
    pool_batches: u64,
    seed: u64,
    /// A mini-batch and the number of pairs before it: (0, 0), or where the current mini-batch size
    /// began.
    origin: (u64, u64),
}

impl<S: Deref<Target = PairSet>> TrainPairs<S> {
    /// Creates the mini-batches of a set.
    ///
    /// # Errors
    /// Fails if there are no pairs, if the temperature is less than 1, or if a mini-batch has fewer
    /// than two pairs or more than [`BATCH_TOKENS_MAX`] tokens.
    pub fn new(set: S, options: &TrainPairsOptions) -> Result<Self> {
        let &TrainPairsOptions { target_tokens, temperature, seed } = options;
        if set.is_empty() {
            return Err(set.no_pairs("train on").into());
        }
        let languages: Vec<(&str, usize)> =
            set.languages().enumerate().map(|(at, code)| (code, set.pairs(at))).collect();
        let mixture = Mixture::new(&languages, temperature, seed)?;
        // Mean tokens per pair of the mixture.
        let mean = |tokens: &dyn Fn(usize) -> usize| -> f64 {
            let of =
                |(at, share): (usize, f64)| share * tokens(at) as f64 / set.pairs(at).max(1) as f64;
            mixture.shares().enumerate().map(of).sum()
        };
        let (source, target) =
            (mean(&|at| set.source_tokens(at)), mean(&|at| set.target_tokens(at)));
        let pairs = (target_tokens as f64 / target).round() as u64;
        if pairs < 2 {
            let least = (1.5 * target).ceil() as usize;
            return Err(PairError::FewTargetTokens { target_tokens, mean: target, least }.into());
        }
        check_shape(pairs as usize, source.ceil() as usize, target.ceil() as usize)?;
        let pool_batches = pool_batches(languages.len() as u64, pairs);
        Ok(Self { set, mixture, pairs, pool_batches, seed, origin: (0, 0) })
    }

    /// Continues the order at mini-batch `batches`, when the earlier ones took `pairs` pairs, as
    /// counted by [`TrainPairs::pairs_seen`].
    ///
    /// A run that is resumed with the same options continues as if it had not stopped. A run that
    /// continues with another number of target tokens starts in the middle of a pool of the new
    /// size. Some of that pool's pairs may come a second time in their epoch, and others not at
    /// all.
    #[must_use]
    pub fn starting_at(mut self, batches: u64, pairs: u64) -> Self {
        self.origin = (batches, pairs);
        self
    }

    /// Number of pairs that all mini-batches before `number` count for. Numbers count from 0, or
    /// from the number given to [`TrainPairs::starting_at`]. Each mini-batch counts as
    /// [`TrainPairs::pairs_per_batch`], regardless of its rows, so the result alone identifies a
    /// position in the order. Saturates at `u64::MAX`.
    pub fn pairs_seen(&self, number: u64) -> u64 {
        let (from, pairs) = self.origin;
        pairs.saturating_add(number.saturating_sub(from).saturating_mul(self.pairs))
    }

    /// Mean number of pairs per mini-batch.
    pub fn pairs_per_batch(&self) -> u64 {
        self.pairs
    }

    /// Sampling probability of each language, by index.
    pub fn shares(&self) -> Vec<f64> {
        self.mixture.shares().collect()
    }

    /// Number of passes over each language in the mini-batches before `number`, by index.
    pub fn epochs(&self, number: u64) -> Vec<f64> {
        self.mixture.epochs(self.place(number) * u128::from(self.pairs)).collect()
    }

    /// The mini-batch of a given number. Numbers count from 0, or from the number given to
    /// [`TrainPairs::starting_at`], and may be requested in any order.
    ///
    /// # Errors
    /// Fails if the mini-batch would have more than [`BATCH_TOKENS_MAX`] tokens, padding included.
    pub fn batch(&self, number: u64) -> Result<PairBatch> {
        let place = self.place(number);
        let batches = u128::from(self.pool_batches);
        let (pool, within) = (place / batches, (place % batches) as u64);
        let pairs = batches * u128::from(self.pairs);
        let drawn = sorted(&self.set, self.mixture.draw(pool * pairs..(pool + 1) * pairs));
        let runs = cut(&drawn, self.pool_batches as usize);
        // A pool's number beyond 2^64 is truncated to its low bits.
        let key = splitmix::key(&[self.seed, MINI_BATCHES_STREAM, pool as u64]);
        let run = Permutation::new(self.pool_batches, key).at(within) as usize;
        let run = runs.get(run).copied().unwrap_or_default();
        let (source_length, target_length) = longest(run);
        check_shape(run.len(), source_length, target_length)?;
        Ok(PairBatch::new(&self.set, run))
    }

    /// The position of a mini-batch in the whole order. It has 128 bits, because the largest
    /// numbers would overflow 64.
    fn place(&self, number: u64) -> u128 {
        let (from, pairs) = self.origin;
        u128::from(pairs.div_ceil(self.pairs)) + u128::from(number.saturating_sub(from))
    }
}

/// Number of mini-batches per pool. A pool may have one pair per language fewer than its
/// mini-batches have on average, but no mini-batch may be empty.
fn pool_batches(languages: u64, pairs: u64) -> u64 {
    let spare = POOL_BATCHES * (pairs - 1);
    POOL_BATCHES * languages.div_ceil(spare).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_a_pool_has_a_pair_for_each_mini_batch() {
        for languages in 1..500 {
            for pairs in 2..40 {
                let batches = pool_batches(languages, pairs);
                assert!(batches * pairs - languages >= batches, "{languages} {pairs}");
            }
        }
        assert_eq!(pool_batches(60, 100), POOL_BATCHES);
    }
}
