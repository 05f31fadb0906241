//! Training batches by number.
//!
//! ```text
//! sequence = 4, 14 tokens, the epoch's offset = 3:
//!
//!   token    0  1  2  3  4  5  6  7  8  9 10 11 12 13
//!   window            [0------->|                        inputs 3..7,    targets 4..8
//!                                [1------->|             inputs 7..11,   targets 8..12
//!           -------->|                      [2------     inputs 11..15,  targets 12..16, which is round the end
//! ```
//!
//! The sequence is a ring. Without that, an offset would cost some epochs a window, the number of
//! windows before a step would be a sum over all epochs, and random access would be neither simple
//! nor cheap. The seam is no worse than any border of documents: the token before it is an end of
//! document.

use std::ops::Deref;

use super::{Batch, check_shape};
use crate::order::{Order, Sample};
use crate::{Error, Result, TokenSet};

/// What the epoch's offset is told apart by from the epoch's order.
const OFFSET_STREAM: u64 = 1;

/// Shuffled windows of a token set. [`TrainBatches::batch`] is a pure function of (tokens, shape,
/// seed, step).
///
/// In an epoch each of `tokens / sequence` windows is a sample once; fewer than `sequence` tokens
/// are no target in that epoch. Each epoch starts the windows at another offset and shuffles them
/// in another way, so that a token is seen in ever other contexts and none is left out for good. A
/// batch may span two epochs.
///
/// The tokens are borrowed (`&TokenSet`) or shared (`Arc<TokenSet>`, for a thread as a
/// [`Loader`](crate::Loader) has one); they are never copied.
#[derive(Debug, Clone, Copy)]
pub struct TrainBatches<T> {
    tokens: T,
    sequence: usize,
    order: Order,
}

impl<T: Deref<Target = TokenSet>> TrainBatches<T> {
    /// Batches of `mini_batch` samples of `sequence` tokens.
    ///
    /// # Errors
    /// There are fewer than `sequence + 1` tokens, or the shape is empty or larger than
    /// [`BATCH_TOKENS_MAX`](crate::BATCH_TOKENS_MAX).
    pub fn new(tokens: T, sequence: usize, mini_batch: usize, seed: u64) -> Result<Self> {
        check_shape(mini_batch, sequence)?;
        let count = tokens.tokens.len();
        if count <= sequence {
            return Err(Error::TooFewTokens { tokens: count, needed: sequence + 1 });
        }
        let order = Order::new((count / sequence) as u64, mini_batch, seed);
        Ok(Self { tokens, sequence, order })
    }

    /// The same order of samples, where the steps before `step` took `samples` of them in
    /// mini-batches of another size: a run that goes on with larger ones neither repeats a sample
    /// nor leaves one out.
    #[must_use]
    pub fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.order = self.order.starting_at(step, samples);
        self
    }

    /// How many samples an epoch has.
    pub fn samples_per_epoch(&self) -> u64 {
        self.order.samples_per_epoch()
    }

    /// How many samples the steps before `step` have, from 0 and through all epochs; no more than
    /// `u64::MAX`.
    pub fn samples_seen(&self, step: u64) -> u64 {
        self.order.samples_seen(step)
    }

    /// How many targets the steps before `step` have; no more than `u64::MAX`.
    pub fn tokens_seen(&self, step: u64) -> u64 {
        self.samples_seen(step).saturating_mul(self.sequence as u64)
    }

    /// The epoch, from 0, of the first sample of `step`.
    pub fn epoch_of(&self, step: u64) -> u64 {
        self.order.epoch_of(step)
    }

    /// The batch of a step, from 0 (or from that of [`TrainBatches::starting_at`]). Steps may be
    /// asked for in any order.
    pub fn batch(&self, step: u64) -> Batch {
        let mut batch = Batch::with_capacity(self.order.mini_batch(), self.sequence);
        for sample in self.order.samples(step) {
            self.push_window(&mut batch, self.window_start(sample));
        }
        batch
    }

    /// The token at which the window of a sample starts.
    fn window_start(&self, sample: Sample) -> usize {
        let offset = self.order.key(sample.epoch, OFFSET_STREAM) % self.sequence as u64;
        // Less than tokens + sequence: no overflow.
        (sample.index as usize * self.sequence + offset as usize) % self.ring().len()
    }

    fn ring(&self) -> &[u32] {
        &self.tokens.tokens
    }

    /// Appends the `sequence + 1` tokens from `start`, round the end where need be, as a row.
    fn push_window(&self, batch: &mut Batch, start: usize) {
        let from_start = self.ring().get(start..).unwrap_or_default();
        let ring = from_start.iter().chain(self.ring()).copied();
        let window = || ring.clone().map(i64::from);
        batch.inputs.extend(window().take(self.sequence));
        batch.targets.extend(window().skip(1).take(self.sequence));
        batch.samples += 1;
    }
}
