//! Training batches with random access by step.
//!
//! ```text
//! sequence = 4, 14 tokens, the epoch's offset = 3:
//!
//!   token    0  1  2  3  4  5  6  7  8  9 10 11 12 13
//!   window            [0------->|                        inputs 3..7,    targets 4..8
//!                                [1------->|             inputs 7..11,   targets 8..12
//!           -------->|                      [2------     inputs 11..15,  targets 12..16 (wraps)
//! ```
//!
//! The sequence is a ring. Without the ring, an offset would cost some epochs a window. The number
//! of windows before a step would then be a sum over all epochs, so random access would be neither
//! simple nor cheap. The seam is no worse than any document border, because the token before it is
//! an end of document.

use std::ops::Deref;

use super::{Batch, check_shape};
use crate::order::{Order, Sample};
use crate::{Error, Result, TokenSet};

/// Stream number that separates an epoch's offset from the other values derived from the seed.
const OFFSET_STREAM: u64 = 1;

/// Shuffled windows of a token set. [`TrainBatches::batch`] is a pure function of (tokens, shape,
/// seed, step).
///
/// In an epoch, each of the `tokens / sequence` windows is a sample exactly once. Fewer than
/// `sequence` tokens are not a target in that epoch. Each epoch uses a new window offset and a new
/// order, so every token appears in many contexts and none is left out permanently. A batch may
/// span two epochs.
///
/// The tokens are borrowed (`&TokenSet`) or shared (`Arc<TokenSet>`, for the thread of a
/// [`Loader`](crate::Loader)). They are never copied.
#[derive(Debug, Clone, Copy)]
pub struct TrainBatches<T> {
    tokens: T,
    sequence: usize,
    order: Order,
}

impl<T: Deref<Target = TokenSet>> TrainBatches<T> {
    /// Creates batches of `mini_batch` samples of `sequence` tokens.
    ///
    /// # Errors
    /// Fails if there are fewer than `sequence + 1` tokens, or if the shape is empty or larger than
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

    /// Continues the order of samples at `step`, when the earlier steps took `samples` samples in
    /// mini-batches of another size. A run that continues with larger mini-batches thus neither
    /// repeats nor skips a sample.
    #[must_use]
    pub fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.order = self.order.starting_at(step, samples);
        self
    }

    /// Number of samples per epoch.
    pub fn samples_per_epoch(&self) -> u64 {
        self.order.samples_per_epoch()
    }

    /// Number of samples in all steps before `step`, counted from step 0 across epochs. Saturates
    /// at `u64::MAX`.
    pub fn samples_seen(&self, step: u64) -> u64 {
        self.order.samples_seen(step)
    }

    /// The epoch of the first sample of `step`, counted from 0.
    pub fn epoch_of(&self, step: u64) -> u64 {
        self.order.epoch_of(step)
    }

    /// The batch of `step`. Steps count from 0, or from the step given to
    /// [`TrainBatches::starting_at`], and may be requested in any order.
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
        // The sum is less than tokens + sequence, so it cannot overflow.
        (sample.index as usize * self.sequence + offset as usize) % self.ring().len()
    }

    fn ring(&self) -> &[u32] {
        &self.tokens.tokens
    }

    /// Appends the `sequence + 1` tokens from `start` as a row, wrapping at the end of the
    /// sequence.
    fn push_window(&self, batch: &mut Batch, start: usize) {
        let from_start = self.ring().get(start..).unwrap_or_default();
        let ring = from_start.iter().chain(self.ring()).copied();
        let window = || ring.clone().map(i64::from);
        batch.inputs.extend(window().take(self.sequence));
        batch.targets.extend(window().skip(1).take(self.sequence));
        batch.samples += 1;
    }
}
