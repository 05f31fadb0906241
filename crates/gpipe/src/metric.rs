//! Metrics of the outputs besides the loss: sums and counts, without gradients.

use crate::{error::LayerError, layer::only};
use tch::{Kind, Tensor};

/// A metric. Its value over a mini-batch is `sum` over all micro-batches divided by `count` of the
/// whole mini-batch.
pub trait Metric: Send + Sync + 'static {
    /// The metric's name, unique in a pipeline.
    fn name(&self) -> &str;

    /// The sum over the samples (or targets) of a micro-batch. Outputs are in float32 when the
    /// pipeline computes in bfloat16 or float16. On a GPU a loss refuses targets out of range only
    /// later: a lookup by target must replace them, or the GPU is lost for the process.
    ///
    /// # Errors
    /// An error of libtorch, or values that the metric cannot take.
    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError>;

    /// The number that the sum over the whole mini-batch is divided by.
    ///
    /// # Errors
    /// An error of libtorch.
    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError>;

    /// Whether the metric can be computed on some rows at a time, under the conditions of
    /// [`Loss::by_rows`](crate::Loss::by_rows). The default is `false`.
    fn by_rows(&self) -> bool {
        false
    }
}

/// A metric's sum and count, kept apart so that several mini-batches can be combined exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// [`Metric::name`].
    pub name: String,
    /// The sum.
    pub sum: f64,
    /// The number to divide the sum by.
    pub count: f64,
}

impl Measured {
    /// `sum` / `count`.
    pub fn value(&self) -> f64 {
        self.sum / self.count
    }
}

/// The output that metrics measure: the first one. Further outputs belong to auxiliary heads.
fn first(outputs: &[Tensor]) -> Result<&Tensor, LayerError> {
    outputs.first().ok_or_else(|| LayerError::Shape("a metric takes an output".into()))
}

/// The fraction of targets (class indices `[...]`) whose class has the largest value in the first
/// output `[..., classes]`.
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
        let (output, target) = (first(outputs)?, only(targets)?);
        // Ignored targets are negative or out of range by convention. They are compared like others
        // and then masked.
        let hit = output.f_argmax(-1, false)?.f_eq_tensor(target)?;
        let hit = hit.f_logical_and(&target.f_ne(self.ignore)?)?;
        // `argmax` takes a NaN for the largest.
        let hit = hit.f_logical_and(&output.f_isnan()?.f_any_dim(-1, false)?.f_logical_not()?)?;
        Ok(hit.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(only(targets)?.f_ne(self.ignore)?.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }

    fn by_rows(&self) -> bool {
        true
    }
}

/// Top-k accuracy: the fraction of targets (class indices `[...]`) that are among the `k` classes
/// with the largest values in the first output `[..., classes]`. Equal values rank in the order of
/// their class index. A row with a NaN is never a hit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopK {
    name: String,
    k: i64,
    ignore: i64,
}

impl TopK {
    /// Top-`k` accuracy, named `top5` for `k` = 5. Targets of -100 do not count.
    pub fn new(k: i64) -> Self {
        Self { name: format!("top{k}"), k, ignore: Accuracy::default().ignore }
    }
}

impl Metric for TopK {
    fn name(&self) -> &str {
        &self.name
    }

    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError> {
        let (output, target) = (first(outputs)?, only(targets)?);
        let counts = target.f_ne(self.ignore)?;
        // An ignored target may not be a valid class. Class 0 replaces it and is masked below.
        let class = target.f_mul(&counts.f_to_kind(target.kind())?)?.f_unsqueeze(-1)?;
        let classes = output.size().last().copied().unwrap_or(0);
        // On a GPU the loss finds a wrong class after this, and the lookup must not fail before.
        let class = match output.device() {
            tch::Device::Cpu => class,
            _ => class.f_clamp(0, classes - 1)?,
        };
        let own = output.f_gather(-1, &class, false)?;
        let places = Tensor::f_arange(classes, (Kind::Int64, output.device()))?;
        let equal = output.f_eq_tensor(&own)?.f_logical_and(&places.f_lt_tensor(&class)?)?;
        let before = output.f_gt_tensor(&own)?.f_logical_or(&equal)?;
        let rank = before.f_sum_dim_intlist(-1_i64, false, Kind::Int64)?;
        let are_numbers = output.f_isnan()?.f_any_dim(-1, false)?.f_logical_not()?;
        let hit = rank.f_lt(self.k)?.f_logical_and(&counts)?.f_logical_and(&are_numbers)?;
        Ok(hit.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        Accuracy { ignore: self.ignore }.count(targets)
    }

    fn by_rows(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_top_k_counts_what_a_sorted_list_says() {
        let mut random = gpipe_core::splitmix::Stream::new(5);
        let (rows, classes) = (40, 7);
        let values: Vec<f32> = (0..rows * classes).map(|_| random.below(50) as f32).collect();
        let targets: Vec<i64> = (0..rows)
            .map(|row| if row % 9 == 0 { -100 } else { random.below(classes) as i64 })
            .collect();
        let output = [Tensor::from_slice(&values).reshape([4, 10, classes as i64])];
        let target = [Tensor::from_slice(&targets).reshape([4, 10])];
        let mut before = 0.0;
        for k in 1..=classes {
            let rank = |row: usize| {
                let row_values = &values[row * classes..][..classes];
                let own = row_values[targets[row] as usize];
                let before = |&(place, &value): &(usize, &f32)| {
                    value > own || value == own && place < targets[row] as usize
                };
                row_values.iter().enumerate().filter(before).count()
            };
            let expected =
                (0..rows).filter(|&row| targets[row] >= 0 && rank(row) < k).count() as f64;
            let metric = TopK::new(k as i64);
            assert_eq!(metric.sum(&output, &target).unwrap(), expected, "top {k}");
            assert!(expected >= before, "more classes, more hits");
            before = expected;
            assert_eq!(metric.count(&target).unwrap(), 35.0);
        }
        assert_eq!(before, 35.0, "every class is among all of them");
        assert_eq!(TopK::new(5).name(), "top5");
    }

    #[test]
    fn regression_equal_values_and_nans_are_no_hits() {
        // A constant or NaN output must not reach a top-1 accuracy of 100%.
        let targets = [Tensor::from_slice(&[0_i64, 1, 2, 0])];
        let equal = [Tensor::zeros([4, 3], (Kind::Float, tch::Device::Cpu))];
        assert_eq!(TopK::new(1).sum(&equal, &targets).unwrap(), 2.0);
        assert_eq!(TopK::new(2).sum(&equal, &targets).unwrap(), 3.0);
        let nan = [Tensor::full([4, 3], f64::NAN, (Kind::Float, tch::Device::Cpu))];
        assert_eq!(TopK::new(3).sum(&nan, &targets).unwrap(), 0.0);
        // It counted the targets of class 0.
        assert_eq!(Accuracy::default().sum(&nan, &targets).unwrap(), 0.0);
    }

    #[test]
    fn oracle_top_1_is_the_accuracy_where_no_two_values_are_equal() {
        let mut random = gpipe_core::splitmix::Stream::new(6);
        let values: Vec<f32> = (0..60).map(|_| random.next_u64() as f32).collect();
        let output = [Tensor::from_slice(&values).reshape([12, 5])];
        let targets: Vec<i64> = (0..12).map(|_| random.below(5) as i64).collect();
        let target = [Tensor::from_slice(&targets)];
        let accuracy = Accuracy::default().sum(&output, &target).unwrap();
        assert_eq!(TopK::new(1).sum(&output, &target).unwrap(), accuracy);
        assert!(accuracy > 0.0);
    }
}
