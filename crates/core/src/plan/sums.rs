//! Stage costs from prefix sums over layers, so that a stage is priced without going through its
//! layers.

use std::ops::Range;

use crate::{
    cost::{LayerCost, ModelCosts, OffloadSpeed},
    remat::Remat,
    simulate::StageCost,
    units::{Bytes, Nanos},
};

/// For each layer, the sums over the layers before it.
#[derive(Debug)]
pub(super) struct Sums {
    layers: usize,
    times: Vec<[Nanos; 8]>,
    ends: Vec<[Nanos; 2]>,
    /// Parameters and optimizer state.
    states: Vec<Bytes>,
    /// What a forward keeps.
    kept: Vec<Bytes>,
    offload: OffloadSpeed,
}

impl Sums {
    pub fn new(model: &ModelCosts, costs: &[LayerCost]) -> Self {
        let (mut times, mut ends) = (vec![[Nanos(0); 8]], vec![[Nanos(0); 2]]);
        let (mut states, mut kept) = (vec![Bytes(0)], vec![Bytes(0)]);
        for cost in costs {
            let own = [
                cost.forward,
                cost.forward_kept,
                cost.rematerialize,
                cost.backward,
                cost.backward_kept,
                cost.backward_input,
                cost.backward_weight,
                cost.rematerialize_selective,
            ];
            let before = times[times.len() - 1];
            kept.push(kept[kept.len() - 1] + cost.kept);
            times.push([0, 1, 2, 3, 4, 5, 6, 7].map(|kind| before[kind] + own[kind]));
        }
        for state in &model.layers {
            let before = ends[ends.len() - 1];
            ends.push([before[0] + state.norm, before[1] + state.update]);
            // No shard is smaller than an equal part.
            let sharded: Bytes = state.shardable.iter().copied().sum();
            let kept = Bytes(sharded.0 / model.optimizer_shards.max(1) as u64);
            let bytes = state.parameters + state.optimizer - (sharded - kept);
            states.push(states[states.len() - 1] + bytes);
        }
        let offload = model.offload.unwrap_or_default();
        Self { layers: model.layers.len(), times, ends, states, kept, offload }
    }

    /// Like [`ModelCosts::stage_cost`].
    pub fn stage_cost(&self, range: &Range<usize>, policy: Remat, speed: f64) -> StageCost {
        let segments = policy.segments().min(range.len().max(1));
        let last = range.start + (segments - 1) * range.len() / segments;
        let end = if range.end == self.layers { range.end + 1 } else { range.end };
        let between = |kind: usize, from: usize| self.times[end][kind] - self.times[from][kind];
        let scale = |time: Nanos| Nanos((time.0 as f64 / speed) as u64);
        let rest = self.times[last][2] - self.times[range.start][2];
        let again = if policy == Remat::Selective { 7 } else { 2 };
        let ends = [0, 1].map(|kind| self.ends[range.end][kind] - self.ends[range.start][kind]);
        let cost = StageCost {
            forward: scale(between(0, range.start)),
            forward_kept: scale(between(1, range.start)),
            rematerialize: scale(between(again, last)),
            backward: scale(rest + between(3, range.start)),
            backward_kept: scale(between(4, range.start)),
            backward_input: scale(rest + between(5, range.start)),
            backward_input_kept: scale(between(5, range.start)),
            backward_weight: scale(between(6, range.start)),
            norm: scale(ends[0]),
            update: scale(ends[1]),
        };
        match policy {
            Remat::Offload => {
                self.offload.stage_cost(cost, self.kept[end] - self.kept[range.start])
            }
            _ => cost,
        }
    }

    /// Parameters and optimizer state of the layers in `range`, without ties, and with an equal
    /// part of what is sharded over replicas: a lower bound on what any plan holds there.
    pub fn states(&self, range: &Range<usize>) -> Bytes {
        self.states[range.end] - self.states[range.start]
    }
}
