//! Random numbers that depend only on their key (invariant 2 in ARCHITECTURE.md).
//!
//! Initial values are keyed by (seed, layer, parameter), dropout masks by (seed, layer, step,
//! global sample, site, element), and the rounding of optimizer state by (seed, parameter, tensor,
//! update, element). None of them changes with the number of stages, micro-batches or replicas.

mod dropout;
mod rounding;

pub(crate) use dropout::{MaskKey, dropout};
use gpipe_bridge::{fill, random::Scope};
use gpipe_core::splitmix::{GAMMA, MULTIPLIERS, at, key};
pub(crate) use rounding::{RoundingKey, round_to_bfloat16};
use tch::{Device, Kind, Tensor};

use crate::{error::LayerError, parameter::Init};

/// First key parts, which give each use of random numbers a separate stream.
const INIT: u64 = 1;
const DROPOUT: u64 = 2;
const OPERATORS: u64 = 3;
const FORK: u64 = 4;
const ROUNDING: u64 = 5;
const ADAPTER: u64 = 6;

/// What the random numbers of one run of a layer depend on: seed, layer, step, and the samples of
/// its micro-batch.
///
/// A copy draws the same numbers again. A layer that computes a part of itself again in its
/// backward keeps a copy for that.
#[derive(Debug, Clone, Copy)]
pub struct Random {
    mask: MaskKey,
    /// Number of samples of the micro-batch.
    samples: i64,
}

impl Random {
    pub(crate) fn new(mask: MaskKey, samples: i64) -> Self {
        Self { mask, samples }
    }

    /// Applies dropout to `x` with probability `p` (Srivastava et al. 2014). The first size of `x`
    /// is the number of samples or a multiple of it, such as [samples * heads, ...].
    ///
    /// The mask depends only on seed, layer, step, global sample and element, and on how many calls
    /// came before.
    ///
    /// # Errors
    /// If the first size does not fit, or an error of libtorch.
    pub fn dropout(&mut self, x: &Tensor, p: f64) -> Result<Tensor, LayerError> {
        let (shape, samples) = (x.size(), self.samples);
        let first = shape.first().copied().unwrap_or(0);
        if samples < 1 || first < 1 || first % samples != 0 {
            return Err(LayerError::Shape(format!(
                "dropout wants [{samples} samples, ...], it got {shape:?}"
            )));
        }
        let dropped = match first == samples {
            true => dropout(x, p, self.mask)?,
            false => {
                let by_sample = x.f_reshape([samples, x.numel() as i64 / samples])?;
                dropout(&by_sample, p, self.mask)?.f_reshape(shape)?
            }
        };
        self.mask.site += 1;
        Ok(dropped)
    }

    /// A key for a part of the layer, other than its own and than those of earlier calls. Random
    /// operators and dropout draw other numbers with it.
    pub fn fork(&mut self) -> Self {
        self.mask.site += 1;
        let MaskKey { seed, site, .. } = self.mask;
        Self { mask: MaskKey { seed: key(&[FORK, seed, site]), site: 0, ..self.mask }, ..*self }
    }

    /// The key of adapter `number`'s dropout, independent of the layer's other draws.
    pub(crate) fn of_adapter(&self, number: u64) -> Self {
        let seed = key(&[ADAPTER, self.mask.seed]);
        Self { mask: MaskKey { seed, site: number, ..self.mask }, ..*self }
    }

    /// Number of samples of the micro-batch.
    pub fn samples(&self) -> i64 {
        self.samples
    }

    /// Position in the mini-batch of the micro-batch's first sample.
    pub fn first_sample(&self) -> i64 {
        self.mask.first_sample as i64
    }

    /// While the result lives, random operators of libtorch on this thread draw numbers that depend
    /// on seed, layer, step and the micro-batch's first sample. Unlike those of
    /// [`Random::dropout`], they depend on M, because one generator serves the micro-batch.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn enter(&self) -> Result<Scope, LayerError> {
        let MaskKey { seed, layer, step, first_sample, .. } = self.mask;
        Ok(Scope::enter(key(&[OPERATORS, seed, layer, step, first_sample]))?)
    }
}

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

/// A standard normal number (Box & Muller 1958): number `index` of the stream of `key`.
fn normal(key: u64, index: u64) -> f64 {
    let (a, b) = (uniform(at(key, 2 * index)), uniform(at(key, 2 * index + 1)));
    (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
}

/// The random numbers `first..first + count` of each stream, int64 [streams, count].
///
/// `keys`: int64 [streams, 1]. The values are those of [`at`], computed with tensor operations on
/// the device of `keys`.
fn on_device(keys: &Tensor, first: i64, count: i64) -> Result<Tensor, LayerError> {
    let options: (Kind, Device) = (Kind::Int64, keys.device());
    let index = Tensor::f_arange_start(first + 1, first + count + 1, options)?;
    let mut z = index.f_reshape([1, count])?.f_mul_scalar(GAMMA as i64)?.f_add(keys)?;
    // A right shift of an int64 extends the sign bit. The mask clears the extension.
    let shifted = |z: &Tensor, by: u32| {
        let low = i64::MAX >> (by - 1);
        z.f_bitwise_right_shift_tensor_scalar(i64::from(by))?.f_bitwise_and_(low)
    };
    for (by, multiplier) in [30, 27].into_iter().zip(MULTIPLIERS) {
        z = z.f_bitwise_xor_tensor_(&shifted(&z, by)?)?.f_mul_scalar_(multiplier as i64)?;
    }
    Ok(z.f_bitwise_xor_tensor_(&shifted(&z, 31)?)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_normals_have_the_right_moments() {
        let normal =
            initial(Init::Normal { std: 2.0 }, &[100_000], Kind::Double, (7, 0, "w")).unwrap();
        assert!(normal.mean(Kind::Double).double_value(&[]).abs() < 5.0 * 2.0 / 316.0);
        assert!((normal.std(true).double_value(&[]) - 2.0).abs() < 5.0 * 2.0 / 447.0);
    }
}
