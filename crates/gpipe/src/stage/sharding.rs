//! The optimizer state of a stage, shared out over the replicas of a pipeline (ZeRO stage 1:
//! Rajbhandari et al. 2020, section 5.1).
//!
//! Each parameter has one replica that keeps its state and updates it. The gradients are summed as
//! without sharding: every replica has all of them. So the norm, clipping and the decision to
//! update are the same, and no bit differs. After its own updates, each replica sends the new
//! values of its parameters to all others.

use std::collections::{HashMap, VecDeque};

use gpipe_core::{Bytes, shard};
use tch::{Device, Tensor};

use super::{
    Stage,
    config::StageConfig,
    parameters::{ParamIndex, Parameters, copy_to_cpu, first_place},
};
use crate::{
    error::LayerError,
    processes::{PeerError, Summing},
    state::OptimizerState,
    tape::bytes,
};

/// Maximum number of parameters under way between replicas.
const UNDER_WAY_MAX: usize = 64;

/// Which replica keeps the state of each parameter of a stage.
pub(super) struct Sharding {
    /// The index of this replica.
    own: usize,
    /// By the place of a parameter's first use on the stage.
    owners: HashMap<ParamIndex, usize>,
}

impl Sharding {
    /// `None` if every replica keeps all state. It holds for the life of the stage: parameters that
    /// are frozen have an owner too, because they may be trained later.
    pub(super) fn new(config: &StageConfig) -> Option<Self> {
        let replicas = config.replicas.as_ref().filter(|_| config.shards_optimizer)?;
        let (mut trained, mut frozen) = (Vec::new(), Vec::new());
        for (layer, named) in config.named.iter().enumerate() {
            for (slot, spec) in named.parameters.iter().enumerate() {
                let place = (layer, slot);
                let tie = spec.tie.as_ref();
                let group = tie.and_then(|tie| config.ties.iter().find(|g| g.name == *tie));
                let is_first = group.is_none_or(|g| first_place(config, g) == Some(place));
                match is_first && !spec.buffer {
                    true if spec.trainable => trained.push(place),
                    true => frozen.push(place),
                    false => {}
                }
            }
        }
        let mut owners = HashMap::new();
        for places in [trained, frozen] {
            let sizes: Vec<Bytes> =
                places.iter().map(|&place| state_bytes(config, place)).collect();
            owners.extend(places.into_iter().zip(shard::shards(&sizes, replicas.count())));
        }
        Some(Self { own: replicas.index(), owners })
    }

    /// Whether this replica keeps the state of the parameter at `place`.
    fn keeps(&self, place: ParamIndex) -> bool {
        self.owners.get(&place).is_none_or(|owner| *owner == self.own)
    }
}

/// The bytes that the optimizer keeps for a parameter, as predictions count them.
fn state_bytes(config: &StageConfig, place: ParamIndex) -> Bytes {
    let kind = config.precision.master;
    let info = config.info(place, kind);
    let state = config.optimizer.iter().flat_map(|optimizer| optimizer.state(&info));
    Bytes(state.map(|state| bytes(&state.spec(kind)) as u64).fold(0, u64::saturating_add))
}

/// The exchange of updated parameters between the replicas, while an update runs.
pub(super) struct Exchange<'a> {
    summing: &'a mut (dyn Summing + 'static),
    under_way: VecDeque<ParamIndex>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(summing: &'a mut (dyn Summing + 'static)) -> Self {
        Self { summing, under_way: VecDeque::new() }
    }

    /// Begins to exchange the parameters at `places`, which their owners have updated. All replicas
    /// begin the same ones in the same order.
    pub(super) fn begin(
        &mut self,
        parameters: &Parameters,
        places: &[ParamIndex],
    ) -> Result<(), LayerError> {
        let Some(Sharding { owners, .. }) = &parameters.sharding else { return Ok(()) };
        for place @ (layer, slot) in places.iter().copied() {
            let Some(&owner) = owners.get(&place) else { continue };
            if self.under_way.len() >= UNDER_WAY_MAX {
                self.settle(parameters)?;
            }
            // On a CPU this shares the parameter's memory, which receives the new value directly.
            let value = parameters.masters[layer][slot].f_detach()?.f_to(Device::Cpu)?;
            self.summing.begin_broadcast(value.f_contiguous()?, owner).map_err(lost)?;
            self.under_way.push_back(place);
        }
        Ok(())
    }

    /// Waits until every parameter has its new value.
    pub(super) fn finish(mut self, parameters: &Parameters) -> Result<(), LayerError> {
        while !self.under_way.is_empty() {
            self.settle(parameters)?;
        }
        Ok(())
    }

    fn settle(&mut self, parameters: &Parameters) -> Result<(), LayerError> {
        let Some((layer, slot)) = self.under_way.pop_front() else { return Ok(()) };
        let value = self.summing.end().map_err(lost)?;
        let master = &parameters.masters[layer][slot];
        if value.data_ptr() != master.data_ptr() {
            master.f_detach()?.f_copy_(&value)?;
        }
        Ok(())
    }
}

impl Parameters {
    /// Whether this replica keeps and updates the state of the parameter at `place`.
    pub(super) fn keeps_state(&self, place: ParamIndex) -> bool {
        self.sharding.as_ref().is_none_or(|sharding| sharding.keeps(place))
    }
}

impl Stage {
    /// CPU copies of the optimizer state at `places` that other replicas keep, by position in
    /// `places`. All replicas call this at the same time. If not `wanted`, what arrives is dropped.
    pub(super) fn state_elsewhere(
        &mut self,
        places: &[ParamIndex],
        wanted: bool,
    ) -> Result<HashMap<usize, OptimizerState>, LayerError> {
        let (parameters, config) = (&self.parameters, &self.config);
        let (Some(sharding), Some(summing), Some(optimizer)) =
            (&parameters.sharding, &mut self.replicas, &config.optimizer)
        else {
            return Ok(HashMap::new());
        };
        let state = &parameters.updater.state;
        // One more than the number of updates; 0 without state. Only the owner has state.
        let own =
            places.iter().map(|place| state.get(place).map_or(0, |own| own.updates as i64 + 1));
        let counts = Tensor::f_from_slice(&own.collect::<Vec<i64>>())?;
        summing.begin(counts).map_err(lost)?;
        let counts = Vec::<i64>::try_from(&summing.end().map_err(lost)?)?;
        let mut found = HashMap::new();
        for (at, (&place, count)) in places.iter().zip(counts).enumerate() {
            let Some(&owner) = sharding.owners.get(&place).filter(|_| count > 0) else { continue };
            let kind = config.precision.master;
            let mut tensors = Vec::new();
            for (number, spec) in optimizer.state(&config.info(place, kind)).iter().enumerate() {
                let kept = state.get(&place).and_then(|own| own.tensors.get(number));
                let value = match kept {
                    Some(kept) => copy_to_cpu(kept)?.f_contiguous()?,
                    None => Tensor::f_empty(&spec.shape, (spec.kind.unwrap_or(kind), Device::Cpu))?,
                };
                summing.begin_broadcast(value, owner).map_err(lost)?;
                let value = summing.end().map_err(lost)?;
                if wanted {
                    tensors.push((spec.name.to_owned(), value));
                }
            }
            if wanted && owner != sharding.own {
                found.insert(at, OptimizerState { updates: count as u64 - 1, tensors });
            }
        }
        Ok(found)
    }
}

fn lost(error: PeerError) -> LayerError {
    LayerError::Value(error.to_string())
}
