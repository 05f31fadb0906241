//! Validation batches in order.

use super::{Batch, IGNORE, check_shape};
use crate::{Error, Result, TokenSet};

/// Batches in which every token but the first is a target exactly once, in order.
///
/// Windows of `sequence` targets follow each other without gaps. The last window is padded with the
/// target [`IGNORE`] and the input 0, and the last batch may have fewer samples. A mean loss over a
/// set must therefore weight batches by their number of targets.
#[derive(Debug, Clone)]
pub struct ValidationBatches<'a> {
    tokens: &'a [u32],
    sequence: usize,
    mini_batch: usize,
    /// Number of tokens already used as targets.
    done: usize,
}

impl<'a> ValidationBatches<'a> {
    /// Creates batches of up to `mini_batch` samples of `sequence` tokens, over the first
    /// `tokens_max` tokens if given.
    ///
    /// # Errors
    /// Fails if fewer than 2 tokens are available (after `tokens_max`), or if the shape is empty or
    /// larger than [`BATCH_TOKENS_MAX`](crate::BATCH_TOKENS_MAX).
    pub fn new(
        tokens: &'a TokenSet,
        sequence: usize,
        mini_batch: usize,
        tokens_max: Option<usize>,
    ) -> Result<Self> {
        check_shape(mini_batch, sequence)?;
        let cap = tokens_max.unwrap_or(usize::MAX);
        let tokens = tokens.tokens.get(..cap).unwrap_or(&tokens.tokens);
        if tokens.len() < 2 {
            return Err(Error::TooFewTokens { tokens: tokens.len(), needed: 2 });
        }
        Ok(Self { tokens, sequence, mini_batch, done: 0 })
    }

    /// Number of targets in the remaining batches, without padding.
    pub fn targets(&self) -> usize {
        self.tokens.len() - 1 - self.done
    }

    /// Appends the next window as a row.
    fn push_window(&mut self, batch: &mut Batch) {
        let inputs = self.tokens.iter().skip(self.done);
        let targets = self.tokens.iter().skip(self.done + 1);
        let pairs = inputs.zip(targets).take(self.sequence);
        let targets_before = batch.targets.len();
        for (&input, &target) in pairs {
            batch.inputs.push(i64::from(input));
            batch.targets.push(i64::from(target));
        }
        self.done += batch.targets.len() - targets_before;
        batch.samples += 1;
        // Any input works where the target is ignored. Token 0 exists in every vocabulary.
        batch.inputs.resize(batch.samples * self.sequence, 0);
        batch.targets.resize(batch.samples * self.sequence, IGNORE);
    }
}

impl Iterator for ValidationBatches<'_> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let windows = self.targets().div_ceil(self.sequence);
        if windows == 0 {
            return None;
        }
        let samples = windows.min(self.mini_batch);
        let mut batch = Batch::with_capacity(samples, self.sequence);
        for _ in 0..samples {
            self.push_window(&mut batch);
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let windows = self.targets().div_ceil(self.sequence);
        let batches = windows.div_ceil(self.mini_batch);
        (batches, Some(batches))
    }
}

impl ExactSizeIterator for ValidationBatches<'_> {}
