//! What the layers of a stage hold together while their forwards, re-materializations and backwards
//! run.

use std::ops::Range;

use super::LayerCost;
use crate::{memory::ActionMemory, remat::Remat, units::Bytes};

/// The layers of a stage, followed by the loss if the stage has it, and how they are segmented.
pub(super) struct Layers<'a> {
    pub costs: &'a [LayerCost],
    /// The same as re-materializations see them: without what they leave out.
    pub again: Vec<LayerCost>,
    pub gradients: &'a [Bytes],
    /// The part of `gradients` that the first halves of split backwards already compute.
    pub early: &'a [Bytes],
    pub segments: Vec<Range<usize>>,
    /// Whether a forward that discards keeps the outputs of products.
    pub selective: bool,
    pub skips: Vec<SkipEnds>,
    /// Whether the stage has a memory of its own, into which gradients are copied that arrive.
    pub own_memory: bool,
    /// The gradients of the outputs, which arrive from the next stage.
    pub output_gradients: Bytes,
}

/// What a backward does with the gradients of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gradients {
    /// Allocates them: the step's first backward.
    Made,
    /// Adds to them.
    Added,
    /// Leaves them to the second half, but adds those that the first half already computes.
    Later,
    /// Leaves them to the second half, but allocates those that the first half already computes.
    LaterMade,
}

/// The ends of a long skip that lie in a stage, as positions of layers, and the bytes it holds.
pub(super) struct SkipEnds {
    pub stash: Option<usize>,
    pub pop: Option<usize>,
    pub bytes: Bytes,
    pub gradient: Bytes,
}

impl Layers<'_> {
    /// Forwards that keep: each layer adds what it keeps.
    pub fn keeping(&self, part: Range<usize>) -> ActionMemory {
        keeping(self.costs.get(part).unwrap_or_default())
    }

    /// The same for a re-materialization of these layers.
    fn keeping_again(&self, part: Range<usize>) -> ActionMemory {
        keeping(self.again.get(part).unwrap_or_default())
    }

    /// A forward that discards. Each layer's inputs are freed when it is done, unless a segment
    /// starts from them. The loss is left to the re-materialization. Stashed values live until the
    /// forward ends, or until the backward if a later segment pops them.
    pub fn forward_discarding(&self) -> ActionMemory {
        let (mut held, mut stashed) = (ActionMemory::default(), Bytes(0));
        for segment in &self.segments {
            for layer in segment.clone() {
                let cost = &self.costs[layer];
                // The stage's own inputs are charged to the sender.
                let is_start = layer == segment.start;
                if is_start && layer > 0 {
                    held.after += cost.inputs;
                }
                let inputs = if is_start { Bytes(0) } else { cost.inputs };
                held.peak = held.peak.max(held.after + stashed + inputs + cost.forward_peak);
                if self.selective {
                    held.after += cost.products;
                }
                let own = self.skips.iter().filter(|skip| skip.stash == Some(layer));
                stashed += own.map(|skip| skip.bytes).sum();
            }
        }
        let segment = |layer: usize| self.segments.iter().position(|s| s.contains(&layer));
        let is_kept = |skip: &&SkipEnds| match (skip.stash, skip.pop) {
            (Some(stash), Some(pop)) => segment(stash) != segment(pop),
            _ => false,
        };
        held.after += self.skips.iter().filter(is_kept).map(|skip| skip.bytes).sum();
        held
    }

    /// A forward that keeps, and whose activations are then moved away.
    pub fn offloading(&self) -> ActionMemory {
        let kept = self.keeping(0..self.costs.len());
        ActionMemory { peak: kept.peak, after: Bytes(0) }
    }

    /// Re-materializes the last segment and the loss, or brings back what was moved away. Kept
    /// outputs of products become part of what a layer keeps, or are freed.
    pub fn rematerialize(&self) -> ActionMemory {
        if self.selective {
            let (mut now, mut most) = (0_i64, 0_i64);
            for (layer, cost) in self.again.iter().enumerate() {
                // The loss runs for the first time here, so it has no kept products.
                let (peak, had) = match layer < self.gradients.len() {
                    true => (cost.selective_peak, cost.products),
                    false => (cost.forward_peak, Bytes(0)),
                };
                most = most.max(now.saturating_add(signed(peak)));
                now = now.saturating_add(signed(cost.kept) - signed(had));
            }
            let bytes = |signed: i64| Bytes(u64::try_from(signed).unwrap_or(0));
            let own = ActionMemory { peak: bytes(most), after: bytes(now) };
            return self.without_arrived(own, 0..self.costs.len());
        }
        let start = self.segments.last().map_or(0, |segment| segment.start);
        self.without_arrived(self.keeping_again(start..self.costs.len()), start..self.costs.len())
    }

    /// What recomputing these layers holds, without the skips that the stage received: the layers
    /// that pop them keep them as outputs, and the stage has held them since the forward.
    fn without_arrived(&self, own: ActionMemory, layers: Range<usize>) -> ActionMemory {
        let popped = |skip: &&SkipEnds| {
            skip.stash.is_none() && skip.pop.is_some_and(|pop| layers.contains(&pop))
        };
        let all = self.skips.iter().filter(|_| self.own_memory).filter(popped);
        let arrived: Bytes = all.map(|skip| skip.bytes).sum();
        ActionMemory { peak: own.peak - arrived, after: own.after - arrived }
    }

    /// The peak of a backward, above its start. Layers run from the last to the first, and each
    /// frees what it kept. Segments that were not recomputed yet are recomputed on the way.
    pub fn backward(&self, segmented: bool, weights: Gradients) -> Bytes {
        let (segments, costs) = match segmented {
            true => (self.segments.clone(), &self.again[..]),
            false => (Remat::Never.segment_ranges(self.gradients.len()), self.costs),
        };
        let arrived = if self.own_memory { signed(self.output_gradients) } else { 0 };
        let returned = |skip: &SkipEnds| {
            let is_it = self.own_memory && skip.stash.is_some() && skip.pop.is_none();
            if is_it { signed(skip.bytes.min(skip.gradient)) } else { 0 }
        };
        let mut now = self.skips.iter().map(returned).fold(arrived, i64::saturating_add);
        let mut most = now;
        for (number, segment) in segments.iter().enumerate().rev() {
            let last = number + 1 == segments.len();
            let end = if last { self.costs.len() } else { segment.end };
            if !last {
                let again = self.keeping_again(segment.start..end);
                let again = self.without_arrived(again, segment.start..end);
                most = most.max(now.saturating_add(signed(again.peak)));
                now = now.saturating_add(signed(again.after));
            }
            for layer in (segment.start..end).rev() {
                let cost = &costs[layer];
                let of_layer = |bytes: &[Bytes]| bytes.get(layer).copied().unwrap_or_default();
                let (made, early) = (of_layer(self.gradients), of_layer(self.early));
                let (peak, left) = match weights {
                    Gradients::Made => (cost.first_backward_peak, made),
                    Gradients::Added => (cost.backward_peak, Bytes(0)),
                    Gradients::Later => (cost.backward_input_peak, cost.split),
                    Gradients::LaterMade => (cost.backward_input_peak, cost.split + early),
                };
                most = most.max(now.saturating_add(signed(peak)));
                // The gradient of the layer's outputs is freed too, unless it came from another
                // stage.
                let outputs = match self.costs.get(layer + 1) {
                    Some(next) => next.input_gradients,
                    None if self.own_memory => self.output_gradients,
                    None => Bytes(0),
                };
                let mut change = signed(cost.input_gradients) + signed(left)
                    - signed(cost.kept)
                    - signed(outputs);
                // A skip's gradient lives from its pop to its stash, or to the end if the stash is
                // on another stage.
                for skip in &self.skips {
                    let gradient = signed(skip.gradient);
                    let was_here = skip.stash == Some(layer) && skip.pop.is_some();
                    let comes = if skip.pop == Some(layer) { gradient } else { 0 };
                    let goes = if was_here { gradient } else { 0 };
                    change = change.saturating_add(comes - goes);
                    if skip.stash == Some(layer) {
                        change = change.saturating_sub(returned(skip));
                    }
                    // It was recomputed from a skip that stays.
                    if segmented
                        && self.own_memory
                        && skip.stash.is_none()
                        && skip.pop == Some(layer)
                    {
                        change = change.saturating_add(signed(skip.bytes));
                    }
                }
                now = now.saturating_add(change);
            }
        }
        Bytes(u64::try_from(most).unwrap_or(0))
    }

    /// The peak of the second half of a backward, above its start, layer by layer from the last.
    /// `first`: it allocates the gradients that the first half did not.
    pub fn backward_weight(&self, first: bool) -> Bytes {
        let (mut now, mut most) = (0_i64, 0_i64);
        for (layer, cost) in self.costs.iter().enumerate().rev() {
            let of_layer = |bytes: &[Bytes]| signed(bytes.get(layer).copied().unwrap_or_default());
            let (peak, made) = match first {
                true => {
                    let made = of_layer(self.gradients) - of_layer(self.early);
                    (cost.first_backward_weight_peak, made)
                }
                false => (cost.backward_weight_peak, 0),
            };
            most = most.max(now.saturating_add(signed(peak)));
            now = now.saturating_add(made - signed(cost.split));
        }
        Bytes(u64::try_from(most).unwrap_or(0))
    }
}

fn keeping(costs: &[LayerCost]) -> ActionMemory {
    let mut held = ActionMemory::default();
    for cost in costs {
        held.peak = held.peak.max(held.after + cost.forward_peak);
        held.after += cost.kept;
    }
    held
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX).min(i64::MAX / 4)
}
