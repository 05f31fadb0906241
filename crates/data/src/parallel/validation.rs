//! Mini-batches that measure one language.

use std::collections::VecDeque;

use super::batches::check_shape;
use super::pools::{Drawn, longest, pack, sorted};
use super::{PairBatch, PairError, PairSet};
use crate::Result;

/// Every pair of one language exactly once, sorted by length.
///
/// A mini-batch has as many pairs as fit, so a mean loss over a language must weight mini-batches
/// by their number of targets.
#[derive(Debug, Clone)]
pub struct ValidationPairs<'a> {
    set: &'a PairSet,
    /// The remaining mini-batches, sorted and cut.
    runs: VecDeque<Vec<Drawn>>,
}

impl<'a> ValidationPairs<'a> {
    /// Creates mini-batches of at most `target_tokens` target tokens, padding included, over the
    /// first `pairs_max` pairs of a language if given. A longer target gets a separate mini-batch.
    ///
    /// # Errors
    /// Fails if the set has no such language or no pairs of it, or if a mini-batch has more than
    /// [`BATCH_TOKENS_MAX`](crate::BATCH_TOKENS_MAX) tokens.
    pub fn new(
        set: &'a PairSet,
        language: usize,
        target_tokens: usize,
        pairs_max: Option<usize>,
    ) -> Result<Self> {
        let languages = set.languages().len();
        if language >= languages {
            return Err(PairError::NoSuchLanguage { language, languages }.into());
        }
        let pairs = set.pairs(language).min(pairs_max.unwrap_or(usize::MAX));
        if pairs == 0 {
            return Err(set.no_pairs("validate on").into());
        }
        let pool = sorted(set, (0..pairs).map(|pair| (language, pair)));
        let runs = pack(&pool, target_tokens);
        for run in &runs {
            let (source_length, target_length) = longest(run);
            check_shape(run.len(), source_length, target_length)?;
        }
        Ok(Self { set, runs: runs.into_iter().map(<[Drawn]>::to_vec).collect() })
    }

    /// Number of targets in the remaining mini-batches, without padding.
    pub fn targets(&self) -> usize {
        self.runs.iter().flatten().map(|pair| pair.target).sum()
    }
}

impl Iterator for ValidationPairs<'_> {
    type Item = PairBatch;

    fn next(&mut self) -> Option<PairBatch> {
        Some(PairBatch::new(self.set, &self.runs.pop_front()?))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.runs.len(), Some(self.runs.len()))
    }
}

impl ExactSizeIterator for ValidationPairs<'_> {}
