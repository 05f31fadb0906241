//! What a stage keeps of a micro-batch from its forward to its backward.

use std::{collections::HashMap, ops::Range};

use gpipe_bridge::op_cache::OpCache;
use tch::Tensor;

use super::{hollow::HollowIsland, island::Island, offload::Away};

/// The start of a segment: its layers (positions within the stage) and their inputs.
pub(super) struct SegmentStart {
    pub layers: Range<usize>,
    pub inputs: Vec<Tensor>,
    /// The last layer's graph, if its recomputation may end early.
    pub last: Option<HollowIsland>,
}

impl SegmentStart {
    pub(super) fn new(layers: Range<usize>, inputs: &[Tensor]) -> Self {
        Self { layers, inputs: inputs.iter().map(Tensor::shallow_clone).collect(), last: None }
    }
}

/// The saved activations of a micro-batch: computed islands, last layer last, and segments still to
/// be recomputed.
pub(super) struct SavedActivations {
    islands: Vec<Island>,
    segments: Vec<SegmentStart>,
    skips: HashMap<usize, Tensor>,
    /// Kept outputs of each layer's products, if any.
    products: Vec<OpCache>,
    untouched: bool,
    whole: bool,
    /// The loss of this micro-batch, on the last stage.
    pub loss: Option<HeldLoss>,
    /// What is not in the device's memory, if the stage offloads.
    pub away: Option<Away>,
}

/// What is kept of a micro-batch's loss.
pub(super) enum HeldLoss {
    /// The graph.
    Island(Island),
    /// The inputs of the last layer, which is computed with the loss in the backward.
    Rows(Vec<Tensor>),
}

impl SavedActivations {
    /// Activations of a forward that kept everything.
    pub(super) fn whole(islands: Vec<Island>) -> Self {
        let (segments, skips, products) = (Vec::new(), HashMap::new(), Vec::new());
        let (loss, away) = (None, None);
        Self { islands, segments, skips, products, untouched: false, whole: true, loss, away }
    }

    /// Activations of a forward that discarded: the inputs of each segment, the skips that no
    /// segment can recompute itself, and the outputs of each layer's products if they are kept.
    pub(super) fn discarded(
        segments: Vec<SegmentStart>,
        skips: HashMap<usize, Tensor>,
        products: Vec<OpCache>,
    ) -> Self {
        let (islands, loss, away) = (Vec::new(), None, None);
        Self { islands, segments, skips, products, untouched: true, whole: false, loss, away }
    }

    /// Takes the kept outputs of each layer's products; empty if they are to be recomputed.
    pub(super) fn take_products(&mut self) -> Vec<OpCache> {
        std::mem::take(&mut self.products)
    }

    /// Whether nothing has been recomputed yet. The next segment is then the stage's last.
    pub(super) fn is_untouched(&self) -> bool {
        self.untouched
    }

    /// Whether the forward kept everything.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether a segment has yet to be recomputed.
    pub(super) fn has_segments(&self) -> bool {
        !self.segments.is_empty()
    }

    /// Takes the next segment to recompute: the last one.
    pub(super) fn next_segment(&mut self) -> Option<SegmentStart> {
        self.segments.pop()
    }

    /// The skips that were kept.
    pub(super) fn skips(&self) -> HashMap<usize, Tensor> {
        self.skips.iter().map(|(&index, tensor)| (index, tensor.shallow_clone())).collect()
    }

    /// Stores the islands of a recomputed segment.
    pub(super) fn rematerialized(&mut self, islands: Vec<Island>) {
        self.untouched = false;
        self.islands = islands;
    }

    /// The computed islands.
    pub(super) fn islands_mut(&mut self) -> impl Iterator<Item = &mut Island> {
        self.islands.iter_mut()
    }

    /// Takes the last island, so that activations are released layer by layer.
    pub(super) fn pop_island(&mut self) -> Option<Island> {
        self.islands.pop()
    }
}
