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

/// The target of a place that is not to be counted: padding. Cross entropies ignore this value by
/// default.
pub const IGNORE: i64 = -100;

/// Inputs and targets of some samples, in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Tokens. `[samples, sequence]`
    pub inputs: Vec<i64>,
    /// For each input the token that follows it, or [`IGNORE`]. `[samples, sequence]`
    pub targets: Vec<i64>,
    /// How many rows.
    pub samples: usize,
    /// How many tokens per row.
    pub sequence: usize,
}

impl Batch {
    /// A batch without rows yet.
    fn with_capacity(samples: usize, sequence: usize) -> Self {
        Self {
            inputs: Vec::with_capacity(samples * sequence),
            targets: Vec::with_capacity(samples * sequence),
            samples: 0,
            sequence,
        }
    }
}

/// Checks the shape of a batch, so that nothing overflows or exhausts the memory later.
fn check_shape(mini_batch: usize, sequence: usize) -> Result<()> {
    match mini_batch.checked_mul(sequence) {
        Some(1..=BATCH_TOKENS_MAX) => Ok(()),
        _ => Err(Error::BatchShape { mini_batch, sequence }),
    }
}
