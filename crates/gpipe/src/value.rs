//! What moves between layers and stages: a tuple of tensors.

use gpipe_bridge::device::Event;
use gpipe_core::Bytes;
use gpipe_runtime::Payload;
use tch::Tensor;

/// A tuple of tensors, some of which may be absent (the gradient of an integer tensor, say). It
/// moves between stages of one process without a copy.
#[derive(Debug, Default)]
pub struct Value {
    tensors: Vec<Option<Tensor>>,
    /// When the tensors are there, if they are still being copied from another device.
    ready: Option<Event>,
}

impl Value {
    /// Tensors that are there.
    pub fn new(tensors: Vec<Option<Tensor>>) -> Self {
        Self { tensors, ready: None }
    }

    /// Tensors that are there when `ready` is.
    pub(crate) fn under_way(tensors: Vec<Option<Tensor>>, ready: Event) -> Self {
        Self { tensors, ready: Some(ready) }
    }

    /// The tensors, and what to wait for before they are used.
    pub fn into_parts(self) -> (Vec<Option<Tensor>>, Option<Event>) {
        (self.tensors, self.ready)
    }
}

impl Payload for Value {
    fn bytes(&self) -> Bytes {
        Bytes(self.tensors.iter().flatten().map(tensor_bytes).sum())
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
