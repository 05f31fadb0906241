//! The costs of layers, measured or estimated for micro-batches of several sizes, and of stages
//! made of them: times and bytes. The planner, the simulator and the tables all read this one
//! source.
//!
//! - `layer`: the costs of one layer
//! - `bytes`: what the stages of a cut hold and send
//! - `held`: what a stage's layers hold together
//! - `sizes`: the costs for a size of micro-batches
//! - `spread`: how far measured times are apart

mod bytes;
mod held;
mod layer;
mod sizes;
mod spread;

use std::{collections::BTreeMap, ops::Range};

pub use layer::LayerCost;
use serde::{Deserialize, Serialize};
pub use spread::Spread;

use crate::{
    ids::LayerId,
    memory::EdgeBytes,
    remat::Remat,
    simulate::{LinkCost, StageCost},
    topology::Across,
    units::{Bytes, Nanos},
};

/// The most layers of a model.
const LAYERS_MAX: usize = 1 << 16;
/// The most bytes of gradients that a stage has in flight in all-reduces over replicas, unless one
/// layer has more. They are copies. Twice the bucket of PyTorch's DistributedDataParallel.
pub const SUMS_UNDER_WAY: Bytes = Bytes(50 << 20);

/// The costs of a layer that do not depend on the micro-batches. Tied weights are not counted here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerState {
    /// The layer's name.
    pub name: String,
    /// Its parameters, running statistics and copies in a smaller dtype.
    pub parameters: Bytes,
    /// Their gradients, including a tied weight's: each use accumulates its own.
    pub gradients: Bytes,
    /// The optimizer state of the parameters, and their averages.
    pub optimizer: Bytes,
    /// The optimizer state of each trained parameter, without averages: the pieces that sharding
    /// over replicas moves. Empty if unknown, in profiles of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shardable: Vec<Bytes>,
    /// What each forward leaves until the norm: the statistics of batch norms. The layers' `kept`
    /// includes them.
    pub statistics: Bytes,
    /// Time of its part of the norm, once per step.
    pub norm: Nanos,
    /// Time of its update, once per step.
    pub update: Nanos,
    /// Peak of its part of the norm or its update, above everything else.
    pub update_peak: Bytes,
    /// Whether its backward should have been split but could not be. The first half is then all of
    /// it.
    #[serde(default)]
    pub unsplit: bool,
    /// The part of `gradients` that the first half of a split backward computes in passing. It
    /// exists from the step's first such half.
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
    /// Bytes of the value, for one sample.
    pub bytes: Bytes,
    /// Bytes that its gradient holds on the way back, for one sample. More than `bytes` if the
    /// gradient is part of a larger one.
    pub gradient: Bytes,
}

/// A weight that several layers use. Each stage holds it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TieCost {
    /// The layers that use the weight, ascending.
    pub layers: Vec<usize>,
    /// The weight and its copies.
    pub parameters: Bytes,
    /// The optimizer state of the weight, and its average.
    pub optimizer: Bytes,
    /// The part of `optimizer` that sharding over replicas moves: all but the average. 0 if
    /// unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shardable: Bytes,
}

/// A link between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// Latency of an empty message.
    pub latency: Nanos,
    /// Bandwidth in bytes per second. 0 means no transfer time (values move between threads without
    /// a copy).
    pub bytes_per_s: u64,
}

impl Transport {
    fn occupied(&self, bytes: Bytes) -> Nanos {
        occupied(bytes, self.bytes_per_s)
    }
}

/// How fast saved activations leave a device's memory and come back ([`Remat::Offload`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadSpeed {
    /// Bytes per second to the file, or from a GPU to the host.
    pub out_bytes_per_s: u64,
    /// Bytes per second back.
    pub back_bytes_per_s: u64,
}

impl Default for OffloadSpeed {
    /// 1 GB/s both ways: an assumption, where nothing was measured.
    fn default() -> Self {
        Self { out_bytes_per_s: 1_000_000_000, back_bytes_per_s: 1_000_000_000 }
    }
}

impl OffloadSpeed {
    /// The times of a stage that offloads, from its times without re-materialization and the bytes
    /// that it keeps of a micro-batch.
    ///
    /// Writing overlaps with the next forward, which waits for its end. Reading overlaps with the
    /// backward of the micro-batch before.
    pub(crate) fn stage_cost(&self, kept: StageCost, bytes: Bytes) -> StageCost {
        let out = occupied(bytes, self.out_bytes_per_s);
        let back = occupied(bytes, self.back_bytes_per_s);
        let backward = match kept.backward_kept {
            Nanos(0) => kept.backward_input_kept,
            whole => whole,
        };
        StageCost {
            forward: kept.forward_kept.max(out),
            rematerialize: back - back.min(backward),
            backward: kept.backward_kept,
            backward_input: kept.backward_input_kept,
            ..kept
        }
    }
}

/// The time of a transfer; 0 without a bandwidth.
fn occupied(bytes: Bytes, bytes_per_s: u64) -> Nanos {
    let time = u128::from(bytes.0) * 1_000_000_000;
    let time = time.checked_div(u128::from(bytes_per_s)).unwrap_or(0);
    Nanos(u64::try_from(time).unwrap_or(u64::MAX))
}

/// The costs of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCosts {
    /// State of each layer.
    pub layers: Vec<LayerState>,
    /// By samples of a micro-batch: one cost for each layer, then one for the loss, which belongs
    /// to the last layer's stage.
    pub sizes: BTreeMap<usize, Vec<LayerCost>>,
    /// The same under other schedules than the one that `sizes` were measured under, by name. The
    /// number of micro-batches in flight decides what is still in a cache and which work runs in
    /// parallel.
    #[serde(default)]
    pub under: BTreeMap<String, BTreeMap<usize, Vec<LayerCost>>>,
    /// The spread of the times in `sizes`, by samples of a micro-batch; empty if nothing was
    /// measured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread: BTreeMap<usize, Spread>,
    /// The spread of the times in `under`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread_under: BTreeMap<String, BTreeMap<usize, Spread>>,
    /// Long skips.
    pub skips: Vec<SkipCost>,
    /// Tied weights.
    pub ties: Vec<TieCost>,
    /// For each layer, whether anything before it is trained; one more entry says whether anything
    /// is.
    pub trained_before: Vec<bool>,
    /// Bytes, for one sample, of the copies that the first stage makes of its inputs in a smaller
    /// dtype. 0 if it uses them as they are.
    pub fed: Bytes,
    /// The transport between any two devices.
    pub transport: Transport,
    /// How fast activations are offloaded; `None` if that was not measured. A search then leaves
    /// [`Remat::Offload`] out, and a prediction of it assumes [`OffloadSpeed::default`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadSpeed>,
    /// Whether every device has a memory of its own, as GPUs have. A stage copies into it what it
    /// is fed and what it receives. Otherwise a message is memory of its sender. It holds for all
    /// stages: beside GPUs, a stage on a CPU may hold more for its messages, and two stages on one
    /// GPU less.
    #[serde(default)]
    pub own_memory: bool,
    /// Whether gradients are all-reduced with other replicas, in copies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replicated: bool,
    /// Number of replicas over which the optimizer state is sharded. 0 or 1 if each keeps all of
    /// it.
    #[serde(default, skip_serializing_if = "is_whole")]
    pub optimizer_shards: usize,
}

fn is_zero(bytes: &Bytes) -> bool {
    bytes.0 == 0
}

fn is_whole(shards: &usize) -> bool {
    *shards <= 1
}

/// Costs that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the costs cannot be used: {0}")]
pub struct BadCosts(String);

impl ModelCosts {
    /// Checks costs that came from a file.
    ///
    /// # Errors
    /// [`BadCosts`]: what does not fit.
    pub fn check(&self) -> Result<(), BadCosts> {
        let layers = self.layers.len();
        let bad = |reason: String| Err(BadCosts(reason));
        if layers == 0 || layers > LAYERS_MAX {
            return bad(format!("there are {layers} layers: use 1 to {LAYERS_MAX}"));
        }
        for sizes in [&self.sizes].into_iter().chain(self.under.values()) {
            if sizes.is_empty() || sizes.contains_key(&0) {
                return bad(
                    "a list of sizes of micro-batches is empty, or has one of 0 samples".into()
                );
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
            return bad(format!(
                "trained_before has {} entries, and {layers} layers need {}",
                self.trained_before.len(),
                layers + 1
            ));
        }
        if self.skips.iter().any(|skip| skip.stash >= skip.pop || skip.pop >= layers) {
            return bad("a skip names a layer that does not exist, or goes backwards".into());
        }
        let ascending = |tie: &TieCost| {
            !tie.layers.is_empty()
                && tie.layers.windows(2).all(|pair| pair[0] < pair[1])
                && tie.layers.iter().all(|&layer| layer < layers)
        };
        if !self.ties.iter().all(ascending) {
            return bad(
                "a tie names a layer that does not exist, or its layers do not ascend".into()
            );
        }
        Ok(())
    }

    /// Whether the network has batch norms, whose statistics depend on the size of micro-batches.
    pub fn has_batch_norms(&self) -> bool {
        self.layers.iter().any(|layer| layer.statistics.0 > 0)
    }

    /// The parts of the model that make edges where it is cut.
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

    /// The cost of a stage with the layers in `range`. `costs` are all layers' costs (see
    /// [`ModelCosts::at`]). The device is `speed` times as fast as the measured one.
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
        let cost = StageCost {
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
        };
        match remat {
            // A faster device does not write and read faster.
            Remat::Offload => {
                let kept = own.iter().map(|cost| cost.kept).sum();
                self.offload.unwrap_or_default().stage_cost(cost, kept)
            }
            _ => cost,
        }
    }

    /// The costs of the layers in `range`, including the loss if the range has the last layer.
    fn with_loss<'a>(&self, range: &Range<usize>, costs: &'a [LayerCost]) -> &'a [LayerCost] {
        let end = if range.end == self.layers.len() { range.end + 1 } else { range.end };
        costs.get(range.start..end).unwrap_or_default()
    }

    /// The times of messages of the given sizes.
    pub fn link_costs(&self, edges: &[EdgeBytes]) -> Vec<LinkCost> {
        let cost = |bytes: &EdgeBytes| LinkCost {
            latency: self.transport.latency,
            forward: self.transport.occupied(bytes.forward),
            backward: self.transport.occupied(bytes.backward),
        };
        edges.iter().map(cost).collect()
    }
}
