//! A stage's parameters: their values, gradients and ties.
//!
//! Each use of a tied weight has its own accumulator, also within one stage, so that the sum over uses is
//! taken once per mini-batch in layer order, wherever the cuts are (DESIGN: contract 2).

use gpipe_core::{EdgeId, LayerId, MicroBatch};
use gpipe_runtime::stage::OnEdges;
use tch::Tensor;

use super::{StagePlan, recorder::LayerBytes, update::Updater};
use crate::{
    error::{LayerError, StageError},
    rng,
    sequence::TieGroup,
    value::{Value, tensor_bytes},
};

/// A parameter in use: the layer's position within the stage, and the parameter's in the layer.
pub(super) type ParamIndex = (usize, usize);

/// All parameters of one stage.
pub(crate) struct Parameters {
    /// By layer of the stage: what is updated, in the order of the layer's specs. Tied ones share their
    /// storage.
    pub(super) masters: Vec<Vec<Tensor>>,
    /// By layer: what layers see. The masters themselves, or copies in the dtype of the arithmetic.
    working: Vec<Vec<Tensor>>,
    /// By layer: what the step has summed so far. `None`: no gradient yet.
    pub(super) grads: Vec<Vec<Option<Tensor>>>,
    /// Like `grads`: whose gradient is the next one to be summed, for sums are in the order of the micro-batches.
    turns: Vec<Vec<u32>>,
    /// Gradients of the last step by full name, if they are kept.
    pub(super) last_grads: Vec<(String, Tensor)>,
    /// Optimizer state and averages.
    pub(super) updater: Updater,
    trains: bool,
}

/// Where a layer sums its gradients, and which of those of a micro-batch may be added: where all earlier micro-batches' are.
pub(super) struct OrderedAccumulator<'a> {
    sums: &'a mut [Option<Tensor>],
    turns: &'a mut [u32],
    micro_batch: MicroBatch,
}

impl OrderedAccumulator<'_> {
    /// Whether it is the turn of the parameter in `slot`.
    pub(super) fn is_of(&self, slot: usize) -> bool {
        self.turns[slot] == self.micro_batch.0
    }

    /// Its sum so far, to be put back.
    pub(super) fn take(&mut self, slot: usize) -> Option<Tensor> {
        self.sums[slot].take()
    }

    /// Its sum, to which the micro-batch's gradient was added where it is `summed`.
    pub(super) fn put(&mut self, slot: usize, sum: Option<Tensor>, summed: bool) {
        self.sums[slot] = sum;
        self.turns[slot] += u32::from(summed);
    }
}

impl Parameters {
    /// Makes the initial values of the stage's own layers.
    pub(super) fn build(plan: &StagePlan) -> Result<Self, StageError> {
        let trains = plan.input_grads.iter().any(|&needed| needed)
            || plan.named.iter().flat_map(|layer| &layer.parameters).any(|p| p.trainable);
        let (mut masters, mut working, mut grads) = (Vec::new(), Vec::new(), Vec::new());
        for (position, layer) in plan.named.iter().enumerate() {
            let id = LayerId::from_index(plan.layers.start + position);
            masters.push(Vec::with_capacity(layer.parameters.len()));
            working.push(Vec::with_capacity(layer.parameters.len()));
            grads.push(layer.parameters.iter().map(|_| None).collect());
            for slot in 0..layer.parameters.len() {
                let pair = initial(plan, &masters, &working, id, slot);
                let named = |source| StageError::Layer { layer: layer.name.clone(), source };
                let (master, seen) = pair.map_err(named)?;
                masters[position].push(master);
                working[position].push(seen);
            }
        }
        let (last_grads, updater) = (Vec::new(), Updater::default());
        let turns = grads.iter().map(|own: &Vec<_>| vec![0; own.len()]).collect();
        Ok(Self { masters, working, grads, turns, last_grads, updater, trains })
    }

    /// What each layer holds between steps, once its optimizer state is made.
    pub(super) fn bytes(&self, plan: &StagePlan) -> Vec<LayerBytes> {
        let of_layer = |layer: usize| {
            let mut bytes = LayerBytes::default();
            for (slot, spec) in plan.named[layer].parameters.iter().enumerate() {
                let (master, seen) = (&self.masters[layer][slot], &self.working[layer][slot]);
                let copy = if master.kind() == seen.kind() { 0 } else { tensor_bytes(seen) };
                let value = tensor_bytes(master) + copy;
                let state = self.updater.bytes((layer, slot));
                bytes.gradients += if spec.trainable { tensor_bytes(master) } else { 0 };
                match spec.tie.as_ref().and_then(|t| plan.ties.iter().find(|g| g.name == *t)) {
                    None => {
                        bytes.parameters += value;
                        bytes.optimizer += state;
                    }
                    Some(group) if first_place(plan, group) == Some((layer, slot)) => {
                        bytes.tied_parameters += value;
                        bytes.tied_optimizer += state;
                    }
                    Some(_) => {}
                }
            }
            bytes
        };
        (0..plan.named.len()).map(of_layer).collect()
    }

    /// The tensors of the layer at `position`, as it sees them.
    pub(super) fn of_layer(&self, position: usize) -> &[Tensor] {
        &self.working[position]
    }

    /// Where the layer at `position` sums its gradients.
    pub(super) fn accumulators(&mut self, position: usize) -> &mut [Option<Tensor>] {
        &mut self.grads[position]
    }

    /// The same, for those gradients of `micro_batch` whose turn it is.
    pub(super) fn turn(
        &mut self,
        position: usize,
        micro_batch: MicroBatch,
    ) -> OrderedAccumulator<'_> {
        let (sums, turns) = (&mut self.grads[position], &mut self.turns[position]);
        OrderedAccumulator { sums, turns, micro_batch }
    }

    /// All of `micro_batch`'s are summed.
    pub(super) fn have_summed(&mut self, position: usize, micro_batch: MicroBatch) {
        let next = micro_batch.0 + 1;
        self.turns[position].iter_mut().for_each(|turn| *turn = next.max(*turn));
    }

    /// Whether anything up to the end of this stage is trained.
    pub(super) fn trains_up_to_here(&self) -> bool {
        self.trains
    }

    /// The step is over or has failed.
    pub(super) fn forget_grads(&mut self) {
        self.grads.iter_mut().flatten().for_each(|grad| *grad = None);
        self.turns.iter_mut().flatten().for_each(|turn| *turn = 0);
    }

    /// A failed step has no gradients to show.
    pub(super) fn forget_last_grads(&mut self) {
        self.last_grads.clear();
    }

    /// Makes what layers see of the trained parameters of the layer at `position` from their masters, where the
    /// two differ.
    pub(super) fn refresh(&self, position: usize) -> Result<(), LayerError> {
        for (master, seen) in self.masters[position].iter().zip(&self.working[position]) {
            if master.kind() != seen.kind() && seen.requires_grad() {
                seen.shallow_clone().f_copy_(master)?;
            }
        }
        Ok(())
    }

    /// The gradients of this stage's uses of the weights that the stage at the other end of `edge` owns.
    pub(super) fn tied_grads(&mut self, plan: &StagePlan, edge: EdgeId) -> Value {
        let owner = plan.edges.tie_owners.iter().find(|(own, _)| *own == edge);
        let groups = owner.into_iter().flat_map(|(_, layers)| {
            plan.ties.iter().filter(move |group| layers.contains(&group.uses[0].0.index()))
        });
        let uses: Vec<ParamIndex> = groups.flat_map(|group| places(plan, group)).collect();
        Value::new(uses.into_iter().map(|(layer, slot)| self.grads[layer][slot].take()).collect())
    }

    /// Sums the tied gradients of the groups owned here, own uses first, then those that arrived (by edge,
    /// on this stage's device), in stage order: all in layer order. Returns a copy of each sum for every
    /// stage that uses it.
    pub(super) fn reduce(
        &mut self,
        plan: &StagePlan,
        arrived: OnEdges<Vec<Option<Tensor>>>,
    ) -> Result<OnEdges<Value>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let mut arrived: Vec<(EdgeId, std::vec::IntoIter<Option<Tensor>>)> =
            arrived.into_iter().map(|(edge, grads)| (edge, grads.into_iter())).collect();
        let mut sums: std::collections::HashMap<EdgeId, Vec<Option<Tensor>>> = Default::default();
        for group in plan.ties.iter().filter(|group| plan.layers.contains(&group.uses[0].0.index()))
        {
            let own = places(plan, group);
            let mut parts: Vec<Option<Tensor>> =
                own.iter().map(|&(layer, slot)| self.grads[layer][slot].take()).collect();
            let mut users = Vec::new();
            for (edge, layers) in &plan.edges.tie_users {
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
                self.grads[layer][slot] = sum;
            }
        }
        let users = plan.edges.tie_users.iter();
        let sum_for = |edge: &EdgeId| Value::new(sums.remove(edge).unwrap_or_default());
        Ok(users
            .map(|(edge, _)| *edge)
            .zip(plan.edges.tie_users.iter().map(|(e, _)| e).map(sum_for))
            .collect())
    }

    /// Takes the sums for the weights that other stages own.
    pub(super) fn accept_sums(&mut self, plan: &StagePlan, sums: OnEdges<Vec<Option<Tensor>>>) {
        for (edge, sums) in sums {
            let owner = plan.edges.tie_owners.iter().find(|(own, _)| *own == edge);
            let groups = owner.into_iter().flat_map(|(_, layers)| {
                plan.ties.iter().filter(move |g| layers.contains(&g.uses[0].0.index()))
            });
            let used = groups.filter_map(|group| first_place(plan, group));
            for ((layer, slot), sum) in used.zip(sums) {
                self.grads[layer][slot] = sum;
            }
        }
    }

    /// Copies of the parameters on the CPU with their full names; a tied one under its first use in the
    /// whole model, and only on the stage that owns it.
    pub(crate) fn copies(
        &self,
        plan_names: &[(String, ParamIndex)],
    ) -> Result<Vec<(String, Tensor)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        plan_names
            .iter()
            .map(|(name, (layer, slot))| {
                Ok((name.clone(), copy_to_cpu(&self.masters[*layer][*slot])?))
            })
            .collect()
    }

    /// Copies of the last step's gradients, if they were kept.
    pub(crate) fn last_grads(&self) -> Result<Vec<(String, Tensor)>, LayerError> {
        let copy = |(name, grad): &(String, Tensor)| Ok((name.clone(), copy_to_cpu(grad)?));
        self.last_grads.iter().map(copy).collect()
    }

    /// Overwrites a parameter.
    pub(crate) fn set(
        &mut self,
        (layer, slot): ParamIndex,
        value: &Tensor,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.masters[layer][slot].f_copy_(value)?;
        let (master, seen) = (&self.masters[layer][slot], &self.working[layer][slot]);
        if master.kind() != seen.kind() {
            seen.shallow_clone().f_copy_(master)?; // frozen ones, too
        }
        Ok(())
    }
}

/// A copy that nothing else shares, on the CPU.
pub(super) fn copy_to_cpu(tensor: &Tensor) -> Result<Tensor, LayerError> {
    if tensor.device() == tch::Device::Cpu {
        return Ok(tensor.f_detach_copy()?);
    }
    Ok(tensor.f_detach()?.f_to(tch::Device::Cpu)?)
}

/// The initial master of a parameter, and what its layer sees of it. A tied one's value is that of its
/// first use, on whatever stage.
fn initial(
    plan: &StagePlan,
    masters: &[Vec<Tensor>],
    working: &[Vec<Tensor>],
    id: LayerId,
    slot: usize,
) -> Result<(Tensor, Tensor), LayerError> {
    let spec = &plan.named[id.index() - plan.layers.start].parameters[slot];
    let group = spec.tie.as_ref().and_then(|tie| plan.ties.iter().find(|g| g.name == *tie));
    let reduced = plan.precision.is_reduced();
    // In place on the leaf itself: only what layers see takes part in graphs.
    let leaf = |tensor: Tensor| tensor.f_set_requires_grad(spec.trainable);
    if let Some((layer, slot)) = group.and_then(|group| first_place(plan, group))
        && let (Some(master), Some(seen)) = (
            masters.get(layer).and_then(|values| values.get(slot)),
            working.get(layer).and_then(|values| values.get(slot)),
        )
    {
        // The same storage, but a leaf of its own: one leaf used twice in a layer would get, for each
        // use, the gradient of both.
        let seen = leaf(seen.f_detach()?)?;
        let master = if reduced { master.shallow_clone() } else { seen.shallow_clone() };
        return Ok((master, seen));
    }
    let (first, init, name) = match group {
        Some(group) => (group.uses[0].0, group.init, group.parameter.as_str()),
        None => (id, spec.init, spec.name.as_str()),
    };
    let key = (plan.seed, u64::from(first.0), name);
    let master = rng::initial(init, &spec.shape, plan.precision.master, key)?;
    let master = master.f_to(plan.device.tch())?;
    if reduced && !spec.buffer {
        let seen = leaf(master.f_to_kind(plan.precision.compute)?)?;
        return Ok((master, seen));
    }
    let master = leaf(master)?;
    Ok((master.shallow_clone(), master))
}

/// The sum of the gradients that are there, in order.
fn sum_in_order(parts: Vec<Option<Tensor>>) -> Result<Option<Tensor>, LayerError> {
    let mut parts = parts.into_iter().flatten();
    let Some(mut sum) = parts.next() else { return Ok(None) };
    for part in parts {
        sum = sum.f_add_(&part)?;
    }
    Ok(Some(sum))
}

/// Where `group` is used on this stage, in layer order.
fn places(plan: &StagePlan, group: &TieGroup) -> Vec<ParamIndex> {
    let here = group.uses.iter().filter(|(layer, _)| plan.layers.contains(&layer.index()));
    here.map(|(layer, slot)| (layer.index() - plan.layers.start, *slot)).collect()
}

pub(super) fn first_place(plan: &StagePlan, group: &TieGroup) -> Option<ParamIndex> {
    places(plan, group).first().copied()
}
