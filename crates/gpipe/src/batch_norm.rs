//! Batch normalisation of micro-batches, and running statistics of mini-batches.
//!
//! Each micro-batch is normalised by its own mean and variance. Their running averages, which evaluation uses, are
//! of the whole mini-batch: what every micro-batch saw is kept apart until the last backward, combined in the order of the
//! micro-batches in float64, and applied together with the update. So they do not depend on K, schedule or
//! re-materialization, and a step that fails leaves them as they were.

use gpipe_core::MicroBatch;
use tch::{Kind, Tensor};

use crate::{error::LayerError, layer::Forward, layers::BatchNorm};

/// What one batch norm saw of one micro-batch.
#[derive(Debug)]
pub(crate) struct BatchStatistics {
    /// Number of its first parameter within the layer.
    pub first: usize,
    pub momentum: Option<f64>,
    /// Values a channel.
    pub count: i64,
    /// `[channels]`, float64.
    pub mean: Tensor,
    /// The sum of squared differences from `mean`: `[channels]`, float64.
    pub squares: Tensor,
}

/// Where the parameters are, from the first one on.
pub(crate) const WEIGHT: usize = 0;
pub(crate) const BIAS: usize = 1;
pub(crate) const MEAN: usize = 2;
pub(crate) const VARIANCE: usize = 3;
pub(crate) const BATCHES: usize = 4;

/// Normalises, and says what it saw if that counts.
pub(crate) fn batch_norm(
    ctx: &Forward,
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
    let parameter = |number: usize| ctx.parameter(first + number);
    let (mean, variance, _) = (parameter(MEAN)?, parameter(VARIANCE)?, parameter(BATCHES)?);
    // Beside running statistics in float32 libtorch wants weights in float32, too.
    let widened = |number| Ok::<_, LayerError>(parameter(number)?.f_to_kind(mean.kind())?);
    let (weight, bias) = (widened(WEIGHT)?, widened(BIAS)?);
    if !ctx.training {
        let (y, ..) = x.f_native_batch_norm(
            Some(&weight),
            Some(&bias),
            Some(mean),
            Some(variance),
            false,
            0.0,
            norm.eps,
        )?;
        return Ok((y, None));
    }
    let count = shape[0] * shape[2..].iter().product::<i64>();
    if count < 2 {
        return Err(LayerError::Shape(format!(
            "batch norm of {shape:?}: one value a channel has no variance; use fewer micro-batches"
        )));
    }
    let (none, momentum) = (None::<&Tensor>, norm.momentum);
    let (y, saved_mean, saved_inverse) =
        x.f_native_batch_norm(Some(&weight), Some(&bias), none, none, true, 0.0, norm.eps)?;
    let _no_grad = tch::no_grad_guard();
    let inverse = saved_inverse.f_to_kind(Kind::Double)?;
    // var = 1 / inverse^2 - eps; what rounding made negative is 0.
    let variance = inverse.f_square()?.f_reciprocal()?.f_sub_scalar(norm.eps)?.f_clamp_min(0.0)?;
    let squares = variance.f_mul_scalar(count as f64)?;
    let mean = saved_mean.f_detach()?.f_to_kind(Kind::Double)?;
    Ok((y, Some(BatchStatistics { first, momentum, count, mean, squares })))
}

/// The statistics of a mini-batch from those of its micro-batches, combined pair by pair in their order (Chan, Golub &
/// LeVeque 1983): (values a channel, mean, sum of squared differences).
pub(crate) fn combine(
    mut all: Vec<(MicroBatch, BatchStatistics)>,
) -> Result<Option<(i64, Tensor, Tensor)>, LayerError> {
    all.sort_by_key(|(micro_batch, _)| *micro_batch);
    let mut combined: Option<(i64, Tensor, Tensor)> = None;
    for (_, BatchStatistics { count, mean, squares, .. }) in all {
        combined = Some(match combined {
            None => (count, mean, squares),
            Some((before, other_mean, other_squares)) => {
                let total = (before + count) as f64;
                let delta = mean.f_sub(&other_mean)?;
                let share = count as f64 / total;
                let both = delta.f_square()?.f_mul_scalar(before as f64 * share)?;
                (
                    before + count,
                    other_mean.f_add(&delta.f_mul_scalar(share)?)?,
                    other_squares.f_add(&squares)?.f_add(&both)?,
                )
            }
        });
    }
    Ok(combined)
}
