//! A pipeline's parameters, gradients and averages, by their full names: read, overwritten, exchanged.

use gpipe_core::DeviceId;
use tch::Tensor;

use super::Pipeline;
use crate::{
    error::{Error, Result},
    stage::Stage,
};

impl Pipeline {
    /// Copies of all parameters with their full names (`layer.parameter`), in layer order; a tied weight
    /// once, under its first use.
    ///
    /// # Errors
    /// A device that does not answer.
    pub fn parameters(&mut self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::with_capacity(self.names.len());
        for device in 0..self.topology.stages {
            let places = self.places_on(device);
            let copies =
                self.visit(device, move |stage| stage.visit_parameters()?.copies(&places))?;
            all.extend(copies?);
        }
        Ok(all)
    }

    /// Copies of the moving averages of all parameters, as [`Pipeline::parameters`] gives those.
    ///
    /// # Errors
    /// The builder was not told to [`crate::PipelineBuilder::average`]; a device that does not answer.
    pub fn averages(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.needs_averages()?;
        let mut all = Vec::with_capacity(self.names.len());
        for device in 0..self.topology.stages {
            let places = self.places_on(device);
            let copies =
                self.visit(device, move |stage| stage.visit_parameters()?.average_copies(&places))?;
            all.extend(copies?);
        }
        Ok(all)
    }

    /// Calls `evaluate` with the averages in the parameters' place: every evaluation, prediction and copy of
    /// parameters in it is of the averages. Training in it is refused.
    ///
    /// # Errors
    /// As [`Pipeline::averages`], or those of `evaluate`.
    pub fn with_averages<T>(&mut self, evaluate: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.needs_averages()?;
        if self.averages_in_use {
            return evaluate(self);
        }
        // Set first and taken back last: where an exchange fails, training stays refused.
        self.averages_in_use = true;
        self.swap_averages()?;
        let result = evaluate(self);
        let back = self.swap_averages();
        self.averages_in_use = back.is_err();
        let result = result?;
        back.map(|()| result)
    }

    fn needs_averages(&self) -> Result<()> {
        if self.averages {
            return Ok(());
        }
        Err(Error::Setting("there are no averages: give the builder average(decay)".into()))
    }

    fn swap_averages(&mut self) -> Result<()> {
        for device in 0..self.topology.stages {
            self.visit(device, |stage| stage.visit_parameters()?.swap_averages())??;
        }
        Ok(())
    }

    /// The parameters that the stage on `device` owns.
    fn places_on(&self, device: usize) -> Vec<(String, (usize, usize))> {
        let own = self.names.iter().filter(|(_, stage, _)| stage.index() == device);
        own.map(|(name, _, place)| (name.clone(), *place)).collect()
    }

    /// Copies of the last step's gradients, before clipping, with full names, in layer order. Empty unless the
    /// builder was told to [`crate::PipelineBuilder::keep_gradients`].
    ///
    /// # Errors
    /// A device that does not answer.
    pub fn gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for device in 0..self.topology.stages {
            all.extend(self.visit(device, |stage| stage.visit_parameters()?.last_grads())??);
        }
        Ok(all)
    }

    /// Overwrites parameters by their full names; those that are not given stay.
    ///
    /// # Errors
    /// A name that the model does not have, another shape or dtype: nothing is overwritten then. A device that
    /// does not answer: some may be.
    pub fn set_parameters(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        if self.averages_in_use {
            return Err(Error::Setting(
                "the averages are in the parameters' place: set parameters outside of with_averages".into(),
            ));
        }
        let own = self.parameters()?;
        for (name, value) in values {
            let Some((_, old)) = own.iter().find(|(own, _)| own == name) else {
                return Err(Error::Setting(format!("the model has no parameter '{name}'")));
            };
            if old.size() != value.size() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {:?}, the value for it {:?}",
                    old.size(),
                    value.size()
                )));
            }
            if old.kind() != value.kind() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {:?}, the value for it {:?}: convert it first",
                    old.kind(),
                    value.kind()
                )));
            }
        }
        for (name, value) in values {
            let places = self.tied_places.get(name).cloned().unwrap_or_else(|| {
                let own = self.names.iter().filter(|(own, ..)| own == name);
                own.map(|(_, stage, place)| (*stage, *place)).collect()
            });
            for (stage, place) in places {
                let value = value.f_to(tch::Device::Cpu)?.f_detach_copy()?;
                let set = move |stage: &mut Stage| stage.visit_parameters()?.set(place, &value);
                self.visit(stage.index(), set)??;
            }
        }
        Ok(())
    }

    fn visit<T: Send + 'static>(
        &mut self,
        device: usize,
        visit: impl FnOnce(&mut Stage) -> T + Send + 'static,
    ) -> Result<T> {
        let device = DeviceId::from_index(device);
        let answer = self.crew.visit(device, |stages| stages.first_mut().map(visit))?;
        answer.ok_or_else(|| Error::Setting(format!("device {device} has no stage")))
    }
}
