//! What one layer takes and holds for one micro-batch.

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::remat::Remat;
use crate::units::{Bytes, Nanos};

/// The times and bytes of one layer (or the loss) for one micro-batch of a given size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCost {
    /// A forward that keeps nothing.
    pub forward: Nanos,
    /// A forward that keeps its activations.
    pub forward_kept: Nanos,
    /// A re-materialization.
    pub rematerialize: Nanos,
    /// A re-materialization that reuses the kept outputs of products ([`Remat::Selective`]). No
    /// longer than `rematerialize`; 0 if unknown.
    #[serde(default)]
    pub rematerialize_selective: Nanos,
    /// A backward after a re-materialization.
    pub backward: Nanos,
    /// A backward whose forward kept its activations.
    pub backward_kept: Nanos,
    /// The first half of a split backward: the gradients of its inputs.
    #[serde(default)]
    pub backward_input: Nanos,
    /// The second half: the gradients of its weights.
    #[serde(default)]
    pub backward_weight: Nanos,
    /// Its inputs: what crosses a cut before this layer.
    pub inputs: Bytes,
    /// The gradients of its inputs, which cross the cut backwards; 0 if nothing before it is
    /// trained.
    pub input_gradients: Bytes,
    /// What a forward that keeps leaves until the backward: outputs, and what autograd saves. The
    /// layer's inputs are not included.
    pub kept: Bytes,
    /// The part of `kept` that a re-materialization does not make when this layer ends it: outputs
    /// that no backward reads. 0 if unknown, or if the layer runs to its end.
    #[serde(default)]
    pub unread: Bytes,
    /// The outputs of its matrix products and convolutions, which [`Remat::Selective`] keeps.
    #[serde(default)]
    pub products: Bytes,
    /// Peak of a forward, above its start.
    pub forward_peak: Bytes,
    /// Peak of a re-materialization that reuses `products`, above its start, when they are already
    /// there.
    #[serde(default)]
    pub selective_peak: Bytes,
    /// Peak of a backward, above its start. What the layer kept and the gradient of its outputs are
    /// already there.
    pub backward_peak: Bytes,
    /// The same for a step's first backward, which allocates the parameters' gradients.
    pub first_backward_peak: Bytes,
    /// What the first half of a split backward leaves for the second: parts of what the layer kept,
    /// and gradients. Parameter gradients that the first half already computes are not included
    /// ([`LayerState::early`](super::LayerState::early)). Profiles without `early` do include them.
    #[serde(default)]
    pub split: Bytes,
    /// Like `backward_peak`, for the first half of a split backward.
    #[serde(default)]
    pub backward_input_peak: Bytes,
    /// Like `backward_peak`, for the second half. `split` is already there at the start.
    #[serde(default)]
    pub backward_weight_peak: Bytes,
    /// Like `backward_weight_peak`, for a step's first weight gradients. Their accumulators are
    /// allocated then, except those that the first half allocated.
    #[serde(default)]
    pub first_backward_weight_peak: Bytes,
}

impl LayerCost {
    pub(crate) fn has_halves(&self) -> bool {
        self.backward_input + self.backward_weight > Nanos(0)
    }

    pub(super) fn has_selective(&self) -> bool {
        self.rematerialize_selective > Nanos(0)
    }

    pub(super) fn has_whole(&self) -> bool {
        self.backward + self.backward_kept > Nanos(0)
    }

    /// Applies `f` to every number. NaN and negative results become 0.
    pub(super) fn map(&self, f: impl Fn(u64) -> f64) -> Self {
        self.zip(self, |a, _| f(a))
    }

    /// Applies `f` to every pair of numbers.
    pub(super) fn zip(&self, other: &Self, f: impl Fn(u64, u64) -> f64) -> Self {
        let f = |a: u64, b: u64| f(a, b).round().max(0.0) as u64;
        let time = |a: Nanos, b: Nanos| Nanos(f(a.0, b.0));
        let bytes = |a: Bytes, b: Bytes| Bytes(f(a.0, b.0));
        Self {
            forward: time(self.forward, other.forward),
            forward_kept: time(self.forward_kept, other.forward_kept),
            rematerialize: time(self.rematerialize, other.rematerialize),
            rematerialize_selective: time(
                self.rematerialize_selective,
                other.rematerialize_selective,
            ),
            backward: time(self.backward, other.backward),
            backward_kept: time(self.backward_kept, other.backward_kept),
            backward_input: time(self.backward_input, other.backward_input),
            backward_weight: time(self.backward_weight, other.backward_weight),
            inputs: bytes(self.inputs, other.inputs),
            input_gradients: bytes(self.input_gradients, other.input_gradients),
            kept: bytes(self.kept, other.kept),
            unread: bytes(self.unread, other.unread),
            products: bytes(self.products, other.products),
            forward_peak: bytes(self.forward_peak, other.forward_peak),
            selective_peak: bytes(self.selective_peak, other.selective_peak),
            backward_peak: bytes(self.backward_peak, other.backward_peak),
            first_backward_peak: bytes(self.first_backward_peak, other.first_backward_peak),
            split: bytes(self.split, other.split),
            backward_input_peak: bytes(self.backward_input_peak, other.backward_input_peak),
            backward_weight_peak: bytes(self.backward_weight_peak, other.backward_weight_peak),
            first_backward_weight_peak: bytes(
                self.first_backward_weight_peak,
                other.first_backward_weight_peak,
            ),
        }
    }
}
