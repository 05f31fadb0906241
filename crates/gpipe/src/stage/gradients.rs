//! The gradients of one step, summed by layer in micro-batch order.
//!
//! Each use of a tied weight has its own accumulator, even within one stage. The sum over uses is
//! taken once per mini-batch in layer order, so it does not depend on the cuts.

use std::collections::HashMap;

use gpipe_core::{EdgeId, MicroBatch};
use gpipe_runtime::stage::OnEdges;
use tch::Tensor;

use super::{
    config::StageConfig,
    parameters::{ParamIndex, first_place, places},
};
use crate::{error::LayerError, value::Value};

/// The gradients that a step has summed so far.
#[derive(Default)]
pub(super) struct Gradients {
    /// By layer of the stage and parameter. `None` if there is no gradient yet.
    sums: Vec<Vec<Option<Tensor>>>,
    /// Like `sums`: the micro-batch whose gradient must be added next.
    turns: Vec<Vec<u32>>,
}

/// The gradient sums of one layer, for one micro-batch. A gradient may be added once the gradients
/// of all earlier micro-batches are.
pub(super) struct OrderedAccumulator<'a> {
    sums: &'a mut [Option<Tensor>],
    turns: &'a mut [u32],
    micro_batch: MicroBatch,
}

impl OrderedAccumulator<'_> {
    /// Whether it is the turn of the micro-batch for the parameter in `slot`.
    pub(super) fn is_of(&self, slot: usize) -> bool {
        self.turns[slot] == self.micro_batch.0
    }

    /// Takes the sum of the parameter in `slot`. The caller must put it back.
    pub(super) fn take(&mut self, slot: usize) -> Option<Tensor> {
        self.sums[slot].take()
    }

    /// Puts back a sum. `summed` says whether the micro-batch's gradient was added to it.
    pub(super) fn put(&mut self, slot: usize, sum: Option<Tensor>, summed: bool) {
        self.sums[slot] = sum;
        self.turns[slot] += u32::from(summed);
    }
}

impl Gradients {
    pub(super) fn new(config: &StageConfig) -> Self {
        let counts = config.named.iter().map(|layer| layer.parameters.len());
        let (sums, turns) =
            counts.map(|count| ((0..count).map(|_| None).collect(), vec![0; count])).unzip();
        Self { sums, turns }
    }

    /// Starts a program: its micro-batches are numbered from 0 and follow those that are summed.
    pub(super) fn start_turns(&mut self) {
        self.turns.iter_mut().flatten().for_each(|turn| *turn = 0);
    }

    /// The gradient sums of the layer at `position`. `None` if there is no gradient yet.
    pub(super) fn accumulators(&mut self, position: usize) -> &mut [Option<Tensor>] {
        &mut self.sums[position]
    }

    /// The gradient of a parameter so far.
    pub(super) fn of(&self, (layer, slot): ParamIndex) -> Option<&Tensor> {
        self.sums[layer][slot].as_ref()
    }

    /// The place of one parameter's gradient.
    pub(super) fn place(&mut self, (layer, slot): ParamIndex) -> &mut Option<Tensor> {
        &mut self.sums[layer][slot]
    }

    /// All gradients that exist.
    pub(super) fn present(&self) -> impl Iterator<Item = &Tensor> {
        self.sums.iter().flatten().flatten()
    }

    /// Drops all gradients after the update.
    pub(super) fn clear(&mut self) {
        self.sums.iter_mut().flatten().for_each(|sum| *sum = None);
    }

    /// The gradient sums of the layer at `position`, for `micro_batch`.
    pub(super) fn turn(
        &mut self,
        position: usize,
        micro_batch: MicroBatch,
    ) -> OrderedAccumulator<'_> {
        let (sums, turns) = (&mut self.sums[position], &mut self.turns[position]);
        OrderedAccumulator { sums, turns, micro_batch }
    }

    /// Records that all of the layer's gradients of `micro_batch` are summed.
    pub(super) fn have_summed(&mut self, position: usize, micro_batch: MicroBatch) {
        let next = micro_batch.0 + 1;
        self.turns[position].iter_mut().for_each(|turn| *turn = next.max(*turn));
    }

    /// Takes the gradients of this stage's uses of the weights that the stage at the other end of
    /// `edge` owns.
    pub(super) fn tied(&mut self, config: &StageConfig, edge: EdgeId) -> Value {
        let owner = config.edges.tie_owners.iter().find(|(own, _)| *own == edge);
        let groups = owner.into_iter().flat_map(|(_, layers)| {
            config.ties.iter().filter(move |group| layers.contains(&group.uses[0].0.index()))
        });
        let uses: Vec<ParamIndex> = groups.flat_map(|group| places(config, group)).collect();
        Value::new(uses.into_iter().map(|(layer, slot)| self.sums[layer][slot].take()).collect())
    }

    /// Sums the tied gradients of the groups owned here. Returns a copy of each sum for every stage
    /// that uses the weight.
    ///
    /// The order is layer order: this stage's uses first, then those that arrived (by edge, on this
    /// stage's device), in stage order.
    pub(super) fn reduce(
        &mut self,
        config: &StageConfig,
        arrived: OnEdges<Vec<Option<Tensor>>>,
    ) -> Result<OnEdges<Value>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let mut arrived: Vec<(EdgeId, std::vec::IntoIter<Option<Tensor>>)> =
            arrived.into_iter().map(|(edge, grads)| (edge, grads.into_iter())).collect();
        let mut sums: HashMap<EdgeId, Vec<Option<Tensor>>> = HashMap::new();
        for group in
            config.ties.iter().filter(|group| config.layers.contains(&group.uses[0].0.index()))
        {
            let own = places(config, group);
            let mut parts: Vec<Option<Tensor>> =
                own.iter().map(|&(layer, slot)| self.sums[layer][slot].take()).collect();
            let mut users = Vec::new();
            for (edge, layers) in &config.edges.tie_users {
                let count = group.uses.iter().filter(|(l, _)| layers.contains(&l.index())).count();
                let grads = arrived.iter_mut().find(|(own, _)| own == edge);
                if let (true, Some((_, grads))) = (count > 0, grads) {
                    parts.extend(grads.by_ref().take(count));
                    users.push(*edge);
                }
            }
            let sum = sum_in_order(parts)?;
            for edge in users {
                let copy = sum.as_ref().map(Tensor::f_detach_copy).transpose()?;
                sums.entry(edge).or_default().push(copy);
            }
            if let Some(&(layer, slot)) = own.first() {
                self.sums[layer][slot] = sum;
            }
        }
        let users = config.edges.tie_users.iter();
        let sum_for = |edge: &EdgeId| Value::new(sums.remove(edge).unwrap_or_default());
        Ok(users
            .map(|(edge, _)| *edge)
            .zip(config.edges.tie_users.iter().map(|(e, _)| e).map(sum_for))
            .collect())
    }

    /// Stores the sums for weights that the stage at the other end of `edge` owns.
    pub(super) fn accept_sums(
        &mut self,
        config: &StageConfig,
        edge: EdgeId,
        sums: Vec<Option<Tensor>>,
    ) {
        let owner = config.edges.tie_owners.iter().find(|(own, _)| *own == edge);
        let groups = owner.into_iter().flat_map(|(_, layers)| {
            config.ties.iter().filter(move |g| layers.contains(&g.uses[0].0.index()))
        });
        let used = groups.filter_map(|group| first_place(config, group));
        for ((layer, slot), sum) in used.zip(sums) {
            self.sums[layer][slot] = sum;
        }
    }
}

/// Adds up the gradients that exist, in order.
pub(crate) fn sum_in_order(parts: Vec<Option<Tensor>>) -> Result<Option<Tensor>, LayerError> {
    let mut parts = parts.into_iter().flatten();
    let Some(mut sum) = parts.next() else { return Ok(None) };
    for part in parts {
        sum = sum.f_add_(&part)?;
    }
    Ok(Some(sum))
}
