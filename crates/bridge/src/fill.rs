//! New tensors whose elements Rust computes, written in place: no second buffer, no copy.

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// A new contiguous CPU tensor of float32 with `shape`, its elements (row-major) set by `write`.
///
/// # Errors
/// A negative size, or no memory.
pub fn float32(shape: &[i64], write: impl FnOnce(&mut [f32])) -> Result<Tensor> {
    new(shape, Kind::Float, write)
}

/// As [`float32`], with float64.
///
/// # Errors
/// A negative size, or no memory.
pub fn float64(shape: &[i64], write: impl FnOnce(&mut [f64])) -> Result<Tensor> {
    new(shape, Kind::Double, write)
}

fn new<T>(shape: &[i64], kind: Kind, write: impl FnOnce(&mut [T])) -> Result<Tensor> {
    // Zeroed, not empty: `write` gets initialised memory, as a `&mut [T]` must be.
    let tensor =
        Tensor::f_zeros(shape, (kind, Device::Cpu)).map_err(|error| Error(error.to_string()))?;
    let count = tensor.numel();
    if count > 0 {
        // SAFETY: the tensor is new, contiguous, on the CPU and of `kind`, which both callers pair
        // with its Rust type; it has `count` initialised elements, and nothing else refers to them.
        write(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), count) });
    }
    Ok(tensor)
}
