//! The bytes that the stages of a cut hold, and those of their messages.

use std::ops::Range;

use super::{
    LayerCost, ModelCosts, SUMS_UNDER_WAY, SkipCost, TieCost,
    held::{Gradients, Layers, SkipEnds},
};
use crate::{
    memory::{ActionMemory, EdgeBytes, StageBytes},
    remat::Remat,
    shard,
    simulate::LINK_CAPACITY,
    topology::Purpose,
    units::Bytes,
};

/// What a stage receives for a micro-batch.
struct Received {
    /// The inputs of its first layer.
    inputs: Bytes,
    /// Skips from earlier stages.
    skips: Bytes,
    /// The gradients of its last layer's outputs; 0 on the last stage.
    gradients: Bytes,
    /// What may be there already for later micro-batches, at most.
    ahead: Bytes,
    /// What comes from other stages for a micro-batch.
    message: Bytes,
}

impl ModelCosts {
    /// The bytes of a stage with the layers in `range`, in micro-batches of `samples` samples. See
    /// [`ModelCosts::stage_cost`].
    pub fn stage_bytes(
        &self,
        range: Range<usize>,
        costs: &[LayerCost],
        samples: usize,
        remat: Remat,
    ) -> StageBytes {
        let states = &self.layers[range.clone()];
        let uses = |tie: &&TieCost| tie.layers.iter().any(|layer| range.contains(layer));
        let tied = self.ties.iter().filter(uses).map(|tie| tie.parameters + tie.optimizer);
        let state = states.iter().map(|state| state.parameters + state.optimizer);
        // The state that other replicas keep.
        let pieces = states.iter().flat_map(|state| state.shardable.iter().copied());
        let pieces = pieces.chain(self.ties.iter().filter(uses).map(|tie| tie.shardable));
        let pieces: Vec<Bytes> = pieces.collect();
        let kept = shard::largest(&pieces, self.optimizer_shards);
        let elsewhere = pieces.iter().copied().sum::<Bytes>() - kept;
        // The owner of a tied weight copies the gradients' sum for every other stage that uses it:
        // at most one copy per use elsewhere.
        let owned =
            self.ties.iter().filter(|tie| tie.layers.first().is_some_and(|l| range.contains(l)));
        let used_elsewhere = owned.map(|tie| {
            let elsewhere = tie.layers.iter().filter(|layer| !range.contains(layer)).count();
            tie.parameters.times(elsewhere)
        });
        let used_elsewhere: Bytes = used_elsewhere.sum();
        let update = states.iter().map(|state| state.update_peak).max().unwrap_or_default();
        let gradients: Vec<Bytes> = states.iter().map(|state| state.gradients).collect();
        let early: Vec<Bytes> = states.iter().map(|state| state.early).collect();
        let received = self.received(&range, costs, samples);
        let segments = remat.segment_ranges(range.len());
        let own = self.with_loss(&range, costs);
        let layers = Layers {
            costs: own,
            again: again(own, &segments, remat),
            gradients: &gradients,
            early: &early,
            segments,
            selective: remat == Remat::Selective,
            own_memory: self.own_memory,
            output_gradients: received.gradients,
            skips: self.skips.iter().map(|skip| self.end_in(skip, &range, samples)).collect(),
        };
        let kept = layers.keeping(0..layers.costs.len());
        let offloads = remat.offloads();
        let statistics = states.iter().map(|state| state.statistics).sum();
        // With a memory of its own, a stage holds what it received. Otherwise it holds only the
        // copies of its inputs in a smaller dtype.
        let inputs = match (self.own_memory, range.start) {
            (true, _) => received.inputs,
            (false, 0) => self.fed.times(samples),
            (false, _) => Bytes(0),
        };
        let skips = if self.own_memory { received.skips } else { Bytes(0) };
        let with = |own: ActionMemory, more: Bytes| ActionMemory {
            peak: own.peak + more,
            after: own.after + more,
        };
        let made: Bytes = gradients.iter().copied().sum();
        // While the copies are below the limit, one more bucket is sent. A bucket holds one layer's
        // gradients.
        let largest = gradients.iter().copied().max().unwrap_or_default();
        let copies = if self.replicated { made.min(SUMS_UNDER_WAY + largest) } else { Bytes(0) };
        StageBytes {
            resident: state.chain(tied).sum::<Bytes>() - elsewhere + copies,
            gradients: made,
            statistics,
            forward: with(
                if offloads { layers.offloading() } else { layers.forward_discarding() },
                inputs + skips,
            ),
            // A layer that pops a skip keeps it as its output.
            forward_kept: with(ActionMemory { after: kept.after - statistics, ..kept }, inputs),
            rematerialize: layers.rematerialize(),
            moving: if offloads { layers.rematerialize().after } else { Bytes(0) },
            backward: layers.backward(true, Gradients::Added),
            backward_kept: layers.backward(false, Gradients::Added),
            first_backward: layers.backward(true, Gradients::Made),
            first_backward_kept: layers.backward(false, Gradients::Made),
            split: layers.costs.iter().map(|cost| cost.split).sum(),
            early: early.iter().copied().sum(),
            backward_input: layers.backward(true, Gradients::Later),
            backward_input_kept: layers.backward(false, Gradients::Later),
            first_backward_input: layers.backward(true, Gradients::LaterMade),
            first_backward_input_kept: layers.backward(false, Gradients::LaterMade),
            backward_weight: layers.backward_weight(false),
            first_backward_weight: layers.backward_weight(true),
            update: update + used_elsewhere,
            // The gradients of tied weights may arrive before this stage's last backward.
            ahead: if self.own_memory { received.ahead + used_elsewhere } else { Bytes(0) },
            message: if self.own_memory { received.message } else { Bytes(0) },
        }
    }

    /// What a stage with the layers in `range` receives for a micro-batch.
    fn received(&self, range: &Range<usize>, costs: &[LayerCost], samples: usize) -> Received {
        let at = |layer: usize| costs.get(layer).copied().unwrap_or_default();
        let ends = self.skips.iter().map(|skip| self.end_in(skip, range, samples));
        let comes = ends.clone().filter(|skip| skip.stash.is_none() && skip.pop.is_some());
        let returns = ends.filter(|skip| skip.stash.is_some() && skip.pop.is_none());
        let (inputs, skips) = (at(range.start).inputs, comes.map(|skip| skip.bytes).sum());
        let is_last = range.end == self.layers.len();
        let gradients = if is_last { Bytes(0) } else { at(range.end).input_gradients };
        // A sender copies a message before there is room for it on the link. The driver's inputs
        // come one micro-batch ahead, in the dtype that the caller gave.
        let under_way = LINK_CAPACITY + 1;
        let backward = gradients + returns.map(|skip| skip.bytes).sum();
        let (message, fed) = match range.start {
            0 => (backward, inputs + self.fed.times(samples)),
            _ => (inputs + skips + backward, Bytes(0)),
        };
        let ahead = fed + message.times(under_way);
        Received { inputs, skips, gradients, ahead, message }
    }

    /// What a sender holds for its messages, of these sizes, until their receivers are done.
    pub fn held_for_receivers<'a>(&self, edges: &'a [EdgeBytes]) -> &'a [EdgeBytes] {
        if self.own_memory { &[] } else { edges }
    }

    /// The part of `skip` that a stage with the layers in `range` sees.
    fn end_in(&self, skip: &SkipCost, range: &Range<usize>, samples: usize) -> SkipEnds {
        let position = |layer: usize| range.contains(&layer).then(|| layer - range.start);
        let trained = self.trained_before.get(skip.stash + 1).copied().unwrap_or(true);
        SkipEnds {
            stash: position(skip.stash),
            pop: position(skip.pop),
            bytes: skip.bytes.times(samples),
            gradient: if trained { skip.gradient.times(samples) } else { Bytes(0) },
        }
    }

    /// The sizes of the messages on the edges of a cut into `ranges`, for micro-batches of
    /// `samples` samples.
    pub fn edge_bytes(
        &self,
        ranges: &[Range<usize>],
        costs: &[LayerCost],
        samples: usize,
        purposes: &[Purpose],
    ) -> Vec<EdgeBytes> {
        let mut boundary = 0;
        let of = |purpose: &Purpose| match purpose {
            Purpose::Boundary => {
                boundary += 1;
                let first = ranges.get(boundary).map_or(0, |range| range.start);
                let cost = costs.get(first).copied().unwrap_or_default();
                EdgeBytes { forward: cost.inputs, backward: cost.input_gradients }
            }
            Purpose::Skip(index) => {
                let times = |bytes: fn(&SkipCost) -> Bytes| {
                    self.skips.get(*index).map_or(Bytes(0), |skip| bytes(skip).times(samples))
                };
                EdgeBytes {
                    forward: times(|skip| skip.bytes),
                    backward: times(|skip| skip.gradient),
                }
            }
            Purpose::Tie | Purpose::Vote => EdgeBytes::default(),
        };
        purposes.iter().map(of).collect()
    }
}

/// The costs of the layers of a stage as re-materializations see them: each segment ends with what
/// its backward reads. What is offloaded comes back in full, and the last segment feeds the loss if
/// the stage has one.
fn again(costs: &[LayerCost], segments: &[Range<usize>], remat: Remat) -> Vec<LayerCost> {
    let mut again = costs.to_vec();
    let layers = segments.last().map_or(0, |segment| segment.end);
    let feeds_loss = |segment: &&Range<usize>| segment.end == layers && layers < costs.len();
    for segment in segments.iter().filter(|own| !remat.offloads() && !feeds_loss(own)) {
        if let Some(last) = segment.end.checked_sub(1).and_then(|last| again.get_mut(last)) {
            last.kept = last.kept - last.unread;
        }
    }
    again
}
