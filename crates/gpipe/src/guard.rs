//! Checks around calls of user code: panics, non-finite values, and tensors changed in place.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpipe_bridge::memory;
use gpipe_runtime::panic_message;
use tch::Tensor;

use crate::error::LayerError;

/// Calls user code and turns a panic into an error, to which the caller adds the layer's name.
///
/// tch itself panics when an operation that takes a number (such as `f_mul_scalar`) runs out of
/// memory. That panic is reported as out of memory.
pub(crate) fn catching<T>(call: impl FnOnce() -> Result<T, LayerError>) -> Result<T, LayerError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let told = || match panic_message(panic.as_ref()) {
            text if text.contains("CUDA out of memory") => LayerError::GpuOutOfMemory(text),
            text => LayerError::Panic(text),
        };
        Err(memory::take_refusal().map_or_else(told, LayerError::OutOfMemory))
    })
}

/// Detects in-place changes of tensors. It misses a change through `Tensor::data`, which hides the
/// change from autograd.
pub(crate) struct Untouched<'t> {
    /// With their versions. Undefined tensors have none.
    tensors: Vec<(&'t Tensor, Option<i64>)>,
}

impl<'t> Untouched<'t> {
    pub(crate) fn new(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<Self, LayerError> {
        let with_version = |tensor: &'t Tensor| Ok((tensor, version(tensor)?));
        let tensors = tensors.into_iter().map(with_version).collect::<Result<_, LayerError>>()?;
        Ok(Self { tensors })
    }

    /// The index of the first tensor that was changed.
    pub(crate) fn changed(&self) -> Result<Option<usize>, LayerError> {
        for (index, (tensor, before)) in self.tensors.iter().enumerate() {
            if version(tensor)? != *before {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }
}

fn version(tensor: &Tensor) -> Result<Option<i64>, LayerError> {
    Ok(tensor.defined().then(|| tensor.f_internal_version()).transpose()?)
}
