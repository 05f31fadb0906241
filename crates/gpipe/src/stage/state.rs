//! A stage's share of the pipeline's state: copying it out and restoring it.

use std::collections::HashMap;

use tch::Tensor;

use super::{
    Stage,
    config::StageConfig,
    parameters::{ParamIndex, Parameters, copy_to_cpu},
    update::State,
};
use crate::{
    error::LayerError,
    state::{OptimizerState, ParameterState},
};

impl Stage {
    /// Returns CPU copies of the state of the parameters at `places`, and the number of updates in
    /// the averages. The copies are not charged to the stage. Where the optimizer state is sharded,
    /// all replicas call this or [`Stage::share_state`] at the same time.
    pub(crate) fn copy_state(
        &mut self,
        places: &[(String, ParamIndex)],
    ) -> Result<(Vec<ParameterState>, u64), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_nobody()?;
        let of_others: Vec<ParamIndex> = places.iter().map(|(_, place)| *place).collect();
        let mut elsewhere = self.state_elsewhere(&of_others, true)?;
        let parameters = &self.parameters;
        let copy = |(at, (name, place)): (usize, &(String, ParamIndex))| {
            let copy = parameters.copy_one(name, *place)?;
            let optimizer = elsewhere.remove(&at).or(copy.optimizer);
            Ok(ParameterState { optimizer, ..copy })
        };
        let copies = places.iter().enumerate().map(copy).collect::<Result<_, LayerError>>()?;
        Ok((copies, parameters.updater.averaged))
    }

    /// Takes part in [`Stage::copy_state`] of other replicas, without copies of its own.
    pub(crate) fn share_state(
        &mut self,
        places: &[(String, ParamIndex)],
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_nobody()?;
        let places: Vec<ParamIndex> = places.iter().map(|(_, place)| *place).collect();
        self.state_elsewhere(&places, false).map(|_| ())
    }

    /// Drops optimizer state and averages before new ones are restored.
    pub(crate) fn clear_state(&mut self, averaged: u64) {
        self.parameters.updater.state.clear();
        self.parameters.updater.averages.clear();
        self.parameters.updater.averaged = self.config.average.map_or(0, |_| averaged);
        self.parameters.forget_last_grads();
    }

    /// Restores a parameter's state. `places` are all its uses on this stage, the first one first.
    /// The memory is charged to the stage.
    pub(crate) fn put_state(
        &mut self,
        places: &[ParamIndex],
        state: &ParameterState,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_stage()?;
        self.parameters.set_all(places, &state.value)?;
        if let Some(&first) = places.first() {
            self.parameters.put_updater_state(&self.config, first, state)?;
        }
        self.device.finish()
    }
}

impl Parameters {
    fn copy_one(&self, name: &str, place: ParamIndex) -> Result<ParameterState, LayerError> {
        let optimizer = match self.updater.state.get(&place) {
            None => None,
            Some(State { names, tensors, updates }) => {
                let copies = tensors.iter().map(copy_to_cpu).collect::<Result<Vec<_>, _>>()?;
                let names = names.iter().map(|&name| name.to_owned());
                Some(OptimizerState { updates: *updates, tensors: names.zip(copies).collect() })
            }
        };
        Ok(ParameterState {
            name: name.to_owned(),
            value: copy_to_cpu(&self.masters[place.0][place.1])?,
            optimizer,
            average: self.updater.averages.get(&place).map(copy_to_cpu).transpose()?,
        })
    }

    fn put_updater_state(
        &mut self,
        config: &StageConfig,
        place: ParamIndex,
        state: &ParameterState,
    ) -> Result<(), LayerError> {
        let spec = &config.named[place.0].parameters[place.1];
        if !spec.trainable {
            return Ok(()); // it was trained when saved and is frozen now
        }
        let own = |tensor: &Tensor| -> Result<Tensor, LayerError> {
            Ok(tensor.f_detach_copy()?.f_to(config.device.tch())?)
        };
        let kept = state.optimizer.as_ref().filter(|_| self.keeps_state(place));
        if let (Some(optimizer), Some(kept)) = (&config.optimizer, kept) {
            let given: HashMap<&str, &Tensor> =
                kept.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            let (mut names, mut tensors) = (Vec::new(), Vec::new());
            for wanted in
                optimizer.state(&config.info(place, self.masters[place.0][place.1].kind()))
            {
                // The driver has checked that no tensor is missing.
                let Some(tensor) = given.get(wanted.name) else { continue };
                names.push(wanted.name);
                tensors.push(own(tensor)?);
            }
            let updates = kept.updates;
            self.updater.state.insert(place, State { names, tensors, updates });
        }
        if let (Some(_), Some(average)) = (config.average, &state.average) {
            self.updater.averages.insert(place, own(average)?);
        }
        Ok(())
    }
}
