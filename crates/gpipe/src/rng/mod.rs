//! Random numbers that depend only on their key (invariant 2 in ARCHITECTURE.md).
//!
//! Initial values are keyed by (seed, layer, parameter), dropout masks by (seed, layer, step,
//! global sample, site, element). Neither changes with the number of stages, micro-batches or
//! replicas.

mod dropout;

pub(crate) use dropout::{MaskKey, dropout};
use gpipe_bridge::fill;
use gpipe_core::splitmix::{at, key};
use tch::{Kind, Tensor};

use crate::{error::LayerError, parameter::Init};

/// First key parts that keep initial values and dropout masks in separate streams.
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

/// A standard normal number (Box & Muller 1958): number `index` of the stream of `key`.
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
