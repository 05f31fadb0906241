//! Dropout masks: a function of (seed, layer, step, global sample, site, element), on any device.
//!
//! A device's generator would not do: its numbers depend on the order of calls and on the device,
//! so a mask would change with the number of stages. On a CPU the mask is written in Rust, in a bit
//! less than half a millisecond for 8 x 128 x 512 elements. Elsewhere the same 64-bit arithmetic
//! runs as tensor operations.

use gpipe_bridge::{device::upload, fill, ledger::Scope};
use gpipe_core::splitmix::{at, key};
use tch::{Device, Kind, Tensor};

use super::{DROPOUT, on_device};
use crate::error::LayerError;

/// What a dropout mask depends on, except for the sample and the element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskKey {
    pub seed: u64,
    pub layer: u64,
    pub step: u64,
    /// Which of the layer's dropouts, in the order of its forward.
    pub site: u64,
    /// Position in the mini-batch of the micro-batch's first sample.
    pub first_sample: u64,
}

impl MaskKey {
    /// The key of sample number `sample` of this micro-batch.
    fn of_sample(&self, sample: usize) -> u64 {
        let sample = self.first_sample + sample as u64;
        key(&[DROPOUT, self.seed, self.layer, self.step, self.site, sample])
    }
}

/// Zeroes each element of `x` ([samples, ...]) with probability `p`, in steps of 2^-16, and divides
/// the others by 1 - p.
pub(crate) fn dropout(x: &Tensor, p: f64, mask: MaskKey) -> Result<Tensor, LayerError> {
    let threshold = (p * 65536.0).round().clamp(0.0, 65536.0);
    let scale = if threshold < 65536.0 { 65536.0 / (65536.0 - threshold) } else { 0.0 };
    let (threshold, shape, kind) = (threshold as u32, x.size(), x.kind());
    if matches!(kind, Kind::Float | Kind::Double) {
        let mask = match x.device() {
            Device::Cpu => host_mask(&shape, kind, threshold, scale, mask)?,
            device => {
                let kept = device_mask(&shape, threshold, mask, device)?;
                kept.f_to_kind(kind)?.f_mul_scalar_(scale)?
            }
        };
        return Ok(x.f_mul(&mask)?);
    }
    // Zero first and scale in float32 afterwards: a scale in bfloat16 would be off by up to 0.4%.
    let kept = match x.device() {
        Device::Cpu => host_mask(&shape, Kind::Float, threshold, 1.0, mask)?,
        device => device_mask(&shape, threshold, mask, device)?,
    };
    let kept = kept.f_to_kind(kind)?;
    Ok(x.f_mul(&kept)?.f_mul_scalar(scale)?)
}

/// A mask made on the host: 0 where an element is dropped, otherwise `kept`.
fn host_mask(
    shape: &[i64],
    kind: Kind,
    threshold: u32,
    kept: f64,
    mask: MaskKey,
) -> Result<Tensor, LayerError> {
    let _scope = Scope::enter("gpipe::dropout mask")?;
    let samples = shape.first().copied().unwrap_or(1).max(1) as usize;
    fn rows<T: Copy + Default>(
        elements: &mut [T],
        samples: usize,
        threshold: u32,
        kept: T,
        mask: MaskKey,
    ) {
        let row = elements.len().div_ceil(samples).max(1);
        for (sample, elements) in elements.chunks_mut(row).enumerate() {
            draw(mask.of_sample(sample), elements, threshold, kept);
        }
    }
    Ok(match kind {
        Kind::Double => fill::float64(shape, |all| rows(all, samples, threshold, kept, mask))?,
        _ => fill::float32(shape, |all| rows(all, samples, threshold, kept as f32, mask))?,
    })
}

/// Draws four numbers of 16 bits from each 64-bit number.
fn draw<T: Copy + Default>(key: u64, elements: &mut [T], threshold: u32, kept: T) {
    for (index, four) in elements.chunks_mut(4).enumerate() {
        let mut bits = at(key, index as u64);
        for element in four {
            *element = if (bits as u16) as u32 >= threshold { kept } else { T::default() };
            bits >>= 16;
        }
    }
}

/// Whether each element is kept: the same as [`draw`], in int64 arithmetic on `device`. It holds
/// 4 bytes for each element.
fn device_mask(
    shape: &[i64],
    threshold: u32,
    mask: MaskKey,
    device: Device,
) -> Result<Tensor, LayerError> {
    // Of one sign, so that comparing int16 compares the unsigned numbers.
    const SIGNS: u64 = 0x8000_8000_8000_8000;
    let Ok(threshold) = i16::try_from(i64::from(threshold) - 0x8000) else {
        return Ok(Tensor::f_zeros(shape, (Kind::Bool, device))?); // all are dropped
    };
    let samples = shape.first().copied().unwrap_or(1).max(1);
    let row = shape.iter().skip(1).product::<i64>();
    let words = (row + 3) / 4;
    let keys: Vec<i64> = (0..samples as usize).map(|s| mask.of_sample(s) as i64).collect();
    let keys = upload(&Tensor::f_from_slice(&keys)?, device)?.f_reshape([samples, 1])?;
    let draws = on_device(&keys, 0, words)?.f_bitwise_xor_(SIGNS as i64)?;
    // Both are little-endian: the first number is the lowest quarter of a word.
    let draws = draws.f_view_dtype(Kind::Int16)?.f_narrow(1, 0, row)?;
    Ok(draws.f_ge(i64::from(threshold))?.f_reshape(shape)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: MaskKey = MaskKey { seed: 1, layer: 2, step: 3, site: 0, first_sample: 0 };

    fn ones(shape: &[i64]) -> Tensor {
        Tensor::ones(shape, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn property_a_mask_row_depends_on_its_sample_alone() {
        let key = |first_sample| MaskKey { first_sample, ..KEY };
        let whole = dropout(&ones(&[6, 10, 7]), 0.3, key(0)).unwrap();
        for (first, count) in [(0, 2), (2, 3), (5, 1)] {
            let part = dropout(&ones(&[count, 10, 7]), 0.3, key(first as u64)).unwrap();
            assert_eq!(part, whole.narrow(0, first, count));
        }
        let other = dropout(&ones(&[6, 10, 7]), 0.3, MaskKey { step: 4, ..KEY }).unwrap();
        assert_ne!(other, whole);
    }

    #[test]
    fn oracle_the_device_arithmetic_gives_the_same_mask() {
        for (shape, threshold) in
            [(vec![5, 3, 7], 20_000), (vec![1, 64], 1), (vec![3, 1], 65_535), (vec![2, 3], 65_536)]
        {
            let host = host_mask(&shape, Kind::Float, threshold, 1.0, KEY).unwrap();
            let device = device_mask(&shape, threshold, KEY, Device::Cpu).unwrap();
            assert_eq!(device.to_kind(Kind::Float), host);
        }
    }

    #[test]
    fn oracle_masks_have_the_right_moments() {
        let dropped = dropout(&ones(&[100, 1000]), 0.1, KEY).unwrap();
        // Standard error of the mean: sqrt(p / (1 - p) / 1e5) = 0.001; five of them.
        assert!((dropped.mean(Kind::Double).double_value(&[]) - 1.0).abs() < 5e-3);
        let nothing = dropout(&ones(&[3, 3]), 1.0, KEY).unwrap();
        assert_eq!(nothing.sum(Kind::Float).double_value(&[]), 0.0);
    }

    #[test]
    fn oracle_bfloat16_rounds_once() {
        let x = Tensor::arange(1000, (Kind::Float, Device::Cpu)).reshape([10, 100]) / 7.0;
        let x = x.to_kind(Kind::BFloat16);
        let expected = dropout(&x.to_kind(Kind::Float), 0.1, KEY).unwrap().to_kind(Kind::BFloat16);
        assert_eq!(dropout(&x, 0.1, KEY).unwrap(), expected);
    }
}
