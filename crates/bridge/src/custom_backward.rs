//! A backward in Rust, as C++ holds and calls it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::{Error, Result, adopt};

/// Computes the gradients of the inputs: from what was saved, the gradients of the outputs (`None`
/// where there is none), and whether each input's gradient is wanted.
pub(crate) type Compute =
    dyn Fn(&[Tensor], &[Option<Tensor>], &[bool]) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// What the text of a failed backward begins with. It passes through libtorch, which knows only
/// texts.
const FAILED: &str = "the backward of a custom function failed: ";

/// The reason of a failed backward, if `error` is of one and not libtorch's.
pub fn failure(error: &Error) -> Option<&str> {
    error.0.strip_prefix(FAILED)
}

/// A backward, as C++ holds it.
pub(crate) struct CustomBackward {
    compute: Box<Compute>,
    /// Shape and dtype of each input.
    inputs: Vec<(Vec<i64>, tch::Kind)>,
}

impl CustomBackward {
    pub(crate) fn new(compute: Box<Compute>, inputs: Vec<(Vec<i64>, tch::Kind)>) -> Self {
        Self { compute, inputs }
    }

    /// Called by the autograd node. Tensors are owned, 0 is none.
    pub(crate) fn call(
        &self,
        saved: Vec<usize>,
        grads: Vec<usize>,
        wanted: &Vec<bool>,
    ) -> std::result::Result<Vec<usize>, String> {
        self.gradients(saved, grads, wanted).map_err(|reason| format!("{FAILED}{reason}"))
    }

    fn gradients(
        &self,
        saved: Vec<usize>,
        grads: Vec<usize>,
        wanted: &Vec<bool>,
    ) -> std::result::Result<Vec<usize>, String> {
        let saved: Vec<Tensor> = saved.into_iter().filter_map(adopt).collect();
        let grads: Vec<Option<Tensor>> = grads.into_iter().map(adopt).collect();
        let computed = catch_unwind(AssertUnwindSafe(|| (self.compute)(&saved, &grads, wanted)));
        let found = match computed {
            Ok(found) => found.map_err(|error| error.0)?,
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                return Err(format!("its code panicked: {}", text.unwrap_or_default()));
            }
        };
        if found.len() != self.inputs.len() {
            let (found, inputs) = (found.len(), self.inputs.len());
            return Err(format!("it gives {found} gradients for {inputs} inputs"));
        }
        for (index, (grad, (shape, kind))) in found.iter().zip(&self.inputs).enumerate() {
            let Some(grad) = grad else { continue };
            if (grad.size(), grad.kind()) != (shape.clone(), *kind) {
                let (size, own) = (grad.size(), grad.kind());
                return Err(format!(
                    "it gives a gradient {own:?} {size:?} for input {index}, {kind:?} {shape:?}"
                ));
            }
        }
        Ok(found.into_iter().zip(wanted).map(|(grad, &wanted)| release(grad, wanted)).collect())
    }
}

/// Gives the tensor to C++; 0 if there is none, or if it is not wanted.
fn release(tensor: Option<Tensor>, wanted: bool) -> usize {
    let Some(tensor) = tensor.filter(|_| wanted) else { return 0 };
    let tensor = std::mem::ManuallyDrop::new(tensor);
    tensor.as_ptr() as usize
}
