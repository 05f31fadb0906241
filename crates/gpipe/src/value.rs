//! Values that move between layers and stages: tuples of tensors.

use gpipe_bridge::device::Event;
use gpipe_core::Bytes;
use gpipe_runtime::Payload;
use tch::Tensor;

/// A tuple of tensors. Some may be absent, such as the gradient of an integer tensor. A value moves
/// between stages of one process without a copy, unless they are on different devices.
#[derive(Debug, Default)]
pub struct Value {
    tensors: Vec<Option<Tensor>>,
    /// Signals that the tensors are ready, if a GPU still computes or copies them.
    ready: Option<Event>,
}

impl Value {
    /// A value whose tensors are ready.
    pub fn new(tensors: Vec<Option<Tensor>>) -> Self {
        Self { tensors, ready: None }
    }

    /// A value whose tensors are ready once `ready` fires.
    pub fn under_way(tensors: Vec<Option<Tensor>>, ready: Event) -> Self {
        Self { tensors, ready: Some(ready) }
    }

    /// The event to wait for before using the tensors.
    pub(crate) fn ready(&self) -> Option<&Event> {
        self.ready.as_ref()
    }

    /// Returns the tensors, and the event to wait for before using them.
    pub fn into_parts(self) -> (Vec<Option<Tensor>>, Option<Event>) {
        (self.tensors, self.ready)
    }
}

impl Payload for Value {
    fn bytes(&self) -> Bytes {
        Bytes(self.tensors.iter().flatten().map(tensor_bytes).sum())
    }
}

/// Size of a tensor's elements in bytes; 0 for an undefined tensor.
pub fn tensor_bytes(tensor: &Tensor) -> u64 {
    if tensor.defined() { (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64 } else { 0 }
}
