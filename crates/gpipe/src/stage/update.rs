//! The work on a stage's parameters once per mini-batch: the norm, the update, the moving averages.

use std::collections::{BTreeMap, HashMap};

use gpipe_core::LayerId;
use gpipe_runtime::Vote;
use tch::{Kind, Tensor};

use super::{
    config::StageConfig,
    gradients::Gradients,
    parameters::{ParamIndex, Parameters, copy_to_cpu, first_place},
    reduction::{self, BatchMoments},
    sharding::Exchange,
    step::Statistics,
};
use crate::{
    batch_norm::{BATCHES, MEAN, VARIANCE, combine},
    error::LayerError,
    optim::{Optimizer, ParameterSettings, StateSpec, Update},
    processes::Summing,
    spec::TensorSpec,
    value::tensor_bytes,
};

/// Optimizer state and averages, by the place of a parameter's first use on the stage.
#[derive(Default)]
pub(super) struct Updater {
    pub(super) state: HashMap<ParamIndex, State>,
    pub(super) averages: HashMap<ParamIndex, Tensor>,
    /// Number of updates in the averages.
    pub(super) averaged: u64,
}

impl Updater {
    /// Drops the state that the optimizer of `config` does not keep in this form.
    pub(super) fn keep_fitting(&mut self, config: &StageConfig, masters: &[Vec<Tensor>]) {
        let Some(optimizer) = &config.optimizer else { return };
        self.state.retain(|&place, state| {
            let kind = masters[place.0][place.1].kind();
            let wanted = optimizer.state(&config.info(place, kind));
            let kept = state.names.iter().zip(&state.tensors);
            wanted.len() == state.tensors.len()
                && wanted.iter().zip(kept).all(|(wanted, (name, tensor))| {
                    wanted.name == *name && wanted.spec(kind) == TensorSpec::of(tensor)
                })
        });
    }

    /// Bytes of a parameter's optimizer state and average.
    pub(super) fn bytes(&self, place: ParamIndex) -> u64 {
        let state = self.state.get(&place).into_iter().flat_map(|state| &state.tensors);
        state.chain(self.averages.get(&place)).map(tensor_bytes).sum()
    }
}

/// The optimizer state of one parameter, created before its first update.
pub(super) struct State {
    /// Names and tensors, in the order of [`Optimizer::state`].
    pub(super) names: Vec<&'static str>,
    pub(super) tensors: Vec<Tensor>,
    /// Number of updates applied to this parameter. It may be smaller than for others, because the
    /// parameter may get its first gradient in a later step.
    pub(super) updates: u64,
}

/// The input of one update.
pub(super) struct StepUpdate<'a> {
    pub gradients: &'a mut Gradients,
    /// The new running statistics of batch norms.
    pub running: &'a [(ParamIndex, Tensor)],
    /// The factor of the gradients.
    pub scale: f64,
    /// The learning rate before any group's factor.
    pub lr: f64,
    /// The number of the step, from 1.
    pub number: u64,
    /// The other replicas, if there are any.
    pub replicas: Option<&'a mut (dyn Summing + 'static)>,
}

impl Parameters {
    /// Does everything that can fail before the update, such as creating state tensors.
    ///
    /// Returns the squared norms by layer; a tied weight counts only at its first use. `unscale` is
    /// the factor of the gradients that are kept for the user.
    pub(super) fn prepare(
        &mut self,
        config: &StageConfig,
        gradients: &Gradients,
        unscale: f64,
    ) -> Result<Vote, LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.last_grads.clear();
        let mut norms: Vec<(LayerId, Tensor)> = Vec::new();
        for (layer, named) in config.named.iter().enumerate() {
            let id = LayerId::from_index(config.layers.start + layer);
            for (slot, spec) in named.parameters.iter().enumerate() {
                self.make_average(config, (layer, slot))?;
                let Some(grad) = gradients.of((layer, slot)) else { continue };
                let owned = spec.tie.as_ref().is_none_or(|tie| {
                    config.ties.iter().any(|g| g.name == *tie && g.uses[0] == (id, slot))
                });
                if owned {
                    norms.push((id, grad.f_norm()?));
                }
                if owned && config.keep_gradients {
                    let name = format!("{}.{}", named.name, spec.name);
                    self.last_grads.push((name, grad.f_detach_copy()?.f_mul_scalar_(unscale)?));
                }
                self.make_state(config, (layer, slot))?;
            }
        }
        try_temporaries(config, gradients)?;
        squares(config, &norms)
    }

    /// Computes the running statistics of batch norms after this mini-batch: running <- (1 - m)
    /// running + m new, with the unbiased variance. Without a momentum all mini-batches count
    /// equally: m = 1 / t at mini-batch t.
    pub(super) fn running_statistics(
        &self,
        config: &StageConfig,
        statistics: Statistics,
        replicas: Option<&mut (dyn Summing + 'static)>,
    ) -> Result<Vec<(ParamIndex, Tensor)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let (mut places, mut all) = (Vec::new(), Vec::new());
        for ((layer, first), seen) in statistics {
            let own = config.named[layer].parameters.get(first + MEAN..=first + BATCHES);
            if !own.is_some_and(|own| own.iter().all(|spec| spec.buffer)) {
                return Err(LayerError::Value(format!(
                    "layer '{}': the parameters from number {first} on are not those of a batch \
                    norm",
                    config.named[layer].name
                )));
            }
            let momentum = seen.first().and_then(|(_, seen)| seen.momentum);
            for seen in config.norms_follow.together(seen) {
                let Some((count, mean, squares)) = combine(seen)? else {
                    continue;
                };
                places.push((layer, first, momentum));
                all.push(BatchMoments { count, mean, squares });
            }
        }
        if let Some(replicas) = replicas {
            reduction::combine(replicas, &mut all)?;
        }
        let mut running_after: Vec<(ParamIndex, Tensor)> = Vec::new();
        for ((layer, first, momentum), BatchMoments { count, mean, squares }) in
            places.into_iter().zip(all)
        {
            let old = |number: usize| {
                let place = (layer, first + number);
                let newer = running_after.iter().rfind(|(own, _)| *own == place);
                newer.map_or(&self.masters[layer][first + number], |(_, value)| value)
            };
            let share = match momentum {
                Some(momentum) => momentum,
                None => 1.0 / (old(BATCHES).f_double_value(&[0])? + 1.0),
            };
            let variance = squares.f_mul_scalar(1.0 / (count - 1) as f64)?;
            let one = Tensor::f_ones_like(old(BATCHES))?;
            let mut new = vec![(BATCHES, old(BATCHES).f_add(&one)?)];
            for (number, value) in [(MEAN, mean), (VARIANCE, variance)] {
                let running = old(number);
                let moved = running.f_to_kind(Kind::Double)?.f_lerp(&value, share)?;
                new.push((number, moved.f_to_kind(running.kind())?));
            }
            let places = new.into_iter().map(|(number, value)| ((layer, first + number), value));
            running_after.extend(places);
        }
        Ok(running_after)
    }

    /// Sets the running statistics of batch norms.
    pub(super) fn set_running(&self, running: &[(ParamIndex, Tensor)]) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        for ((layer, slot), value) in running {
            self.masters[*layer][*slot].shallow_clone().f_copy_(value)?;
        }
        Ok(())
    }

    fn make_state(&mut self, config: &StageConfig, place: ParamIndex) -> Result<(), LayerError> {
        let Some(optimizer) = &config.optimizer else { return Ok(()) };
        if self.updater.state.contains_key(&place) || !self.keeps_state(place) {
            return Ok(());
        }
        let value = &self.masters[place.0][place.1];
        let (kind, device) = (value.kind(), value.device());
        let specs = optimizer.state(&config.info(place, kind));
        let names = specs.iter().map(|spec| spec.name).collect();
        // Not f_full: tch panics when an operation that takes a number runs out of memory.
        let make = |spec: StateSpec| {
            let options = (spec.kind.unwrap_or(kind), device);
            Ok(Tensor::f_empty(&spec.shape, options)?.f_fill_(spec.fill)?)
        };
        let tensors = specs.into_iter().map(make).collect::<Result<_, LayerError>>()?;
        self.updater.state.insert(place, State { names, tensors, updates: 0 });
        Ok(())
    }

    /// Creates a parameter's average, which starts as the parameter's value. A tied weight has one
    /// average per stage, at its first use there.
    fn make_average(&mut self, config: &StageConfig, place: ParamIndex) -> Result<(), LayerError> {
        let spec = &config.named[place.0].parameters[place.1];
        let group = spec.tie.as_ref().and_then(|tie| config.ties.iter().find(|g| g.name == *tie));
        let first = group.is_none_or(|group| first_place(config, group) == Some(place));
        let wanted = config.average.is_some() && spec.trainable && first;
        if wanted && !self.updater.averages.contains_key(&place) {
            let average = self.masters[place.0][place.1].f_detach_copy()?;
            self.updater.averages.insert(place, average);
        }
        Ok(())
    }

    /// Applies the update, layer by layer. Where the optimizer state is sharded over replicas, each
    /// updates its parameters and receives the others.
    pub(super) fn update(
        &mut self,
        config: &StageConfig,
        step: StepUpdate<'_>,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let Some(optimizer) = &config.optimizer else { return Ok(()) };
        self.set_running(step.running)?;
        let replicas = step.replicas.filter(|_| self.sharding.is_some());
        let mut exchange = replicas.map(Exchange::new);
        for layer in 0..self.masters.len() {
            // Parameters that differ in their number of updates or in their settings are updated
            // separately.
            type Key = (u64, u64, u64);
            let mut together: BTreeMap<Key, (ParameterSettings, Vec<usize>)> = BTreeMap::new();
            let places = (0..self.masters[layer].len()).map(|slot| (layer, slot));
            let updated = places.filter(|&place| step.gradients.of(place).is_some());
            let updated: Vec<ParamIndex> = updated.collect();
            for slot in 0..self.masters[layer].len() {
                let state = self.updater.state.get_mut(&(layer, slot));
                if let (Some(state), true) = (state, step.gradients.of((layer, slot)).is_some()) {
                    state.updates += 1;
                    let settings = config.settings[layer][slot];
                    let decay = settings.weight_decay.unwrap_or(f64::NAN);
                    let key = (state.updates, settings.lr_scale.to_bits(), decay.to_bits());
                    together.entry(key).or_insert((settings, vec![])).1.push(slot);
                }
            }
            for ((updates, ..), (settings, slots)) in together {
                let lr = step.lr * settings.lr_scale;
                let decay = settings.weight_decay.unwrap_or_else(|| optimizer.weight_decay());
                let numbers = Numbers {
                    scale: step.scale,
                    lr,
                    weight_decay: decay,
                    updates,
                    step: step.number,
                };
                let grads =
                    slots.iter().filter_map(|&slot| step.gradients.place((layer, slot)).take());
                let grads = grads.collect();
                self.update_slots(config, optimizer.as_ref(), layer, &slots, grads, &numbers)?;
            }
            match &mut exchange {
                Some(exchange) => exchange.begin(self, &updated)?,
                None => self.refresh(layer)?,
            }
        }
        if let Some(exchange) = exchange {
            exchange.finish(self)?;
            (0..self.masters.len()).try_for_each(|layer| self.refresh(layer))?;
        }
        self.update_averages(config)
    }

    /// Updates the parameters of a layer in `slots`. All of them have had the same number of
    /// updates.
    fn update_slots(
        &mut self,
        config: &StageConfig,
        optimizer: &dyn Optimizer,
        layer: usize,
        slots: &[usize],
        mut grads: Vec<Tensor>,
        numbers: &Numbers,
    ) -> Result<(), LayerError> {
        if numbers.scale != 1.0 {
            for grad in &mut grads {
                let _ = grad.f_mul_scalar_(numbers.scale)?;
            }
        }
        let state = slots.iter().filter_map(|&slot| self.updater.state.get(&(layer, slot)));
        let state: Vec<&[Tensor]> = state.map(|state| state.tensors.as_slice()).collect();
        let parameters: Vec<&Tensor> =
            slots.iter().map(|&slot| &self.masters[layer][slot]).collect();
        let specs = |tensors: &[&Tensor]| -> Vec<TensorSpec> {
            tensors.iter().map(|tensor| TensorSpec::of(tensor)).collect()
        };
        let kept: Vec<&Tensor> = state.iter().copied().flatten().collect();
        let before = (specs(&parameters), specs(&kept));
        let names: Vec<&str> = slots.iter().map(|&slot| &*config.names[layer][slot]).collect();
        let whose = |reason: &str| {
            let (first, others) = (names.first().copied().unwrap_or_default(), names.len() - 1);
            let others = if others > 0 { format!(" and {others} more") } else { String::new() };
            format!("optimizer {}, for {first}{others}: {reason}", optimizer.name())
        };
        let updated = optimizer.apply(&Update {
            names: &names,
            parameters: &parameters,
            grads: &grads.iter().collect::<Vec<_>>(),
            state: &state,
            lr: numbers.lr,
            weight_decay: numbers.weight_decay,
            update: numbers.updates,
            step: numbers.step,
            seed: config.seed,
        });
        updated.map_err(|error| match error {
            LayerError::Value(reason) => LayerError::Value(whose(&reason)),
            torch @ LayerError::Torch(_) => LayerError::Value(whose(&torch.to_string())),
            other => other,
        })?;
        if before != (specs(&parameters), specs(&kept)) {
            return Err(LayerError::Shape(whose(
                "it changed the shape or dtype of a parameter or of its state: change only values",
            )));
        }
        Ok(())
    }

    /// Updates the averages: average <- d average + (1 - d) parameter, with d = min(decay, (1 + t)
    /// / (10 + t)) at update t. The small d at first quickly forgets the first steps (as in
    /// TensorFlow's ExponentialMovingAverage).
    fn update_averages(&mut self, config: &StageConfig) -> Result<(), LayerError> {
        let Some(decay) = config.average else { return Ok(()) };
        self.updater.averaged += 1;
        let t = self.updater.averaged as f64;
        let new_share = 1.0 - decay.min((1.0 + t) / (10.0 + t));
        for (&(layer, slot), average) in &mut self.updater.averages {
            let _ = average.f_lerp_(&self.masters[layer][slot], new_share)?;
        }
        Ok(())
    }

    /// Exchanges parameters and averages.
    pub(crate) fn swap_averages(&mut self) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        for (&(layer, slot), average) in &mut self.updater.averages {
            let mut master = self.masters[layer][slot].shallow_clone();
            let value = master.f_detach_copy()?;
            master.f_copy_(average)?;
            average.f_copy_(&value)?;
        }
        self.refresh_all()
    }

    /// CPU copies of the averages, with names. A parameter without an average returns its value.
    pub(crate) fn average_copies(
        &self,
        names: &[(String, ParamIndex)],
    ) -> Result<Vec<(String, Tensor)>, LayerError> {
        let value = |(layer, slot): &ParamIndex| {
            let own = &self.masters[*layer][*slot];
            copy_to_cpu(self.updater.averages.get(&(*layer, *slot)).unwrap_or(own))
        };
        names.iter().map(|(name, place)| Ok((name.clone(), value(place)?))).collect()
    }
}

/// Bytes for the numbers that tch turns into zero-dimensional tensors.
const SCALARS: u64 = 1024;

/// The numbers of one optimizer call.
struct Numbers {
    scale: f64,
    lr: f64,
    weight_decay: f64,
    updates: u64,
    step: u64,
}

/// Allocates and releases what the update's temporaries need at once. The cap may refuse it here,
/// and the peak counts it.
fn try_temporaries(config: &StageConfig, gradients: &Gradients) -> Result<(), LayerError> {
    let Some(optimizer) = config.optimizer.as_ref().filter(|rule| rule.temporaries() > 0) else {
        return Ok(());
    };
    let largest = gradients.present().map(tensor_bytes).max().unwrap_or(0);
    let bytes = optimizer.temporary_bytes(largest).saturating_add(SCALARS);
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    drop(Tensor::f_empty([bytes], (Kind::Uint8, config.device.tch()))?);
    Ok(())
}

/// The squared norms, summed within each layer in the order of its parameters. They are transferred
/// from the device in one copy.
fn squares(config: &StageConfig, norms: &[(LayerId, Tensor)]) -> Result<Vote, LayerError> {
    let mut vote = Vote::default();
    let values = match norms {
        [] => Vec::new(),
        _ => {
            let tensors: Vec<&Tensor> = norms.iter().map(|(_, norm)| norm).collect();
            let all = Tensor::f_stack(&tensors, 0)?.f_to_kind(Kind::Double)?;
            Vec::<f64>::try_from(&all.f_to(tch::Device::Cpu)?)?
        }
    };
    let layers = (0..config.named.len()).map(|at| LayerId::from_index(config.layers.start + at));
    vote.squares = layers.map(|id| (id, 0.0)).collect();
    // Plain addition from 0: neither the order nor the bits may depend on the cut.
    for ((layer, _), norm) in norms.iter().zip(&values) {
        vote.squares[layer.index() - config.layers.start].1 += norm * norm;
    }
    Ok(vote)
}
