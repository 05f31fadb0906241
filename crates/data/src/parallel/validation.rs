//! Mini-batches that measure a language.

use std::collections::VecDeque;

use super::batches::check_shape;
use super::pools::{Drawn, longest, pack, sorted};
use super::{PairBatch, PairError, PairSet};
use crate::Result;

/// Every pair of one language exactly once, in the order of lengths.
///
/// A mini-batch has as many pairs as fit: a mean loss over a language must weigh mini-batches by
/// their targets, not equally.
#[derive(Debug, Clone)]
pub struct ValidationPairs<'a> {
    set: &'a PairSet,
    /// What is left, sorted and cut.
    runs: VecDeque<Vec<Drawn>>,
}

impl<'a> ValidationPairs<'a> {
    /// Mini-batches of at most `target_tokens`, padding included (a longer target has one of its
    /// own), over the first `pairs_max` pairs of a language where given.
    ///
    /// # Errors
    /// The set has no such language, or no pairs of it; a mini-batch has more than
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

    /// How many targets the remaining mini-batches have, without padding.
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
