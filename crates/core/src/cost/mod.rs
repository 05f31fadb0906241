//! What layers cost: times and bytes, measured or estimated, for micro-batches of several sizes;
//! and what a stage made of them costs. The one source that the planner, the simulator and the
//! tables read. `layer` is what one layer takes, `held` what a stage's layers hold together,
//! `spread` how far measured times are apart.

mod held;
mod layer;
mod spread;

use std::{collections::BTreeMap, ops::Range};

use held::{Gradients, Layers, SkipEnds};
pub use layer::LayerCost;
use layer::{Sizes, between};
use serde::{Deserialize, Serialize};
pub use spread::Spread;

use crate::{
    ids::LayerId,
    memory::{ActionMemory, EdgeBytes, StageBytes},
    remat::Remat,
    schedule::Schedule,
    simulate::{LinkCost, StageCost},
    topology::{Across, Purpose},
    units::{Bytes, Nanos},
};

/// Most layers of a model.
const LAYERS_MAX: usize = 1 << 16;
/// Most bytes of gradients whose sums over replicas are under way in a stage, unless one layer has
/// more: they are copies. Twice the bucket of PyTorch's DistributedDataParallel.
pub const SUMS_UNDER_WAY: Bytes = Bytes(50 << 20);

/// What a layer holds and takes whatever the micro-batches are. A tied weight is not counted here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerState {
    /// Its name.
    pub name: String,
    /// Its parameters, running statistics and copies in a smaller dtype.
    pub parameters: Bytes,
    /// Their gradients; a tied weight's, too, because each use adds up its own.
    pub gradients: Bytes,
    /// What the optimizer keeps for them, and their averages.
    pub optimizer: Bytes,
    /// What each forward leaves until the norm: the statistics of its batch norms. The layers'
    /// `kept` has it, too.
    pub statistics: Bytes,
    /// Its part of the norm, once per step.
    pub norm: Nanos,
    /// Its update, once per step.
    pub update: Nanos,
    /// Most that its part of the norm or its update holds besides.
    pub update_peak: Bytes,
    /// Whether its backward was to be split and could not be: the first half is then all of it.
    #[serde(default)]
    pub unsplit: bool,
    /// Of `gradients`, what the first half of a split backward finds, in passing. It is there from
    /// the step's first one.
    #[serde(default)]
    pub early: Bytes,
    /// Floating-point operations of a forward of one sample, as estimated.
    pub flops: u64,
}

/// A long skip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SkipCost {
    /// The layer that stashes.
    pub stash: usize,
    /// The layer that pops.
    pub pop: usize,
    /// Of one sample.
    pub bytes: Bytes,
    /// Of one sample: what its gradient holds on the way back; more than `bytes` where it is a part
    /// of a larger one.
    pub gradient: Bytes,
}

/// A weight that several layers use: each stage has it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TieCost {
    /// The layers, ascending.
    pub layers: Vec<usize>,
    /// The weight and its copies.
    pub parameters: Bytes,
    /// What the optimizer keeps for it.
    pub optimizer: Bytes,
}

/// A link between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// Of a message without content.
    pub latency: Nanos,
    /// Bytes per second; 0: any number in no time (values move between threads without a copy).
    pub bytes_per_s: u64,
}

impl Transport {
    fn occupied(&self, bytes: Bytes) -> Nanos {
        let time = u128::from(bytes.0) * 1_000_000_000;
        let time = time.checked_div(u128::from(self.bytes_per_s)).unwrap_or(0);
        Nanos(u64::try_from(time).unwrap_or(u64::MAX))
    }
}

/// The costs of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCosts {
    /// By layer.
    pub layers: Vec<LayerState>,
    /// By samples of a micro-batch: one for each layer, and one for the loss, which is with the
    /// last layer.
    pub sizes: BTreeMap<usize, Vec<LayerCost>>,
    /// The same under schedules other than the one that `sizes` were measured under, by name: how
    /// many micro-batches are in flight decides what is still in a cache, and which work runs
    /// beside which.
    #[serde(default)]
    pub under: BTreeMap<String, BTreeMap<usize, Vec<LayerCost>>>,
    /// How far the times of `sizes` were spread, by samples of a micro-batch; empty where nothing
    /// was measured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread: BTreeMap<usize, Spread>,
    /// The same of `under`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread_under: BTreeMap<String, BTreeMap<usize, Spread>>,
    /// Long skips.
    pub skips: Vec<SkipCost>,
    /// Tied weights.
    pub ties: Vec<TieCost>,
    /// For each layer, whether anything before it is trained; at the end, whether anything is.
    pub trained_before: Vec<bool>,
    /// Of one sample: the copies that the first stage makes of its inputs, in a smaller dtype; 0
    /// where it uses them as they are.
    pub fed: Bytes,
    /// Between any two devices.
    pub transport: Transport,
    /// Whether gradients are summed with those of other replicas, in copies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replicated: bool,
}

/// Costs that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the costs are of no use: {0}")]
pub struct BadCosts(String);

impl ModelCosts {
    /// Checks what came from a file.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self) -> Result<(), BadCosts> {
        let layers = self.layers.len();
        let bad = |reason: String| Err(BadCosts(reason));
        if layers == 0 || layers > LAYERS_MAX {
            return bad(format!("there are {layers} layers: use 1 to {LAYERS_MAX}"));
        }
        for sizes in [&self.sizes].into_iter().chain(self.under.values()) {
            if sizes.is_empty() || sizes.contains_key(&0) {
                return bad("there is no size of micro-batches, or one of 0 samples".into());
            }
            if let Some((samples, costs)) =
                sizes.iter().find(|(_, costs)| costs.len() != layers + 1)
            {
                return bad(format!(
                    "there are {} costs for micro-batches of {samples} samples, but {layers} \
                    layers and a loss",
                    costs.len()
                ));
            }
        }
        if self.trained_before.len() != layers + 1 {
            return bad("trained_before has another length than the layers".into());
        }
        if self.skips.iter().any(|skip| skip.stash >= skip.pop || skip.pop >= layers) {
            return bad("a skip goes from no layer, to none, or backwards".into());
        }
        let ascending = |tie: &TieCost| {
            !tie.layers.is_empty()
                && tie.layers.windows(2).all(|pair| pair[0] < pair[1])
                && tie.layers.iter().all(|&layer| layer < layers)
        };
        if !self.ties.iter().all(ascending) {
            return bad("a tie's layers do not exist or do not ascend".into());
        }
        Ok(())
    }

    /// Whether micro-batches of `samples` samples were measured (or estimated) themselves.
    pub fn has_size(&self, samples: usize) -> bool {
        self.sizes.contains_key(&samples)
    }

    /// How far the times are spread that [`ModelCosts::at`] gives; of a size that was not measured,
    /// as far as those of the nearest sizes together. None where that is not known: the costs are
    /// from shapes, or from an older profile.
    pub fn spread(&self, samples: usize, schedule: &Schedule) -> Option<Spread> {
        let own = self.spread_under.get(&schedule.to_string()).unwrap_or(&self.spread);
        if let Some(found) = own.get(&samples).or_else(|| self.spread.get(&samples)) {
            return Some(*found);
        }
        let below = own.range(..samples).next_back().map(|(_, spread)| *spread);
        let above = own.range(samples..).next().map(|(_, spread)| *spread);
        match (below, above) {
            (Some(below), Some(above)) => Some(below.and(above)),
            (below, above) => below.or(above),
        }
    }

    /// Whether it is known what the halves of a split backward take, in micro-batches of `samples`
    /// samples under `schedule`.
    pub fn has_halves(&self, samples: usize, schedule: &Schedule) -> bool {
        self.at(samples, schedule).iter().any(LayerCost::has_halves)
    }

    /// Whether it is known what a re-materialization takes that finds what products gave, in
    /// micro-batches of `samples` samples under `schedule`.
    pub fn has_selective(&self, samples: usize, schedule: &Schedule) -> bool {
        self.at(samples, schedule).iter().any(LayerCost::has_selective)
    }

    /// The costs for micro-batches of `samples` samples under `schedule`: those of that size under
    /// it, or under the one that was measured first; else on the line through the two nearest
    /// sizes; of one size only, in proportion. The loss is last. Of a backward in halves, where
    /// those were not measured, as under the first schedule by name that splits it; likewise of a
    /// whole one. A selective re-materialization is measured under one schedule.
    pub fn at(&self, samples: usize, schedule: &Schedule) -> Vec<LayerCost> {
        let own = self.under.get(&schedule.to_string()).unwrap_or(&self.sizes);
        let found = match own.get(&samples).or_else(|| self.sizes.get(&samples)) {
            Some(found) => Some(found.clone()),
            None => between(own, samples),
        };
        let mut costs = found.unwrap_or_else(|| vec![LayerCost::default(); self.layers.len() + 1]);
        if !costs.iter().any(LayerCost::has_selective)
            && let Some(selective) = between(&self.sizes, samples)
        {
            for (cost, own) in costs.iter_mut().zip(selective) {
                let share =
                    own.rematerialize_selective.0 as f64 / own.rematerialize.0.max(1) as f64;
                let time = Nanos((cost.rematerialize.0 as f64 * share) as u64);
                *cost = LayerCost {
                    rematerialize_selective: time,
                    products: own.products,
                    selective_peak: own.selective_peak,
                    ..*cost
                };
            }
        }
        if !schedule.splits() {
            return costs;
        }
        let split = |sizes: &&Sizes| sizes.values().flatten().any(LayerCost::has_halves);
        let whole = |sizes: &&Sizes| sizes.values().flatten().any(LayerCost::has_whole);
        let others = || self.under.values().chain([&self.sizes]);
        if !costs.iter().any(LayerCost::has_halves)
            && let Some(halves) = others().find(split).and_then(|sizes| between(sizes, samples))
        {
            for (cost, half) in costs.iter_mut().zip(halves) {
                *cost = LayerCost {
                    backward_input: half.backward_input,
                    backward_weight: half.backward_weight,
                    split: half.split,
                    backward_input_peak: half.backward_input_peak,
                    backward_weight_peak: half.backward_weight_peak,
                    first_backward_weight_peak: half.first_backward_weight_peak,
                    ..*cost
                };
            }
        }
        if !costs.iter().any(LayerCost::has_whole)
            && let Some(wholes) = others().find(whole).and_then(|sizes| between(sizes, samples))
        {
            for (cost, whole) in costs.iter_mut().zip(wholes) {
                *cost = LayerCost {
                    backward: whole.backward,
                    backward_kept: whole.backward_kept,
                    backward_peak: whole.backward_peak,
                    first_backward_peak: whole.first_backward_peak,
                    ..*cost
                };
            }
        }
        costs
    }

    /// What makes edges where the model is cut.
    pub fn across<'a>(
        &'a self,
        skips: &'a [(LayerId, LayerId)],
        ties: &'a [Vec<LayerId>],
    ) -> Across<'a> {
        Across { skips, ties, trained_before: &self.trained_before }
    }

    /// The ends of the skips, and the layers of the ties.
    pub fn ends(&self) -> (Vec<(LayerId, LayerId)>, Vec<Vec<LayerId>>) {
        let id = LayerId::from_index;
        let skips = self.skips.iter().map(|skip| (id(skip.stash), id(skip.pop))).collect();
        let ties = self.ties.iter().map(|tie| tie.layers.iter().map(|&l| id(l)).collect());
        (skips, ties.collect())
    }

    /// The cost of a stage with the layers in `range`, of which `costs` are the costs (see
    /// [`ModelCosts::at`]), on a device that is `speed` times as fast as the one that was measured.
    pub fn stage_cost(
        &self,
        range: Range<usize>,
        costs: &[LayerCost],
        remat: Remat,
        speed: f64,
    ) -> StageCost {
        let own = self.with_loss(&range, costs);
        let last = remat.segment_ranges(range.len()).pop().unwrap_or(0..range.len());
        let sum = |part: &[LayerCost], time: fn(&LayerCost) -> Nanos| -> Nanos {
            part.iter().map(time).sum()
        };
        let scale = |time: Nanos| Nanos((time.0 as f64 / speed) as u64);
        let states = &self.layers[range];
        let again = match remat {
            Remat::Selective => sum(own, |c| c.rematerialize_selective),
            _ => sum(&own[last.start..], |c| c.rematerialize),
        };
        let rest = sum(&own[..last.start], |c| c.rematerialize);
        StageCost {
            forward: scale(sum(own, |c| c.forward)),
            forward_kept: scale(sum(own, |c| c.forward_kept)),
            rematerialize: scale(again),
            backward: scale(rest + sum(own, |c| c.backward)),
            backward_kept: scale(sum(own, |c| c.backward_kept)),
            backward_input: scale(rest + sum(own, |c| c.backward_input)),
            backward_input_kept: scale(sum(own, |c| c.backward_input)),
            backward_weight: scale(sum(own, |c| c.backward_weight)),
            norm: scale(states.iter().map(|state| state.norm).sum()),
            update: scale(states.iter().map(|state| state.update).sum()),
        }
    }

    /// The layers' costs, the loss among them where the range has the last layer.
    fn with_loss<'a>(&self, range: &Range<usize>, costs: &'a [LayerCost]) -> &'a [LayerCost] {
        let end = if range.end == self.layers.len() { range.end + 1 } else { range.end };
        costs.get(range.start..end).unwrap_or_default()
    }

    /// The bytes of a stage with the layers in `range`, as [`ModelCosts::stage_cost`], in
    /// micro-batches of `samples` samples.
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
        let own = states.iter().map(|state| state.parameters + state.optimizer);
        // Who owns a tied weight makes a copy of the gradients' sum for every other stage that uses
        // it: at most one for each use elsewhere.
        let owned =
            self.ties.iter().filter(|tie| tie.layers.first().is_some_and(|l| range.contains(l)));
        let sums = owned.map(|tie| {
            let elsewhere = tie.layers.iter().filter(|layer| !range.contains(layer)).count();
            tie.parameters.times(elsewhere)
        });
        let update = states.iter().map(|state| state.update_peak).max().unwrap_or_default();
        let gradients: Vec<Bytes> = states.iter().map(|state| state.gradients).collect();
        let early: Vec<Bytes> = states.iter().map(|state| state.early).collect();
        let layers = Layers {
            costs: self.with_loss(&range, costs),
            gradients: &gradients,
            early: &early,
            segments: remat.segment_ranges(range.len()),
            selective: remat == Remat::Selective,
            skips: self.skips.iter().map(|skip| self.end_in(skip, &range, samples)).collect(),
        };
        let kept = layers.keeping(0..layers.costs.len());
        let statistics = states.iter().map(|state| state.statistics).sum();
        let fed = if range.start == 0 { self.fed.times(samples) } else { Bytes(0) };
        let with_inputs =
            |held: ActionMemory| ActionMemory { peak: held.peak + fed, after: held.after + fed };
        let made: Bytes = gradients.iter().copied().sum();
        // Below the bound one more bucket is sent, which is a layer's.
        let largest = gradients.iter().copied().max().unwrap_or_default();
        let copies = if self.replicated { made.min(SUMS_UNDER_WAY + largest) } else { Bytes(0) };
        StageBytes {
            resident: own.chain(tied).sum::<Bytes>() + copies,
            gradients: made,
            statistics,
            forward: with_inputs(layers.forward_discarding()),
            forward_kept: with_inputs(ActionMemory { after: kept.after - statistics, ..kept }),
            rematerialize: layers.rematerialize(),
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
            update: update + sums.sum(),
        }
    }

    /// What of `skip` a stage with the layers in `range` sees.
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

    /// The sizes of the messages on the edges of a cut into `ranges`, in micro-batches of `samples`
    /// samples.
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

    /// What the messages of those sizes take.
    pub fn link_costs(&self, edges: &[EdgeBytes]) -> Vec<LinkCost> {
        let cost = |bytes: &EdgeBytes| LinkCost {
            latency: self.transport.latency,
            forward: self.transport.occupied(bytes.forward),
            backward: self.transport.occupied(bytes.backward),
        };
        edges.iter().map(cost).collect()
    }
}
