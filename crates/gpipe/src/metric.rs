//! Metrics: what else is measured of the outputs, as sums and counts like a loss, but without gradients.

use crate::{error::LayerError, layer::only};
use tch::{Kind, Tensor};

/// A metric. Over a mini-batch it is the sum of `sum` over all micro-batches divided by `count` of the whole.
pub trait Metric: Send + Sync + 'static {
    /// Its name, unique in a pipeline.
    fn name(&self) -> &str;

    /// The sum over the samples (or targets) of a micro-batch. Outputs are in float32 where the arithmetic is
    /// in bfloat16 or float16.
    ///
    /// # Errors
    /// libtorch's, and values that the metric cannot take.
    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError>;

    /// What the sum over the whole mini-batch is divided by.
    ///
    /// # Errors
    /// libtorch's.
    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError>;
}

/// A metric's value, apart as sum and count, so that several mini-batches can be joined exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// [`Metric::name`].
    pub name: String,
    /// The sum.
    pub sum: f64,
    /// What to divide it by.
    pub count: f64,
}

impl Measured {
    /// `sum` / `count`.
    pub fn value(&self) -> f64 {
        self.sum / self.count
    }
}

/// The share of targets (class indices [...]) to which outputs [..., classes] give the largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accuracy {
    /// Targets with this value do not count.
    pub ignore: i64,
}

impl Default for Accuracy {
    /// Ignores -100, as [`crate::CrossEntropy`] does.
    fn default() -> Self {
        Self { ignore: -100 }
    }
}

impl Metric for Accuracy {
    fn name(&self) -> &str {
        "accuracy"
    }

    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError> {
        let (output, target) = (only(outputs)?, only(targets)?);
        // An ignored target is negative or out of range by convention; compare all the same and mask.
        let hit = output.f_argmax(-1, false)?.f_eq_tensor(target)?;
        let hit = hit.f_logical_and(&target.f_ne(self.ignore)?)?;
        Ok(hit.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(only(targets)?.f_ne(self.ignore)?.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }
}
