//! All-reduce of gradients and statistics over the replicas of a pipeline.
//!
//! Each layer's gradients form a bucket. It is summed as soon as the layer's last backward is done,
//! while earlier layers still run backwards (Li et al. 2020, PyTorch Distributed, section 3.2.3).
//!
//! The order in which an all-reduce adds depends on an element's position in the bucket. Buckets of
//! several layers would depend on the cut. One bucket per layer does not, so results are the same
//! to the last bit for every number of stages.

use std::collections::VecDeque;

use gpipe_core::cost::SUMS_UNDER_WAY;
use tch::{Kind, Tensor};

use super::{
    config::StageConfig,
    gradients::Gradients,
    parameters::{ParamIndex, Parameters},
};
use crate::{error::LayerError, processes::Summing, value::tensor_bytes};

/// Maximum number of sums under way, far below what the transport takes.
const SUMS_MAX: usize = 1024;

/// The all-reduces of one stage in a step.
pub(super) struct Reduction {
    /// Layers of the stage from this one on have been sent.
    from: usize,
    under_way: VecDeque<Bucket>,
}

/// The gradients of one layer, in flight.
struct Bucket {
    places: Vec<ParamIndex>,
    /// Size of the message: all gradients, one after the other, then one number per gradient that
    /// counts the replicas which have it.
    bytes: u64,
}

/// Batch norm statistics of a mini-batch in float64: the number of values per channel, their mean,
/// and the sum of squared differences from the mean.
pub(crate) struct BatchMoments {
    pub(crate) count: i64,
    pub(crate) mean: Tensor,
    pub(crate) squares: Tensor,
}

impl Reduction {
    /// The state at the start of a step, for a stage with `layers` layers.
    pub(super) fn new(layers: usize) -> Self {
        Self { from: layers, under_way: VecDeque::new() }
    }

    /// The state when every gradient is already the sum over all replicas.
    pub(super) fn done() -> Self {
        Self::new(0)
    }

    /// Sends the gradients of the layers from position `layer` on, which are final.
    pub(super) fn complete(
        &mut self,
        summing: &mut dyn Summing,
        gradients: &mut Gradients,
        parameters: &Parameters,
        config: &StageConfig,
        layer: usize,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        while self.from > layer {
            // Every replica sends the same buckets in the same order, whichever gradients it has.
            self.from -= 1;
            let specs = config.named[self.from].parameters.iter().enumerate();
            let trained = specs.filter(|(_, spec)| spec.trainable);
            let places: Vec<ParamIndex> = trained.map(|(slot, _)| (self.from, slot)).collect();
            if !places.is_empty() {
                self.send(summing, gradients, parameters, places)?;
            }
        }
        Ok(())
    }

    /// Waits until every gradient is the sum over all replicas.
    pub(super) fn finish(
        &mut self,
        summing: &mut dyn Summing,
        gradients: &mut Gradients,
        parameters: &Parameters,
        config: &StageConfig,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.complete(summing, gradients, parameters, config, 0)?;
        while !self.under_way.is_empty() {
            self.settle(summing, gradients, parameters)?;
        }
        Ok(())
    }

    /// Begins to sum a bucket.
    fn send(
        &mut self,
        summing: &mut dyn Summing,
        gradients: &mut Gradients,
        parameters: &Parameters,
        places: Vec<ParamIndex>,
    ) -> Result<(), LayerError> {
        while self.under_way.len() >= SUMS_MAX
            || self.under_way.iter().map(|bucket| bucket.bytes).sum::<u64>() >= SUMS_UNDER_WAY.0
        {
            self.settle(summing, gradients, parameters)?;
        }
        let mut parts = Vec::with_capacity(places.len() + 1);
        let mut present = Vec::with_capacity(places.len());
        let mut kind = Kind::Float;
        for &(layer, slot) in &places {
            let master = &parameters.masters[layer][slot];
            let grad = gradients.of((layer, slot));
            present.push(if grad.is_some() { 1.0 } else { 0.0 });
            kind = master.kind();
            parts.push(match grad {
                Some(grad) => grad.f_reshape([-1])?,
                None => master.f_zeros_like()?.f_reshape([-1])?,
            });
        }
        let present = Tensor::f_from_slice::<f64>(&present)?.f_to_kind(kind)?;
        parts.push(present.f_to(parts.first().map_or(tch::Device::Cpu, Tensor::device))?);
        let flat = Tensor::f_cat(&parts, 0)?.f_to(tch::Device::Cpu)?;
        self.under_way.push_back(Bucket { places, bytes: tensor_bytes(&flat) });
        summing.begin(flat).map_err(lost)?;
        Ok(())
    }

    /// Waits for the oldest bucket, and stores its sums as the gradients.
    fn settle(
        &mut self,
        summing: &mut dyn Summing,
        gradients: &mut Gradients,
        parameters: &Parameters,
    ) -> Result<(), LayerError> {
        let Some(Bucket { places, .. }) = self.under_way.pop_front() else { return Ok(()) };
        let flat = summing.end().map_err(lost)?;
        let count = places.len() as i64;
        let present = flat.f_narrow(0, flat.size1()? - count, count)?.f_to_kind(Kind::Double)?;
        let present = Vec::<f64>::try_from(&present)?;
        let mut start = 0;
        for ((layer, slot), present) in places.into_iter().zip(present) {
            let master = &parameters.masters[layer][slot];
            let length = master.numel() as i64;
            let sum = flat.f_narrow(0, start, length)?.f_view(master.size().as_slice())?;
            start += length;
            match gradients.place((layer, slot)) {
                Some(grad) => grad.f_copy_(&sum)?,
                // Only other replicas have this gradient.
                none if present > 0.0 => *none = Some(sum.f_detach_copy()?.f_to(master.device())?),
                None => {}
            }
        }
        Ok(())
    }
}

/// Combines the batch norm statistics of each replica into those of the whole mini-batch.
pub(super) fn combine(
    summing: &mut dyn Summing,
    all: &mut [BatchMoments],
) -> Result<(), LayerError> {
    let _no_grad = tch::no_grad_guard();
    let count = |seen: &BatchMoments| Tensor::f_from_slice(&[seen.count as f64]);
    let weighted = |seen: &BatchMoments| seen.mean.f_mul_scalar(seen.count as f64);
    let parts = all.iter().map(|seen| Ok([count(seen)?, weighted(seen)?]));
    let sums = sum(summing, parts.collect::<Result<Vec<_>, LayerError>>()?)?;
    let mut means = Vec::new();
    for [count, sum] in sums {
        let total = count.f_double_value(&[0])?;
        means.push((total as i64, sum.f_div_scalar(total)?));
    }
    let apart = |(seen, (_, mean)): (&BatchMoments, &(i64, Tensor))| {
        let apart = seen.mean.f_to(tch::Device::Cpu)?.f_sub(mean)?.f_square()?;
        let squares = seen.squares.f_to(tch::Device::Cpu)?;
        Ok([squares.f_add(&apart.f_mul_scalar(seen.count as f64)?)?])
    };
    let parts = all.iter().zip(&means).map(apart).collect::<Result<Vec<_>, LayerError>>()?;
    let sums = sum(summing, parts)?;
    for ((seen, (count, mean)), [squares]) in all.iter_mut().zip(means).zip(sums) {
        let device = seen.mean.device();
        *seen = BatchMoments { count, mean: mean.f_to(device)?, squares: squares.f_to(device)? };
    }
    Ok(())
}

/// Sums the one-dimensional float64 tensors of each part over all replicas, on the CPU. Parts are
/// summed separately, like layers.
fn sum<const N: usize>(
    summing: &mut dyn Summing,
    parts: Vec<[Tensor; N]>,
) -> Result<Vec<[Tensor; N]>, LayerError> {
    let mut flat = Vec::with_capacity(parts.len());
    for (begun, part) in parts.iter().enumerate() {
        if begun - flat.len() >= SUMS_MAX {
            flat.push(summing.end().map_err(lost)?);
        }
        let own = part.iter().map(|tensor| tensor.f_to(tch::Device::Cpu));
        let own = Tensor::f_cat(&own.collect::<Result<Vec<_>, _>>()?, 0)?;
        summing.begin(own).map_err(lost)?;
    }
    while flat.len() < parts.len() {
        flat.push(summing.end().map_err(lost)?);
    }
    let mut sums = Vec::with_capacity(parts.len());
    for (part, flat) in parts.into_iter().zip(flat) {
        let (mut start, mut own) = (0, part);
        for tensor in &mut own {
            let length = tensor.numel() as i64;
            *tensor = flat.f_narrow(0, start, length)?;
            start += length;
        }
        sums.push(own);
    }
    Ok(sums)
}

/// Whether something is so in any replica.
pub(super) fn any(summing: &mut dyn Summing, own: bool) -> Result<bool, LayerError> {
    let _no_grad = tch::no_grad_guard();
    let own = Tensor::f_from_slice(&[f64::from(u8::from(own))])?;
    let sums = sum(summing, vec![[own]])?;
    Ok(sums[0][0].f_double_value(&[0])? > 0.0)
}

fn lost(error: crate::processes::PeerError) -> LayerError {
    LayerError::Value(error.to_string())
}
