//! A stage's parameters: their values, gradients and optimizer state, ties, norm and update.
//!
//! Each use of a tied weight has its own accumulator, also within one stage, so that the sum over uses is
//! taken once per mini-batch in layer order, wherever the cuts are (DESIGN: contract 2).

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{EdgeId, LayerId};
use gpipe_runtime::{Vote, stage::OnEdges};
use tch::Tensor;

use super::StagePlan;
use crate::{
    error::{LayerError, StageError},
    optim::{Optimizer, Update},
    rng,
    sequence::TieGroup,
    value::Value,
};

/// A parameter in use: the layer's position within the stage, and the parameter's in the layer.
type Place = (usize, usize);

/// The optimizer's state of one parameter.
struct State {
    /// In the order of the optimizer's slots.
    tensors: Vec<Tensor>,
    /// Updates applied to this parameter: a gradient may be there first at a later step than others'.
    updates: u64,
}

/// All parameters of one stage.
pub(crate) struct Parameters {
    /// By layer of the stage: tensors in the order of the layer's specs. Tied ones share their storage.
    values: Vec<Vec<Tensor>>,
    /// By layer: what the step has summed so far. `None`: no gradient yet.
    grads: Vec<Vec<Option<Tensor>>>,
    /// By place of the first use here: the optimizer's state, made before the first update.
    state: HashMap<Place, State>,
    /// Gradients of the last step by full name, if they are kept.
    last_grads: Vec<(String, Tensor)>,
    trains: bool,
}

impl Parameters {
    /// Makes the initial values of the stage's own layers.
    pub(super) fn build(plan: &StagePlan) -> Result<Self, StageError> {
        let mut parameters = Self {
            values: Vec::new(),
            grads: Vec::new(),
            state: HashMap::new(),
            last_grads: Vec::new(),
            trains: plan.input_grads.iter().any(|&needed| needed)
                || plan.named.iter().flat_map(|layer| &layer.parameters).any(|p| p.trainable),
        };
        for (position, layer) in plan.named.iter().enumerate() {
            let id = plan.layers.start + position;
            parameters.values.push(Vec::with_capacity(layer.parameters.len()));
            for slot in 0..layer.parameters.len() {
                let value = parameters.initial(plan, LayerId::from_index(id), slot);
                let named = |source| StageError::Layer { layer: layer.name.clone(), source };
                parameters.values[position].push(value.map_err(named)?);
            }
            parameters.grads.push(layer.parameters.iter().map(|_| None).collect());
        }
        Ok(parameters)
    }

    /// The initial value of a parameter: a tied one's is that of its first use, on whatever stage.
    fn initial(&self, plan: &StagePlan, id: LayerId, slot: usize) -> Result<Tensor, LayerError> {
        let spec = &plan.named[id.index() - plan.layers.start].parameters[slot];
        let group = spec.tie.as_ref().and_then(|tie| plan.ties.iter().find(|g| g.name == *tie));
        if let Some((layer, slot)) = group.and_then(|group| first_place(plan, group))
            && let Some(value) = self.values.get(layer).and_then(|values| values.get(slot))
        {
            // The same storage, but a leaf of its own: one leaf used twice in a layer would get, for each
            // use, the gradient of both.
            return Ok(value.f_detach()?.f_set_requires_grad(spec.trainable)?);
        }
        let (first, init, name) = match group {
            Some(group) => (group.uses[0].0, group.init, group.parameter.as_str()),
            None => (id, spec.init, spec.name.as_str()),
        };
        let key = (plan.seed, u64::from(first.0), name);
        let value = rng::initial(init, &spec.shape, plan.kind, key)?;
        Ok(value.f_set_requires_grad(spec.trainable)?)
    }

    /// The tensors of the layer at `position`.
    pub(super) fn of_layer(&self, position: usize) -> &[Tensor] {
        &self.values[position]
    }

    /// Where the layer at `position` sums its gradients.
    pub(super) fn accumulators(&mut self, position: usize) -> &mut [Option<Tensor>] {
        &mut self.grads[position]
    }

    /// Whether anything up to the end of this stage is trained.
    pub(super) fn trains_up_to_here(&self) -> bool {
        self.trains
    }

    /// The step is over or has failed.
    pub(super) fn forget_grads(&mut self) {
        self.grads.iter_mut().flatten().for_each(|grad| *grad = None);
    }

    /// A failed step has no gradients to show.
    pub(super) fn forget_last_grads(&mut self) {
        self.last_grads.clear();
    }

    /// The gradients of this stage's uses of the weights that the stage at the other end of `edge` owns.
    pub(super) fn tied_grads(&mut self, plan: &StagePlan, edge: EdgeId) -> Value {
        let owner = plan.edges.tie_owners.iter().find(|(own, _)| *own == edge);
        let groups = owner.into_iter().flat_map(|(_, layers)| {
            plan.ties.iter().filter(move |group| layers.contains(&group.uses[0].0.index()))
        });
        let uses: Vec<Place> = groups.flat_map(|group| places(plan, group)).collect();
        Value(uses.into_iter().map(|(layer, slot)| self.grads[layer][slot].take()).collect())
    }

    /// Sums the tied gradients of the groups owned here, own uses first, then those that arrived, in
    /// stage order: all in layer order. Returns a copy of each sum for every stage that uses it.
    pub(super) fn reduce(
        &mut self,
        plan: &StagePlan,
        arrived: OnEdges<Value>,
    ) -> Result<OnEdges<Value>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let mut arrived: Vec<(EdgeId, std::vec::IntoIter<Option<Tensor>>)> =
            arrived.into_iter().map(|(edge, Value(grads))| (edge, grads.into_iter())).collect();
        let mut sums: HashMap<EdgeId, Vec<Option<Tensor>>> = HashMap::new();
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
        Ok(users.map(|(edge, _)| (*edge, Value(sums.remove(edge).unwrap_or_default()))).collect())
    }

    /// Takes the sums for the weights that other stages own.
    pub(super) fn accept_sums(&mut self, plan: &StagePlan, sums: OnEdges<Value>) {
        for (edge, Value(sums)) in sums {
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

    /// All that can fail before the update: state tensors are made. Returns the squared norms by layer;
    /// a tied weight counts at its first use only.
    pub(super) fn prepare(&mut self, plan: &StagePlan) -> Result<Vote, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let slots = plan.optimizer.as_ref().map_or(0, |optimizer| optimizer.slots().len());
        self.last_grads.clear();
        let mut vote = Vote::default();
        for (layer, named) in plan.named.iter().enumerate() {
            let id = LayerId::from_index(plan.layers.start + layer);
            let mut square = 0.0;
            for (slot, spec) in named.parameters.iter().enumerate() {
                let Some(grad) = &self.grads[layer][slot] else { continue };
                let owned = spec.tie.as_ref().is_none_or(|tie| {
                    plan.ties.iter().any(|g| g.name == *tie && g.uses[0] == (id, slot))
                });
                if owned {
                    let norm = grad.f_norm()?.f_double_value(&[])?;
                    square += norm * norm;
                }
                if owned && plan.keep_gradients {
                    let name = format!("{}.{}", named.name, spec.name);
                    self.last_grads.push((name, grad.f_detach_copy()?));
                }
                if !self.state.contains_key(&(layer, slot)) {
                    let value = &self.values[layer][slot];
                    let zeros = (0..slots).map(|_| Ok(value.f_zeros_like()?.f_detach()?));
                    let zeros = zeros.collect::<Result<_, LayerError>>()?;
                    self.state.insert((layer, slot), State { tensors: zeros, updates: 0 });
                }
            }
            vote.squares.push((id, square));
        }
        Ok(vote)
    }

    /// Applies the update, layer by layer.
    pub(super) fn update(
        &mut self,
        plan: &StagePlan,
        scale: f64,
        lr: f64,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let Some(optimizer) = &plan.optimizer else { return Ok(()) };
        for layer in 0..self.values.len() {
            let mut by_updates: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
            for slot in 0..self.values[layer].len() {
                let state = self.state.get_mut(&(layer, slot));
                if let (Some(state), true) = (state, self.grads[layer][slot].is_some()) {
                    state.updates += 1;
                    by_updates.entry(state.updates).or_default().push(slot);
                }
            }
            for (update, slots) in by_updates {
                self.update_slots(optimizer.as_ref(), layer, &slots, scale, lr, update)?;
            }
        }
        Ok(())
    }

    /// Updates those parameters of a layer that `slots` names, all of them for the `update`-th time.
    fn update_slots(
        &mut self,
        optimizer: &dyn Optimizer,
        layer: usize,
        slots: &[usize],
        scale: f64,
        lr: f64,
        update: u64,
    ) -> Result<(), LayerError> {
        let mut grads: Vec<Tensor> =
            slots.iter().filter_map(|&slot| self.grads[layer][slot].take()).collect();
        if scale != 1.0 {
            for grad in &mut grads {
                let _ = grad.f_mul_scalar_(scale)?;
            }
        }
        let state = slots.iter().filter_map(|&slot| self.state.get(&(layer, slot)));
        let state: Vec<&Vec<Tensor>> = state.map(|state| &state.tensors).collect();
        let columns: Vec<Vec<&Tensor>> = (0..optimizer.slots().len())
            .map(|column| state.iter().filter_map(|tensors| tensors.get(column)).collect())
            .collect();
        optimizer.apply(&Update {
            parameters: &slots.iter().map(|&slot| &self.values[layer][slot]).collect::<Vec<_>>(),
            grads: &grads.iter().collect::<Vec<_>>(),
            slots: &columns,
            lr,
            update,
        })
    }

    /// Copies of the parameters with their full names; a tied one under its first use in the whole model,
    /// and only on the stage that owns it.
    pub(crate) fn copies(
        &self,
        plan_names: &[(String, Place)],
    ) -> Result<Vec<(String, Tensor)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        plan_names
            .iter()
            .map(|(name, (layer, slot))| {
                Ok((name.clone(), self.values[*layer][*slot].f_detach_copy()?))
            })
            .collect()
    }

    /// Copies of the last step's gradients, if they were kept.
    pub(crate) fn last_grads(&self) -> Result<Vec<(String, Tensor)>, LayerError> {
        let copy = |(name, grad): &(String, Tensor)| Ok((name.clone(), grad.f_detach_copy()?));
        self.last_grads.iter().map(copy).collect()
    }

    /// Overwrites a parameter.
    pub(crate) fn set(&mut self, (layer, slot): Place, value: &Tensor) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        Ok(self.values[layer][slot].f_copy_(value)?)
    }
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
fn places(plan: &StagePlan, group: &TieGroup) -> Vec<Place> {
    let here = group.uses.iter().filter(|(layer, _)| plan.layers.contains(&layer.index()));
    here.map(|(layer, slot)| (layer.index() - plan.layers.start, *slot)).collect()
}

fn first_place(plan: &StagePlan, group: &TieGroup) -> Option<Place> {
    places(plan, group).first().copied()
}
