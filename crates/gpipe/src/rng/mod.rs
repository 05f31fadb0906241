//! Random numbers that depend on nothing but their key (DESIGN: contract 2).
//!
//! Initial values are keyed by (seed, layer, parameter); dropout masks by (seed, layer, step, global
//! sample, site, element). No number of stages, micro-batches or replicas can change either.

use gpipe_bridge::fill;
use gpipe_core::splitmix::{at, key};
use tch::{Kind, Tensor};

use crate::{error::LayerError, layer::Init};

/// Keeps the streams of initial values and of masks apart.
const INIT: u64 = 1;
const DROPOUT: u64 = 2;

/// A stable hash of a name (FNV-1a).
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A uniform number in (0, 1).
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
}

/// A standard normal number (Box & Muller 1958): number `index` of the stream under `key`.
fn normal(key: u64, index: u64) -> f64 {
    let (a, b) = (uniform(at(key, 2 * index)), uniform(at(key, 2 * index + 1)));
    (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
}

/// The initial value of a parameter of `shape`.
pub(crate) fn initial(
    init: Init,
    shape: &[i64],
    kind: Kind,
    (seed, layer, name): (u64, u64, &str),
) -> Result<Tensor, LayerError> {
    let key = key(&[INIT, seed, layer, name_hash(name)]);
    let value = move |index: usize| match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Normal { std } => std * normal(key, index as u64),
        Init::Uniform { bound } => bound * (2.0 * uniform(at(key, index as u64)) - 1.0),
    };
    let tensor = match kind {
        Kind::Double => fill::float64(shape, |elements| {
            elements.iter_mut().enumerate().for_each(|(i, element)| *element = value(i));
        })?,
        _ => fill::float32(shape, |elements| {
            elements.iter_mut().enumerate().for_each(|(i, element)| *element = value(i) as f32);
        })?,
    };
    Ok(if tensor.kind() == kind { tensor } else { tensor.f_to_kind(kind)? })
}

/// What a dropout mask depends on, but for the sample and the element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskKey {
    pub seed: u64,
    pub layer: u64,
    pub step: u64,
    /// Which of the layer's dropouts, in the order in which its forward meets them.
    pub site: u64,
    /// The position in the mini-batch of the first sample here.
    pub first_sample: u64,
}

/// A mask of `shape` ([samples, ...]): 0 with probability `p`, else 1 / (1 - p); `p` in steps of 2^-16.
pub(crate) fn dropout_mask(
    shape: &[i64],
    kind: Kind,
    p: f64,
    mask: MaskKey,
) -> Result<Tensor, LayerError> {
    let threshold = (p * 65536.0).round().clamp(0.0, 65536.0);
    let kept = if threshold < 65536.0 { 65536.0 / (65536.0 - threshold) } else { 0.0 };
    let threshold = threshold as u32;
    let samples = shape.first().copied().unwrap_or(1).max(1) as usize;
    let sample_key = |sample: usize| {
        let sample = mask.first_sample + sample as u64;
        key(&[DROPOUT, mask.seed, mask.layer, mask.step, mask.site, sample])
    };
    // Four draws of 16 bits from each 64-bit number.
    let tensor = match kind {
        Kind::Double => fill::float64(shape, |elements| {
            let row = elements.len().div_ceil(samples).max(1);
            for (sample, elements) in elements.chunks_mut(row).enumerate() {
                draw(sample_key(sample), elements, threshold, kept);
            }
        })?,
        _ => fill::float32(shape, |elements| {
            let row = elements.len().div_ceil(samples).max(1);
            for (sample, elements) in elements.chunks_mut(row).enumerate() {
                draw(sample_key(sample), elements, threshold, kept as f32);
            }
        })?,
    };
    Ok(if tensor.kind() == kind { tensor } else { tensor.f_to_kind(kind)? })
}

fn draw<T: Copy + Default>(key: u64, elements: &mut [T], threshold: u32, kept: T) {
    for (index, four) in elements.chunks_mut(4).enumerate() {
        let mut bits = at(key, index as u64);
        for element in four {
            *element = if (bits as u16) as u32 >= threshold { kept } else { T::default() };
            bits >>= 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_a_mask_row_depends_on_its_sample_alone() {
        let key = |first_sample| MaskKey { seed: 1, layer: 2, step: 3, site: 0, first_sample };
        let whole = dropout_mask(&[6, 10, 7], Kind::Float, 0.3, key(0)).unwrap();
        for (first, count) in [(0, 2), (2, 3), (5, 1)] {
            let part = dropout_mask(&[count, 10, 7], Kind::Float, 0.3, key(first as u64)).unwrap();
            assert_eq!(part, whole.narrow(0, first, count));
        }
        let other = dropout_mask(&[6, 10, 7], Kind::Float, 0.3, MaskKey { step: 4, ..key(0) });
        assert_ne!(other.unwrap(), whole);
    }

    #[test]
    fn oracle_masks_and_normals_have_the_right_moments() {
        let key = MaskKey { seed: 1, layer: 2, step: 3, site: 0, first_sample: 0 };
        let mask = dropout_mask(&[100, 1000], Kind::Double, 0.1, key).unwrap();
        // Standard error of the mean: sqrt(p / (1 - p) / 1e5) = 0.001; five of them.
        assert!((mask.mean(Kind::Double).double_value(&[]) - 1.0).abs() < 5e-3);
        let normal =
            initial(Init::Normal { std: 2.0 }, &[100_000], Kind::Double, (7, 0, "w")).unwrap();
        assert!(normal.mean(Kind::Double).double_value(&[]).abs() < 5.0 * 2.0 / 316.0);
        assert!((normal.std(true).double_value(&[]) - 2.0).abs() < 5.0 * 2.0 / 447.0);
        let nothing = dropout_mask(&[3, 3], Kind::Float, 1.0, key).unwrap();
        assert_eq!(nothing.sum(Kind::Float).double_value(&[]), 0.0);
    }
}
