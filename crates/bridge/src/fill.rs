//! New tensors whose elements Rust writes in place, without a second buffer or a copy.

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Creates a contiguous float32 CPU tensor of `shape`; `write` sets its elements (row-major).
///
/// # Errors
/// A negative size; out of memory.
pub fn float32(shape: &[i64], write: impl FnOnce(&mut [f32])) -> Result<Tensor> {
    new(shape, Kind::Float, write)
}

/// As [`float32`], with float64 elements.
///
/// # Errors
/// A negative size; out of memory.
pub fn float64(shape: &[i64], write: impl FnOnce(&mut [f64])) -> Result<Tensor> {
    new(shape, Kind::Double, write)
}

/// As [`float32`], with int16 elements.
///
/// # Errors
/// A negative size; out of memory.
pub fn int16(shape: &[i64], write: impl FnOnce(&mut [i16])) -> Result<Tensor> {
    new(shape, Kind::Int16, write)
}

fn new<T>(shape: &[i64], kind: Kind, write: impl FnOnce(&mut [T])) -> Result<Tensor> {
    // Zeroed rather than empty, because `write` gets a `&mut [T]`, whose memory must be
    // initialized.
    let tensor =
        Tensor::f_zeros(shape, (kind, Device::Cpu)).map_err(|error| Error(error.to_string()))?;
    let count = tensor.numel();
    if count > 0 {
        // SAFETY: the tensor is new, contiguous and on the CPU, and has `count` initialized
        // elements. The callers pair `kind` with its Rust type. Nothing else refers to the
        // elements.
        write(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), count) });
    }
    Ok(tensor)
}
