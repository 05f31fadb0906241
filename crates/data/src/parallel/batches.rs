//! Mini-batches of pairs, and those of training by number.

use std::ops::Deref;

use gpipe_core::splitmix;

use super::mixture::Mixture;
use super::pools::{Drawn, cut, longest, sorted};
use super::{PairError, PairSet};
use crate::permutation::Permutation;
use crate::{BATCH_TOKENS_MAX, IGNORE, Result};

/// What the seed's use for the order of a pool's mini-batches is told apart by.
const MINI_BATCHES_STREAM: u64 = 6;

/// Mini-batches of a pool. With lengths like sentences' (log-normal) 16 of them have a quarter more
/// tokens for padding, 32 a fifth, 64 a sixth; and the more, the longer a pool takes, which is made
/// anew for each mini-batch: with 32 about 3 ms for 2,000 target tokens, less than a hundredth of a
/// step that learns from them.
const POOL_BATCHES: u64 = 32;

/// Pairs in rows, filled up to the longest.
///
/// Rows are in the order of their sources' lengths, so that the rows of a micro-batch differ less
/// than those of the mini-batch: what all of them have of padding can be cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairBatch {
    /// What the encoder reads: tag, tokens, end, padding. `[samples, source_length]`
    pub sources: Vec<i64>,
    /// Tokens of the longest source.
    pub source_length: usize,
    /// What the decoder reads: begin, tokens, padding. `[samples, target_length]`
    pub inputs: Vec<i64>,
    /// What the decoder is to write: tokens, end, then [`IGNORE`]. `[samples, target_length]`
    pub targets: Vec<i64>,
    /// Tokens of the longest target.
    pub target_length: usize,
    /// How many rows.
    pub samples: usize,
    /// The language of each row: its number in the set. `[samples]`
    pub languages: Vec<usize>,
}

impl PairBatch {
    /// The pairs in rows, shortest source first, and of these the shortest target.
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

    /// How many targets count: those that are no padding.
    pub fn target_tokens(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORE).count()
    }
}

/// Refuses a mini-batch that would not fit in memory.
pub(super) fn check_shape(rows: usize, source_length: usize, target_length: usize) -> Result<()> {
    let tokens = source_length.checked_add(target_length).and_then(|both| both.checked_mul(rows));
    match tokens {
        Some(1..=BATCH_TOKENS_MAX) => Ok(()),
        _ => Err(PairError::BatchShape { rows, source_length, target_length }.into()),
    }
}

/// How [`TrainPairs`] are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainPairsOptions {
    /// Target tokens of a mini-batch, on average and without padding.
    pub target_tokens: usize,
    /// T of the mixture of languages: 1 takes them as they are, more helps the small ones.
    pub temperature: f64,
    /// Chooses the order.
    pub seed: u64,
}

/// Shuffled mini-batches of pairs. [`TrainPairs::batch`] is a pure function of (set, options,
/// number).
///
/// Each language has a share of the pairs that is proportional to the power 1/T of their number, in
/// every run of mini-batches that make a pool (32 or more) to within one pair; each of its pairs
/// comes once before one comes again. Within a mini-batch lengths differ little.
///
/// The set is borrowed (`&PairSet`) or shared (`Arc<PairSet>`, for a thread as a
/// [`Loader`](crate::Loader) has one).
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
    /// Of a mini-batch, on average.
    pairs: u64,
    /// Mini-batches of a pool.
    pool_batches: u64,
    seed: u64,
    /// A mini-batch, and the pairs before it: 0 and 0, or where mini-batches began to have this
    /// size.
    origin: (u64, u64),
}

impl<S: Deref<Target = PairSet>> TrainPairs<S> {
    /// Mini-batches of a set.
    ///
    /// # Errors
    /// There are no pairs; the temperature is less than 1; a mini-batch has fewer than two pairs,
    /// or more than [`BATCH_TOKENS_MAX`] tokens.
    pub fn new(set: S, options: &TrainPairsOptions) -> Result<Self> {
        let &TrainPairsOptions { target_tokens, temperature, seed } = options;
        if set.is_empty() {
            return Err(set.no_pairs("train on").into());
        }
        let languages: Vec<(&str, usize)> =
            set.languages().enumerate().map(|(at, code)| (code, set.pairs(at))).collect();
        let mixture = Mixture::new(&languages, temperature, seed)?;
        // Tokens of a mean pair of the mixture.
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

    /// The same order, where the mini-batches before `batches` had `pairs` of its pairs, as
    /// [`TrainPairs::pairs_seen`] counts them.
    ///
    /// A run that is resumed with the same options goes on as if it had not stopped. One that goes
    /// on with another number of target tokens does so in the midst of a pool of the new size: of
    /// that pool's pairs some may come a second time in their epoch and others not at all.
    #[must_use]
    pub fn starting_at(mut self, batches: u64, pairs: u64) -> Self {
        self.origin = (batches, pairs);
        self
    }

    /// How many pairs the mini-batches before `number` count for, from 0 (or from that of
    /// [`TrainPairs::starting_at`]): [`TrainPairs::pairs_per_batch`] for each, whatever their rows,
    /// so that this number alone says where in the order a run is. No more than `u64::MAX`.
    pub fn pairs_seen(&self, number: u64) -> u64 {
        let (from, pairs) = self.origin;
        pairs.saturating_add(number.saturating_sub(from).saturating_mul(self.pairs))
    }

    /// How many pairs a mini-batch has on average.
    pub fn pairs_per_batch(&self) -> u64 {
        self.pairs
    }

    /// Each language's part of the pairs, by number: its sampling probability.
    pub fn shares(&self) -> Vec<f64> {
        self.mixture.shares().collect()
    }

    /// How often each language has been gone through, by number, in the mini-batches before
    /// `number`.
    pub fn epochs(&self, number: u64) -> Vec<f64> {
        self.mixture.epochs(self.place(number) * u128::from(self.pairs)).collect()
    }

    /// The mini-batch of a number, from 0 (or from that of [`TrainPairs::starting_at`]). Numbers
    /// may be asked for in any order.
    ///
    /// # Errors
    /// It would have more than [`BATCH_TOKENS_MAX`] tokens, padding included.
    pub fn batch(&self, number: u64) -> Result<PairBatch> {
        let place = self.place(number);
        let batches = u128::from(self.pool_batches);
        let (pool, within) = (place / batches, (place % batches) as u64);
        let pairs = batches * u128::from(self.pairs);
        let drawn = sorted(&self.set, self.mixture.draw(pool * pairs..(pool + 1) * pairs));
        let runs = cut(&drawn, self.pool_batches as usize);
        // The number of a pool beyond 2^64 is cut to its low bits.
        let key = splitmix::key(&[self.seed, MINI_BATCHES_STREAM, pool as u64]);
        let run = Permutation::new(self.pool_batches, key).at(within) as usize;
        let run = runs.get(run).copied().unwrap_or_default();
        let (source_length, target_length) = longest(run);
        check_shape(run.len(), source_length, target_length)?;
        Ok(PairBatch::new(&self.set, run))
    }

    /// Where a mini-batch is in the whole order. In 128 bits, because numbers near the greatest
    /// would overflow 64.
    fn place(&self, number: u64) -> u128 {
        let (from, pairs) = self.origin;
        u128::from(pairs.div_ceil(self.pairs)) + u128::from(number.saturating_sub(from))
    }
}

/// How many mini-batches a pool has. It may have a pair less for each language than its
/// mini-batches have on average, and none of them may be empty.
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
