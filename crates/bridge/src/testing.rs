//! What the tests of several modules need.

use tch::{Device, Kind, Tensor};

/// A leaf whose values in (-1, 1) depend only on their positions and on `seed`.
pub(crate) fn random(shape: &[i64], seed: i64) -> Tensor {
    let count: i64 = shape.iter().product();
    let x = Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.37 + seed as f64;
    x.sin().reshape(shape).set_requires_grad(true)
}
