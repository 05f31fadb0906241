//! The order of samples: shuffled in each epoch, with random access by step.

use std::ops::Range;

use crate::hash::mix;
use crate::permutation::Permutation;

/// Stream number of the order within (seed, epoch). [`Order::key`] takes the others.
const ORDER_STREAM: u64 = 2;

/// An order of samples across all epochs, a pure function of (samples, seed). Mini-batches cut it
/// without gaps, so a batch may span two epochs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    samples_per_epoch: u64,
    mini_batch: usize,
    seed: u64,
    /// A step and the number of samples before it: (0, 0), or where the current mini-batch size
    /// began.
    origin: (u64, u64),
}

/// A sample of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Epoch from 0. An epoch beyond `u64::MAX` is truncated to its low 64 bits.
    pub(crate) epoch: u64,
    /// Index within the epoch, less than [`Order::samples_per_epoch`].
    pub(crate) index: u64,
}

impl Order {
    /// Creates an order. `samples_per_epoch` must be 1 to 2^62.
    pub(crate) fn new(samples_per_epoch: u64, mini_batch: usize, seed: u64) -> Self {
        Self { samples_per_epoch, mini_batch, seed, origin: (0, 0) }
    }

    /// Continues the order at `step`, when the earlier steps took `samples` samples.
    pub(crate) fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.origin = (step, samples);
        self
    }

    pub(crate) fn samples_per_epoch(&self) -> u64 {
        self.samples_per_epoch
    }

    pub(crate) fn mini_batch(&self) -> usize {
        self.mini_batch
    }

    /// Number of samples in all steps before `step`, across epochs. Saturates at `u64::MAX`.
    pub(crate) fn samples_seen(&self, step: u64) -> u64 {
        u64::try_from(self.first_place(step)).unwrap_or(u64::MAX)
    }

    /// The epoch of the first sample of `step`.
    pub(crate) fn epoch_of(&self, step: u64) -> u64 {
        (self.first_place(step) / u128::from(self.samples_per_epoch)) as u64
    }

    /// The samples of a step.
    pub(crate) fn samples(&self, step: u64) -> impl Iterator<Item = Sample> + '_ {
        self.places(step).map(|place| self.at(place))
    }

    /// The places of a step's samples: their numbers, counted across epochs.
    pub(crate) fn places(&self, step: u64) -> Range<u128> {
        let first = self.first_place(step);
        first..first + self.mini_batch as u128
    }

    /// The sample at `place`, a number counted across epochs.
    pub(crate) fn at(&self, place: u128) -> Sample {
        let epoch_len = u128::from(self.samples_per_epoch);
        let epoch = (place / epoch_len) as u64;
        let order = Permutation::new(self.samples_per_epoch, self.key(epoch, ORDER_STREAM));
        Sample { epoch, index: order.at((place % epoch_len) as u64) }
    }

    /// A number for one purpose (any stream but 2) in one epoch.
    pub(crate) fn key(&self, epoch: u64, stream: u64) -> u64 {
        mix(mix(mix(self.seed) ^ epoch) ^ stream)
    }

    /// The position of a step's first sample. It has 128 bits, because the largest steps would
    /// overflow 64.
    fn first_place(&self, step: u64) -> u128 {
        let (from, samples) = self.origin;
        u128::from(samples) + u128::from(step.saturating_sub(from)) * self.mini_batch as u128
    }
}
