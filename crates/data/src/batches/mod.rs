//! Windows of a token sequence as batches.
//!
//! - `train`: random access ([`TrainBatches`]);
//! - `validation`: every target once, in order ([`ValidationBatches`]).

mod train;
mod validation;

pub use crate::bounds::BATCH_TOKENS_MAX;
use crate::{Error, Result};

pub use train::TrainBatches;
pub use validation::ValidationBatches;

/// The target of a position that the loss does not count, such as padding. Cross-entropy losses
/// ignore this value by default.
pub const IGNORE: i64 = -100;

/// Inputs and targets of several samples, in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Input tokens. Shape: `[samples, sequence]`.
    pub inputs: Vec<i64>,
    /// The token that follows each input, or [`IGNORE`]. Shape: `[samples, sequence]`.
    pub targets: Vec<i64>,
    /// Number of rows.
    pub samples: usize,
    /// Number of tokens per row.
    pub sequence: usize,
}

impl Batch {
    /// An empty batch with capacity for `samples` rows.
    pub(crate) fn with_capacity(samples: usize, sequence: usize) -> Self {
        Self {
            inputs: Vec::with_capacity(samples * sequence),
            targets: Vec::with_capacity(samples * sequence),
            samples: 0,
            sequence,
        }
    }
}

/// Checks that a batch of this shape neither overflows nor exhausts memory.
pub(crate) fn check_shape(mini_batch: usize, sequence: usize) -> Result<()> {
    match mini_batch.checked_mul(sequence) {
        Some(1..=BATCH_TOKENS_MAX) => Ok(()),
        _ => Err(Error::BatchShape { mini_batch, sequence }),
    }
}
