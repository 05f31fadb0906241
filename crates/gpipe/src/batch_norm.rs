//! Batch normalisation per micro-batch, with running statistics per mini-batch.
//!
//! Each micro-batch is normalised by its own mean and variance. The running averages that
//! evaluation uses are updated once per mini-batch. The statistics of each micro-batch are kept
//! until the last backward, combined in float64 in micro-batch order, and applied with the update.
//! The running averages therefore do not depend on K, schedule or re-materialization, and a failed
//! step leaves them unchanged.

use gpipe_bridge::{
    device::upload,
    images::{self, Normed},
};
use gpipe_core::MicroBatch;
use tch::{Kind, Tensor};

use crate::{
    error::LayerError,
    parameter::{Init, ParameterSpec},
    value::tensor_bytes,
};

/// Batch normalisation of `[samples, channels, ...]` (Ioffe & Szegedy 2015).
///
/// Training normalises each micro-batch by its own statistics; evaluation uses running averages
/// over mini-batches. Use it as a layer, or inside another layer through
/// [`Forward::batch_norm`](crate::Forward::batch_norm).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNorm {
    /// Number of channels.
    pub channels: i64,
    /// Added to the variance.
    pub eps: f64,
    /// Weight of each new mini-batch in the running statistics; `None` weights all mini-batches
    /// equally.
    pub momentum: Option<f64>,
}

impl BatchNorm {
    /// A batch norm with PyTorch's defaults: `eps` 1e-5, `momentum` 0.1.
    pub fn new(channels: i64) -> Self {
        Self { channels, eps: 1e-5, momentum: Some(0.1) }
    }

    /// Checks that the numbers are in range.
    pub(crate) fn check(&self) -> Result<(), LayerError> {
        if !self.eps.is_finite() || self.eps < 0.0 {
            return Err(LayerError::Value(format!("eps {}: use at least 0", self.eps)));
        }
        match self.momentum.filter(|own| !(0.0..=1.0).contains(own)) {
            None => Ok(()),
            Some(own) => {
                Err(LayerError::Value(format!("momentum {own}: use a number from 0 to 1")))
            }
        }
    }

    /// The parameters, with `prefix` before each name: `weight`, `bias`, `running_mean`,
    /// `running_variance` (unbiased) and `running_batches` (the number of mini-batches).
    pub fn parameters(&self, prefix: &str) -> [ParameterSpec; 5] {
        let named = |name: &str, init| {
            ParameterSpec::new(&format!("{prefix}{name}"), [self.channels], init)
        };
        let running = |name: &str, shape, init| {
            ParameterSpec::buffer(&format!("{prefix}running_{name}"), [shape], init)
        };
        [
            named("weight", Init::Ones),
            named("bias", Init::Zeros),
            running("mean", self.channels, Init::Zeros),
            running("variance", self.channels, Init::Ones),
            running("batches", 1, Init::Zeros),
        ]
    }
}

/// What the running statistics of batch norms follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormsFollow {
    /// Mini-batches: one update of the running statistics for each, from all of it.
    #[default]
    MiniBatches,
    /// Micro-batches: an update for each, in their order, as if a loop ran over them. Statistics
    /// then depend on the number of micro-batches.
    MicroBatches,
}

impl NormsFollow {
    /// The statistics that make one update together.
    pub(crate) fn together(
        self,
        mut seen: Vec<(MicroBatch, BatchStatistics)>,
    ) -> Vec<Vec<(MicroBatch, BatchStatistics)>> {
        match self {
            Self::MiniBatches => vec![seen],
            Self::MicroBatches => {
                seen.sort_by_key(|(micro_batch, _)| *micro_batch);
                seen.into_iter().map(|own| vec![own]).collect()
            }
        }
    }
}

/// The statistics of one batch norm over one micro-batch.
#[derive(Debug)]
pub(crate) struct BatchStatistics {
    /// Index of the batch norm's first parameter within the layer.
    pub first: usize,
    pub momentum: Option<f64>,
    pub eps: f64,
    /// Values per channel.
    pub count: i64,
    /// The mean as libtorch returned it, `[channels]`.
    pub mean: Tensor,
    /// 1 / sqrt(variance + eps) as libtorch returned it, `[channels]`. It is not converted before
    /// the last micro-batch: many small kernels per micro-batch would cost more than the norm
    /// itself.
    pub inverse: Tensor,
}

impl BatchStatistics {
    /// Size of the tensors.
    pub(crate) fn bytes(&self) -> u64 {
        tensor_bytes(&self.mean) + tensor_bytes(&self.inverse)
    }
}

/// Offsets of the parameters from the first one.
pub(crate) const WEIGHT: usize = 0;
pub(crate) const BIAS: usize = 1;
pub(crate) const MEAN: usize = 2;
pub(crate) const VARIANCE: usize = 3;
pub(crate) const BATCHES: usize = 4;

/// How a batch norm computes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Normalising {
    pub training: bool,
    /// Whether a ReLU follows.
    pub relu: bool,
    /// Whether the bridge's operation takes the values.
    pub fused: bool,
}

/// Normalises `x`, and in training also returns the statistics. `parameter` returns the norm's
/// parameters by offset; `first` is the index of its first parameter within the layer.
pub(crate) fn batch_norm<'a>(
    parameter: impl Fn(usize) -> Result<&'a Tensor, LayerError>,
    how: Normalising,
    first: usize,
    norm: &BatchNorm,
    x: &Tensor,
) -> Result<(Tensor, Option<BatchStatistics>), LayerError> {
    let shape = x.size();
    if shape.len() < 2 || shape[1] != norm.channels {
        let channels = norm.channels;
        return Err(LayerError::Shape(format!(
            "batch norm takes [samples, {channels} channels, ...], it got {shape:?}"
        )));
    }
    let (mean, variance, _) = (parameter(MEAN)?, parameter(VARIANCE)?, parameter(BATCHES)?);
    // With float32 running statistics, libtorch requires float32 weights.
    let widened = |number| Ok::<_, LayerError>(parameter(number)?.f_to_kind(mean.kind())?);
    let (weight, bias) = (widened(WEIGHT)?, widened(BIAS)?);
    let active = |y: Tensor| if how.relu { y.f_relu() } else { Ok(y) };
    if !how.training {
        let (y, ..) = x.f_native_batch_norm(
            Some(&weight),
            Some(&bias),
            Some(mean),
            Some(variance),
            false,
            0.0,
            norm.eps,
        )?;
        return Ok((active(y)?, None));
    }
    let count = shape[0] * shape[2..].iter().product::<i64>();
    if count < 2 {
        return Err(LayerError::Shape(format!(
            "batch norm of {shape:?}: one value a channel has no variance; use larger \
            micro-batches (fewer of them, or a larger mini-batch) or larger images"
        )));
    }
    let (y, mean, inverse) = match how.fused {
        true => {
            let Normed { y, mean, inverse } =
                images::batch_norm(x, &weight, &bias, norm.eps, how.relu)?;
            (y, mean, inverse)
        }
        false => {
            let none = None::<&Tensor>;
            let (y, mean, inverse) =
                x.f_native_batch_norm(Some(&weight), Some(&bias), none, none, true, 0.0, norm.eps)?;
            (active(y)?, mean.f_detach()?, inverse.f_detach()?)
        }
    };
    let momentum = norm.momentum;
    let eps = norm.eps;
    Ok((y, Some(BatchStatistics { first, momentum, eps, count, mean, inverse })))
}

/// Combines the statistics of the micro-batches of a mini-batch, in their order and in float64.
///
/// Returns the number of values per channel, their mean, and the sum of squared differences from
/// that mean. The differences are taken from the mean of the whole mini-batch, so nothing cancels.
pub(crate) fn combine(
    mut all: Vec<(MicroBatch, BatchStatistics)>,
) -> Result<Option<(i64, Tensor, Tensor)>, LayerError> {
    all.sort_by_key(|(micro_batch, _)| *micro_batch);
    let Some((_, first)) = all.first() else { return Ok(None) };
    let (eps, device) = (first.eps, first.mean.device());
    let stacked = |of: fn(&BatchStatistics) -> &Tensor| {
        let tensors: Vec<&Tensor> = all.iter().map(|(_, seen)| of(seen)).collect();
        Tensor::f_stack(&tensors, 0)?.f_to_kind(Kind::Double)
    };
    let (means, inverses) = (stacked(|seen| &seen.mean)?, stacked(|seen| &seen.inverse)?);
    let counts: Vec<f64> = all.iter().map(|(_, seen)| seen.count as f64).collect();
    let total: i64 = all.iter().map(|(_, seen)| seen.count).sum();
    let counts = upload(&Tensor::f_from_slice(&counts)?, device)?.f_unsqueeze(1)?;
    let sum = |values: Tensor| values.f_sum_dim_intlist(0_i64, false, Kind::Double);
    let mean = sum(means.f_mul(&counts)?)?.f_div_scalar(total as f64)?;
    // variance = 1 / inverse^2 - eps, clamped at 0 because rounding may make it negative. The
    // inverse is in float32, so the error is about 1e-7 of variance + eps, the quantity that
    // normalises. A variance far below eps is less accurate.
    let variances = inverses.f_square()?.f_reciprocal()?.f_sub_scalar(eps)?.f_clamp_min(0.0)?;
    // Without an eps, the inverse of a constant channel is 0.
    let variances = variances.f_masked_fill(&inverses.f_eq(0.0)?, 0.0)?;
    let apart = means.f_sub(&mean)?.f_square()?;
    let squares = sum(variances.f_add(&apart)?.f_mul(&counts)?)?;
    Ok(Some((total, mean, squares)))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Without an eps, libtorch gives 0 for the inverse deviation of a constant channel. The
    /// variance, which is 1 / inverse^2 - eps, was infinite, and so was the running one from then
    /// on.
    #[test]
    fn regression_a_constant_channel_without_eps_has_no_variance() {
        let values = [1.0_f32, 7.0, 3.0, 7.0]; // two samples; the second channel is constant
        let input = Tensor::from_slice(&values).reshape([2, 2]);
        let zeros = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
        let none: Option<Tensor> = None;
        let (_, mean, inverse) = Tensor::native_batch_norm(
            &input,
            none.as_ref(),
            none.as_ref(),
            Some(&zeros),
            Some(&ones),
            true,
            0.1,
            0.0,
        );
        let seen =
            BatchStatistics { first: 0, momentum: Some(0.1), eps: 0.0, count: 2, mean, inverse };
        let (count, mean, squares) = combine(vec![(MicroBatch(0), seen)]).unwrap().unwrap();
        assert_eq!(count, 2);
        assert_eq!(Vec::<f64>::try_from(mean).unwrap(), [2.0, 7.0]);
        let squares = Vec::<f64>::try_from(squares).unwrap();
        assert!((squares[0] - 2.0).abs() < 1e-6, "rounding of float32: {squares:?}");
        assert_eq!(squares[1], 0.0);
    }
}
