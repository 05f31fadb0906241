//! Saves and restores everything that a pipeline keeps between two steps, for any K.

use std::collections::{HashMap, HashSet};

use gpipe_core::StageId;

use super::{Pipeline, model::OwnedParameter};
use crate::{
    error::{Error, Result},
    optim::ParameterInfo,
    spec::TensorSpec,
    state::{Counters, LayerOutline, LayerState, ParameterOutline, ParameterState, State},
};

/// How a pipeline runs its model. Restoring a state does not need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunSettings {
    /// Number of stages (K).
    pub stages: usize,
    /// Number of micro-batches (M).
    pub micro_batches: usize,
    /// The schedule's name.
    pub schedule: String,
    /// The re-materialization policy.
    pub remat: String,
    /// Layers per stage.
    pub balance: Vec<usize>,
    /// The dtype of the arithmetic.
    pub kind: tch::Kind,
}

impl Pipeline {
    /// Returns copies of everything that the next steps depend on: parameters, optimizer state,
    /// moving averages and counters.
    ///
    /// All stages copy at once, to the CPU. With several processes, each returns the state of its
    /// own stages. The copies need as much memory again, which no cap limits.
    ///
    /// With a [sharded](crate::PipelineBuilder::shard_optimizer) optimizer, every replica returns
    /// the whole state. The call waits until each replica calls this or [`Pipeline::share_state`].
    ///
    /// # Errors
    /// Gradients have accumulated that no update has applied: they are not part of a state. There
    /// is no memory for the copies, a device does not answer, another replica is gone, or the call
    /// is inside [`Pipeline::with_averages`].
    pub fn state(&mut self) -> Result<State> {
        self.needs_own_parameters("take its state")?;
        self.update.holds_no_gradients("take its state")?;
        self.meet_shards()?;
        let here = self.engine.here();
        let mut places = self.places_of_state();
        let copies = self.visit_all(|stage| {
            let places = std::mem::take(&mut places[stage]);
            move |stage| stage.copy_state(&places)
        })?;
        self.meet_shards()?;
        let mut stages = Vec::with_capacity(copies.len());
        let mut averaged = 0;
        for (stage, copies) in here.into_iter().zip(copies) {
            let (parameters, updates) = copies?;
            averaged = updates;
            stages.push(self.by_layer(stage, parameters));
        }
        let counters = Counters {
            step: self.training.step,
            seed: self.model.seed,
            learning_rate: self.training.lr_override,
            loss_scale: self.training.loss_scale.dynamic_scale(),
            good_steps: self.training.loss_scale.good,
            averaged,
        };
        Ok(State { counters, stages })
    }

    /// Sends this replica's part of a sharded optimizer state to replicas that call
    /// [`Pipeline::state`]. Copies nothing. Does nothing if the optimizer is not sharded.
    ///
    /// # Errors
    /// As for [`Pipeline::state`].
    pub fn share_state(&mut self) -> Result<()> {
        if !self.is_sharded() {
            return Ok(());
        }
        self.needs_own_parameters("share its state")?;
        self.update.holds_no_gradients("share its state")?;
        self.meet_shards()?;
        let mut places = self.places_of_state();
        let shared = self.visit_all(|stage| {
            let places = std::mem::take(&mut places[stage]);
            move |stage| stage.share_state(&places)
        })?;
        // Before an error is returned: the others must not wait for this replica.
        self.meet_shards()?;
        shared.into_iter().try_for_each(|own| own.map_err(Error::from))
    }

    fn is_sharded(&self) -> bool {
        self.engine.shards_optimizer && self.engine.replicas.is_some()
    }

    /// Waits for the other replicas, before and after the stages exchange state.
    ///
    /// Before: another replica may still be writing an earlier state. The wait here keeps the waits
    /// between stages short. After: no replica may exit before all have what they need.
    pub(super) fn meet_shards(&self) -> Result<()> {
        match self.engine.replicas.as_ref().filter(|_| self.engine.shards_optimizer) {
            Some(replicas) => replicas.gather(Vec::new()).map(|_| ()).map_err(Error::from),
            None => Ok(()),
        }
    }

    /// By stage, the names and places of the parameters whose state it gives.
    fn places_of_state(&self) -> Vec<Vec<(String, (usize, usize))>> {
        let places = |stage: usize| {
            let own = self.model.parameters.iter();
            let own = own.filter(|parameter| parameter.uses[0].0.index() == stage);
            own.map(|parameter| (self.parameter_name(parameter), parameter.uses[0].1)).collect()
        };
        (0..self.engine.topology.stages).map(places).collect()
    }

    /// Groups a stage's parameters, which are in the order of `owned`, by layer.
    fn by_layer(&self, stage: usize, parameters: Vec<ParameterState>) -> Vec<LayerState> {
        let own = self.model.parameters.iter().filter(|owned| owned.uses[0].0.index() == stage);
        let mut layers: Vec<LayerState> = Vec::new();
        for (owned, parameter) in own.zip(parameters) {
            let layer = &self.model.sequence.layers[owned.layer].name;
            match layers.last_mut().filter(|last| last.layer == *layer) {
                Some(last) => last.parameters.push(parameter),
                None => {
                    layers.push(LayerState { layer: layer.clone(), parameters: vec![parameter] });
                }
            }
        }
        layers
    }

    /// Restores a state, layer by layer, so that at most one layer is in memory twice.
    ///
    /// The next step is identical, to the bit, to the step that would have followed where the state
    /// was saved. If this pipeline has no optimizer or no averages, those of the state are ignored.
    /// So are those of parameters that are frozen in this pipeline: to keep them, restore first and
    /// [freeze](Pipeline::freeze) then. Optimizer state or averages that the state lacks start anew.
    ///
    /// # Errors
    /// If the seed differs; if a layer does not fit, occurs twice, or is missing; or if `layers`
    /// returns an error, which is passed on unchanged. If a layer was already restored, the
    /// pipeline is unusable afterwards and its calls return an error. To avoid that, compare with
    /// [`Pipeline::outline`] first.
    pub fn restore<E: From<Error>>(
        &mut self,
        counters: &Counters,
        layers: impl IntoIterator<Item = std::result::Result<LayerState, E>>,
    ) -> std::result::Result<(), E> {
        self.needs_own_parameters("restore a state")?;
        self.needs_no_update("restore a state")?;
        if counters.seed != self.model.seed {
            return Err(misfit(format!(
                "it was made with seed {}, the pipeline has {}: masks would differ",
                counters.seed, self.model.seed
            ))
            .into());
        }
        let outlines = self.outline().into_iter().enumerate();
        let outlines: HashMap<String, (usize, LayerOutline)> =
            outlines.map(|(at, outline)| (outline.layer.clone(), (at, outline))).collect();
        // Of an optimizer that keeps nothing, such as SGD without momentum.
        let keeps_nothing = self.training.optimizer.is_some()
            && outlines
                .values()
                .flat_map(|(_, own)| &own.parameters)
                .all(|own| own.optimizer.is_empty());
        let mut missing: HashSet<&String> = outlines
            .iter()
            .filter(|(_, own)| !own.1.parameters.is_empty())
            .map(|own| own.0)
            .collect();
        for (number, layer) in layers.into_iter().enumerate() {
            let layer = layer?;
            let outline = outlines.get(&layer.layer).filter(|_| missing.remove(&layer.layer));
            let Some((index, outline)) = outline else {
                let name = &layer.layer;
                return Err(
                    misfit(format!("the model has no layer '{name}', or it came twice")).into()
                );
            };
            outline.check(&layer).map_err(misfit)?;
            if keeps_nothing && let Some(name) = layer.with_optimizer_state() {
                let reason = format!(
                    "{}.{name}: the state has values of an optimizer, and this pipeline's keeps \
                    none: use the optimizer that it was made with",
                    layer.layer
                );
                return Err(misfit(reason).into());
            }
            if number == 0 {
                self.training.torn = Some("restoring a state");
                let averaged = counters.averaged;
                self.visit_all(|_| move |stage| stage.clear_state(averaged))?;
            }
            self.put_layer(*index, &layer)?;
        }
        if let Some(name) = missing.into_iter().min() {
            return Err(misfit(format!("it has no layer '{name}'")).into());
        }
        self.training.step = counters.step;
        self.training.lr_override = counters.learning_rate;
        self.training.loss_scale.restore(counters.loss_scale, counters.good_steps);
        self.training.torn = None;
        Ok(())
    }

    /// Puts the state of the layer with this index.
    fn put_layer(&mut self, index: usize, layer: &LayerState) -> Result<()> {
        let here = self.engine.here();
        for state in &layer.parameters {
            let mut owned = self.model.owned_by(index).iter();
            let owned = owned.find(|owned| self.parameter_name(owned) == state.name);
            let mut by_stage: Vec<(StageId, Vec<(usize, usize)>)> = Vec::new();
            for &(stage, place) in owned.map_or(&[][..], |owned| &owned.uses) {
                match by_stage.iter_mut().find(|(own, _)| *own == stage) {
                    Some((_, places)) => places.push(place),
                    None => by_stage.push((stage, vec![place])),
                }
            }
            for (stage, places) in
                by_stage.into_iter().filter(|(stage, _)| here.contains(&stage.index()))
            {
                // The storage is shared: each stage makes its own copies.
                let shared = state.shallow_clone();
                self.visit(stage.index(), move |stage| stage.put_state(&places, &shared))??;
            }
        }
        Ok(())
    }

    /// Describes the state of each layer, in order, including layers that own no parameters.
    pub fn outline(&self) -> Vec<LayerOutline> {
        let layer = |(index, layer): (usize, &crate::sequence::NamedLayer)| {
            let own = self.model.owned_by(index).iter();
            let parameter = |owned: &OwnedParameter| {
                let spec = &layer.parameters[owned.slot];
                let optimizer = self.training.optimizer.as_ref().filter(|_| spec.trainable);
                let kind = spec.stored(self.model.precision);
                let info = ParameterInfo { name: &owned.name, shape: &spec.shape, kind };
                let tensors = optimizer.map(|optimizer| optimizer.state(&info));
                let tensors = tensors.unwrap_or_default().into_iter();
                let tensors = tensors.map(|state| (state.name.to_owned(), state.spec(kind)));
                ParameterOutline {
                    name: spec.name.clone(),
                    shape: spec.shape.clone(),
                    kind,
                    optimizer: tensors.collect(),
                    averaged: spec.trainable
                        && self.training.averages != super::parameters::Averages::None,
                }
            };
            LayerOutline { layer: layer.name.clone(), parameters: own.map(parameter).collect() }
        };
        self.model.sequence.layers.iter().enumerate().map(layer).collect()
    }

    /// How the model is run.
    pub fn run_settings(&self) -> RunSettings {
        RunSettings {
            stages: self.engine.topology.stages,
            micro_batches: self.engine.micro_batches,
            schedule: self.engine.schedule.to_string(),
            remat: self.engine.remat.to_string(),
            balance: self.model.balance.clone(),
            kind: self.model.precision.compute,
        }
    }

    fn parameter_name(&self, owned: &OwnedParameter) -> String {
        self.model.sequence.layers[owned.layer].parameters[owned.slot].name.clone()
    }
}

fn misfit(reason: String) -> Error {
    Error::State(reason)
}

impl ParameterState {
    /// The same tensors, without copying data.
    fn shallow_clone(&self) -> Self {
        let optimizer = self.optimizer.as_ref().map(|state| crate::state::OptimizerState {
            updates: state.updates,
            tensors: state.tensors.iter().map(|(n, t)| (n.clone(), t.shallow_clone())).collect(),
        });
        Self {
            name: self.name.clone(),
            value: self.value.shallow_clone(),
            optimizer,
            average: self.average.as_ref().map(tch::Tensor::shallow_clone),
        }
    }
}

impl LayerState {
    /// A parameter with optimizer state, if there is one.
    fn with_optimizer_state(&self) -> Option<&str> {
        let keeps = |own: &&ParameterState| {
            own.optimizer.as_ref().is_some_and(|state| !state.tensors.is_empty())
        };
        self.parameters.iter().find(keeps).map(|own| own.name.as_str())
    }
}

impl LayerOutline {
    /// Checks that `layer` fits. The error is a message for the user.
    fn check(&self, layer: &LayerState) -> std::result::Result<(), String> {
        let name = &self.layer;
        let names = |names: Vec<&String>| names.into_iter().cloned().collect::<Vec<_>>().join(", ");
        let own = names(self.parameters.iter().map(|p| &p.name).collect());
        let given = names(layer.parameters.iter().map(|p| &p.name).collect());
        if own != given {
            return Err(format!("layer '{name}' has parameters [{own}], the state's [{given}]"));
        }
        for (own, given) in self.parameters.iter().zip(&layer.parameters) {
            let what = |part: &str| format!("{name}.{}{part}", own.name);
            let check = |part: &str, own: &TensorSpec, tensor: &tch::Tensor| {
                let given = TensorSpec::of(tensor);
                match given == *own {
                    true => Ok(()),
                    false => Err(format!("{} is {own}, the state's {given}", what(part))),
                }
            };
            let spec = TensorSpec::new(own.shape.clone(), own.kind);
            check("", &spec, &given.value)?;
            if let Some(average) = &given.average {
                check(" (average)", &spec, average)?;
            }
            let Some(kept) = given.optimizer.as_ref().filter(|_| !own.optimizer.is_empty()) else {
                continue;
            };
            let wanted: Vec<&String> = own.optimizer.iter().map(|(name, _)| name).collect();
            let found: Vec<&String> = kept.tensors.iter().map(|(name, _)| name).collect();
            if wanted != found {
                return Err(format!(
                    "{}: the optimizer keeps {wanted:?}, the state has {found:?}: use the \
                    optimizer that it was made with",
                    what("")
                ));
            }
            for ((tensor, spec), (_, given)) in own.optimizer.iter().zip(&kept.tensors) {
                check(&format!(" ({tensor})"), spec, given)?;
            }
        }
        Ok(())
    }
}
