//! What a micro-batch leaves in a stage from its forward to its backward.

use std::{collections::HashMap, ops::Range};

use gpipe_bridge::op_cache::OpCache;
use tch::Tensor;

use super::island::Island;

/// Where a segment starts: its layers (positions within the stage) and their inputs.
pub(super) struct SegmentStart {
    pub layers: Range<usize>,
    pub inputs: Vec<Tensor>,
}

impl SegmentStart {
    pub(super) fn new(layers: Range<usize>, inputs: &[Tensor]) -> Self {
        Self { layers, inputs: inputs.iter().map(Tensor::shallow_clone).collect() }
    }
}

/// Islands that are there, last layer last, and segments that have yet to be recomputed.
pub(super) struct SavedActivations {
    islands: Vec<Island>,
    segments: Vec<SegmentStart>,
    skips: HashMap<usize, Tensor>,
    /// What each layer's products gave, where they are kept.
    products: Vec<OpCache>,
    untouched: bool,
    whole: bool,
    /// The loss of this micro-batch, on the last stage.
    pub loss: Option<Island>,
}

impl SavedActivations {
    /// Everything is there.
    pub(super) fn whole(islands: Vec<Island>) -> Self {
        let (segments, skips, products) = (Vec::new(), HashMap::new(), Vec::new());
        Self { islands, segments, skips, products, untouched: false, whole: true, loss: None }
    }

    /// Only the inputs of each segment, skips that no segment can recompute for itself, and what
    /// each layer's products gave where they are kept.
    pub(super) fn discarded(
        segments: Vec<SegmentStart>,
        skips: HashMap<usize, Tensor>,
        products: Vec<OpCache>,
    ) -> Self {
        let islands = Vec::new();
        Self { islands, segments, skips, products, untouched: true, whole: false, loss: None }
    }

    /// What each layer's products gave; none where they are to be computed again.
    pub(super) fn take_products(&mut self) -> Vec<OpCache> {
        std::mem::take(&mut self.products)
    }

    /// Whether nothing was recomputed yet: the next segment is the stage's last.
    pub(super) fn is_untouched(&self) -> bool {
        self.untouched
    }

    /// Whether the forward kept it all.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether a segment has yet to be recomputed.
    pub(super) fn has_segments(&self) -> bool {
        !self.segments.is_empty()
    }

    /// The next segment to recompute: the last one.
    pub(super) fn next_segment(&mut self) -> Option<SegmentStart> {
        self.segments.pop()
    }

    /// The skips that are kept.
    pub(super) fn skips(&self) -> HashMap<usize, Tensor> {
        self.skips.iter().map(|(&index, tensor)| (index, tensor.shallow_clone())).collect()
    }

    /// A segment was recomputed.
    pub(super) fn rematerialized(&mut self, islands: Vec<Island>) {
        self.untouched = false;
        self.islands = islands;
    }

    /// Takes the last island, releasing it layer by layer.
    pub(super) fn pop_island(&mut self) -> Option<Island> {
        self.islands.pop()
    }
}
