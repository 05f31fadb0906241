//! What moves between layers and stages: a tuple of tensors.

use gpipe_core::Bytes;
use gpipe_runtime::Payload;
use tch::Tensor;

/// A tuple of tensors, some of which may be absent (the gradient of an integer tensor, say). It moves
/// between stages of one process without a copy.
#[derive(Debug, Default)]
pub struct Value(pub Vec<Option<Tensor>>);

impl Payload for Value {
    fn bytes(&self) -> Bytes {
        Bytes(self.0.iter().flatten().map(tensor_bytes).sum())
    }
}

impl From<Vec<Tensor>> for Value {
    fn from(tensors: Vec<Tensor>) -> Self {
        Self(tensors.into_iter().map(Some).collect())
    }
}

/// The bytes of a tensor's elements.
pub fn tensor_bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// What a pipeline takes as inputs or targets: one tensor, or several with the same first size.
pub trait IntoTensors {
    /// The tensors, in order. Nothing is copied.
    fn into_tensors(self) -> Vec<Tensor>;
}

impl IntoTensors for Vec<Tensor> {
    fn into_tensors(self) -> Vec<Tensor> {
        self
    }
}

impl IntoTensors for &[Tensor] {
    fn into_tensors(self) -> Vec<Tensor> {
        self.iter().map(Tensor::shallow_clone).collect()
    }
}

impl IntoTensors for Tensor {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl IntoTensors for &Tensor {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.shallow_clone()]
    }
}
