//! What one layer takes and holds, by the size of micro-batches.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::remat::Remat;
use crate::units::{Bytes, Nanos};

/// What one layer (or the loss) takes and holds, for one micro-batch of some number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCost {
    /// A forward that keeps nothing.
    pub forward: Nanos,
    /// A forward that keeps its activations.
    pub forward_kept: Nanos,
    /// A re-materialization.
    pub rematerialize: Nanos,
    /// A re-materialization that finds what products gave ([`Remat::Selective`]), no longer than
    /// one that does not; 0 where that is not known.
    #[serde(default)]
    pub rematerialize_selective: Nanos,
    /// A backward after a re-materialization.
    pub backward: Nanos,
    /// A backward whose forward kept its activations.
    pub backward_kept: Nanos,
    /// The first half of a backward that is split: the gradients of its inputs.
    #[serde(default)]
    pub backward_input: Nanos,
    /// The second half: the gradients of its weights.
    #[serde(default)]
    pub backward_weight: Nanos,
    /// Its inputs: what crosses a cut before it.
    pub inputs: Bytes,
    /// The gradients of its inputs: what crosses back; 0 where nothing before it is trained.
    pub input_gradients: Bytes,
    /// What a forward that keeps leaves until the backward: outputs, and what autograd saves;
    /// without its inputs.
    pub kept: Bytes,
    /// What its matrix products and convolutions give, which [`Remat::Selective`] keeps.
    #[serde(default)]
    pub products: Bytes,
    /// Most above the start of a forward, while it runs.
    pub forward_peak: Bytes,
    /// Most above the start of a re-materialization that finds `products`, which are there, while
    /// it runs.
    #[serde(default)]
    pub selective_peak: Bytes,
    /// Most above the start of a backward, while it runs; what the layer kept and the gradient of
    /// its outputs are there at the start.
    pub backward_peak: Bytes,
    /// The same of a step's first backward, which makes the parameters' gradients.
    pub first_backward_peak: Bytes,
    /// What the first half of a split backward leaves to the second, of what the layer kept and of
    /// gradients, without what it found for the parameters
    /// ([`LayerState::early`](super::LayerState::early); in profiles of before that was known, with
    /// it).
    #[serde(default)]
    pub split: Bytes,
    /// As `backward_peak`, of the first half.
    #[serde(default)]
    pub backward_input_peak: Bytes,
    /// As `backward_peak`, of the second half; `split` is there at the start.
    #[serde(default)]
    pub backward_weight_peak: Bytes,
    /// The same of a step's first one.
    #[serde(default)]
    pub first_backward_weight_peak: Bytes,
}

/// By samples of a micro-batch, the layers' costs.
pub(super) type Sizes = BTreeMap<usize, Vec<LayerCost>>;

/// The costs for micro-batches of `samples` samples, on the line through the two nearest sizes; of
/// one size only, in proportion.
pub(super) fn between(sizes: &Sizes, samples: usize) -> Option<Vec<LayerCost>> {
    if let Some(own) = sizes.get(&samples) {
        return Some(own.clone());
    }
    let below: Vec<usize> = sizes.range(..samples).rev().take(2).map(|size| *size.0).collect();
    let above: Vec<usize> = sizes.range(samples..).take(2).map(|size| *size.0).collect();
    let (a, b) = match (&below[..], &above[..]) {
        ([a, ..], [b, ..]) | ([b, a, ..], []) | ([], [a, b, ..]) => (*a, *b),
        ([only], []) | ([], [only]) => {
            let ratio = samples as f64 / *only as f64;
            return Some(sizes[only].iter().map(|cost| cost.map(|x| x as f64 * ratio)).collect());
        }
        ([], []) => return None,
    };
    let share = (samples as f64 - a as f64) / (b as f64 - a as f64);
    let line = |(a, b): (&LayerCost, &LayerCost)| {
        a.zip(b, |a, b| a as f64 + share * (b as f64 - a as f64))
    };
    let mut costs: Vec<LayerCost> = sizes[&a].iter().zip(&sizes[&b]).map(line).collect();
    if [a, b].iter().any(|size| !sizes[size].iter().any(LayerCost::has_selective)) {
        // One of them went over a cap when it was measured. What is not known is no zero to draw a
        // line to.
        for cost in &mut costs {
            (cost.rematerialize_selective, cost.products, cost.selective_peak) = Default::default();
        }
    }
    Some(costs)
}

impl LayerCost {
    pub(super) fn has_halves(&self) -> bool {
        self.backward_input + self.backward_weight > Nanos(0)
    }

    pub(super) fn has_selective(&self) -> bool {
        self.rematerialize_selective > Nanos(0)
    }

    pub(super) fn has_whole(&self) -> bool {
        self.backward + self.backward_kept > Nanos(0)
    }

    /// `f` of every number; what is no number is 0.
    fn map(&self, f: impl Fn(u64) -> f64) -> Self {
        self.zip(self, |a, _| f(a))
    }

    /// `f` of every pair of numbers.
    fn zip(&self, other: &Self, f: impl Fn(u64, u64) -> f64) -> Self {
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
