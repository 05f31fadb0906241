//! What the tests of several modules need.

use tch::{Device, Kind, Tensor};

/// Values in (-1, 1) in float64, which depend only on their positions and on `seed`.
pub(crate) fn values(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let position = Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed;
    (position * 12.9898).sin().reshape(shape)
}

/// A leaf in float32 with values in (-1, 1), which depend only on their positions and on `seed`.
pub(crate) fn leaf(shape: &[i64], seed: i64) -> Tensor {
    let count: i64 = shape.iter().product();
    let x = Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.37 + seed as f64;
    x.sin().reshape(shape).set_requires_grad(true)
}
