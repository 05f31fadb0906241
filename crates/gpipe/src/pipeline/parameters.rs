//! A pipeline's parameters, gradients and averages, by their full names: read, overwritten,
//! exchanged.

use gpipe_core::{DeviceId, StageId};
use gpipe_runtime::StageExecutor;
use tch::Tensor;

use super::Pipeline;
use crate::{
    error::{Error, LayerError, Result},
    stage::{Stage, parameters::Parameters},
};

/// Where the moving averages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Averages {
    /// There are none.
    None,
    /// Beside the parameters.
    Kept,
    /// In the parameters' place, and those in theirs.
    InUse,
}

/// Copies of a stage's parameters by name and place.
type Copy = fn(
    &Parameters,
    &[(String, (usize, usize))],
) -> std::result::Result<Vec<(String, Tensor)>, LayerError>;

/// What a layer did that nothing can undo.
pub(super) const CHANGED_PARAMETERS: &str = "a forward changed parameters in place";

impl Pipeline {
    /// Copies of all parameters (in one of several processes: of its stages) with their full names
    /// (`layer.parameter`), in layer order; a tied weight once, under its first use.
    ///
    /// # Errors
    /// A device that does not answer.
    pub fn parameters(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.copies(Parameters::copies)
    }

    /// Copies of the moving averages of all parameters, as [`Pipeline::parameters`] gives those.
    ///
    /// # Errors
    /// The builder was not told to [`crate::PipelineBuilder::average`]; a device that does not
    /// answer.
    pub fn averages(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.needs_averages()?;
        match self.training.averages {
            Averages::InUse => self.copies(Parameters::copies),
            _ => self.copies(Parameters::average_copies),
        }
    }

    /// What `copy` makes of each stage's own parameters, in layer order.
    fn copies(&mut self, copy: Copy) -> Result<Vec<(String, Tensor)>> {
        self.needs_whole_state()?;
        let mut all = Vec::with_capacity(self.model.parameters.len());
        for stage in self.engine.here() {
            let owned =
                self.model.parameters.iter().map(|parameter| (&parameter.name, parameter.uses[0]));
            let own = owned.filter(|(_, (own, _))| own.index() == stage);
            let places: Vec<_> = own.map(|(name, (_, place))| (name.clone(), place)).collect();
            all.extend(self.visit(stage, move |stage| copy(stage.visit_parameters()?, &places))??);
        }
        Ok(all)
    }

    /// Calls `evaluate` with the averages in the parameters' place: every evaluation, prediction
    /// and copy of parameters in it is of the averages. Training in it is refused.
    ///
    /// # Errors
    /// As [`Pipeline::averages`], or those of `evaluate`.
    pub fn with_averages<T>(&mut self, evaluate: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.needs_averages()?;
        if self.training.averages == Averages::InUse {
            return evaluate(self);
        }
        self.exchange(Averages::InUse)?;
        let result = evaluate(self);
        let back = self.exchange(Averages::Kept);
        let result = result?;
        back.map(|()| result)
    }

    /// An error unless the parameters are in their own place: what is written would be lost, or be
    /// averaged.
    pub(super) fn needs_own_parameters(&self, what: &str) -> Result<()> {
        self.needs_whole_state()?;
        match self.training.averages {
            Averages::None | Averages::Kept => Ok(()),
            Averages::InUse => Err(Error::Setting(format!(
                "the averages are in the parameters' place: {what} outside of with_averages"
            ))),
        }
    }

    /// An error if something that writes parameters failed half-way.
    pub(super) fn needs_whole_state(&self) -> Result<()> {
        match self.training.torn {
            None => Ok(()),
            Some(what) if what == CHANGED_PARAMETERS => Err(Error::Setting(format!(
                "{what}: restore a checkpoint, or accept_torn_update to use what is there"
            ))),
            Some(what) => {
                Err(Error::Setting(format!("{what} failed half-way: build the pipeline again")))
            }
        }
    }

    /// Accepts parameters and optimizer state as they are, so that they can be read, saved and
    /// trained again. This is for a pipeline that refuses to go on: some stages applied an update
    /// and others did not ([`gpipe_runtime::StepError::Torn`]), or a forward changed its own
    /// parameters. The step's number stays as it was before. Returns whether there was anything to
    /// accept.
    ///
    /// A step is all or nothing until its update begins. An optimizer of your own that fails in its
    /// update, after other stages have applied theirs, leaves parameters of two steps.
    ///
    /// # Errors
    /// A stage's thread is gone, or stages are in other processes: restore a checkpoint there.
    pub fn accept_torn_update(&mut self) -> Result<bool> {
        let accepted = self.engine.pool.accept_torn_update()?;
        let changed = self.training.torn.take_if(|torn| *torn == CHANGED_PARAMETERS).is_some();
        Ok(accepted || changed)
    }

    fn needs_averages(&self) -> Result<()> {
        match self.training.averages {
            Averages::None => {
                Err(Error::Setting("there are no averages: give the builder average(decay)".into()))
            }
            Averages::Kept | Averages::InUse => Ok(()),
        }
    }

    /// Exchanges parameters and averages on every stage. Where that fails on one, it is known of
    /// none.
    fn exchange(&mut self, then: Averages) -> Result<()> {
        self.needs_whole_state()?;
        self.training.torn = Some("an exchange of parameters and averages");
        self.swap_averages()?;
        (self.training.torn, self.training.averages) = (None, then);
        Ok(())
    }

    fn swap_averages(&mut self) -> Result<()> {
        for stage in self.engine.here() {
            self.visit(stage, |stage| stage.visit_parameters()?.swap_averages())??;
        }
        Ok(())
    }

    /// Copies of the last step's gradients, before clipping, with full names, in layer order. Empty
    /// unless the builder was told to [`crate::PipelineBuilder::keep_gradients`].
    ///
    /// # Errors
    /// A device that does not answer.
    pub fn gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for stage in self.engine.here() {
            all.extend(self.visit(stage, |stage| stage.visit_parameters()?.last_grads())??);
        }
        Ok(all)
    }

    /// Overwrites parameters by their full names; those that are not given stay.
    ///
    /// # Errors
    /// A name that the model does not have, another shape or dtype: nothing is overwritten then. A
    /// device that does not answer: some may be.
    pub fn set_parameters(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.needs_own_parameters("set parameters")?;
        let kind = self.model.precision.master;
        for (name, value) in values {
            let Some(own) = self.model.parameters.iter().find(|own| own.name == *name) else {
                return Err(Error::Setting(format!("the model has no parameter '{name}'")));
            };
            let shape = &self.model.sequence.layers[own.layer].parameters[own.slot].shape;
            if *shape != value.size() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {shape:?}, the value for it {:?}",
                    value.size()
                )));
            }
            if kind != value.kind() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {kind:?}, the value for it {:?}: convert it first",
                    value.kind()
                )));
            }
        }
        let here = self.engine.here();
        for (name, value) in values {
            let owned = self.model.parameters.iter().find(|parameter| parameter.name == *name);
            let uses = owned.map(|owned| owned.uses.clone()).unwrap_or_default();
            for (stage, place) in
                uses.into_iter().filter(|(stage, _)| here.contains(&stage.index()))
            {
                let value = value.f_to(tch::Device::Cpu)?.f_detach_copy()?;
                let set = move |stage: &mut Stage| stage.visit_parameters()?.set(place, &value);
                self.visit(stage.index(), set)??;
            }
        }
        Ok(())
    }

    pub(super) fn visit<T: Send + 'static>(
        &mut self,
        stage: usize,
        visit: impl FnOnce(&mut Stage) -> T + Send + 'static,
    ) -> Result<T> {
        let id = StageId::from_index(stage);
        let device = self.engine.placement.get(stage).copied().unwrap_or_default();
        let answer = self.engine.pool.visit(DeviceId::from_index(device), move |stages| {
            stages.iter_mut().find(|own| own.stage() == id).map(visit)
        })?;
        answer.ok_or_else(|| Error::Setting(format!("device {device} has no stage {stage}")))
    }

    /// Calls a visitor on every stage of this process, all at once; the answers in stage order.
    pub(super) fn visit_all<T: Send + 'static, F>(
        &mut self,
        mut visitor: impl FnMut(usize) -> F,
    ) -> Result<Vec<T>>
    where
        F: FnOnce(&mut Stage) -> T + Send + 'static,
    {
        let placement = &self.engine.placement;
        let answers = self.engine.pool.visit_all(|device| {
            let own = placement.iter().enumerate().filter(|(_, own)| **own == device.index());
            let mut visits: Vec<_> =
                own.map(|(stage, _)| (StageId::from_index(stage), visitor(stage))).collect();
            move |stages: &mut [Stage]| {
                let visit = |stage: &mut Stage| {
                    let id = stage.stage();
                    let at = visits.iter().position(|(own, _)| *own == id)?;
                    Some((id, visits.swap_remove(at).1(stage)))
                };
                stages.iter_mut().filter_map(visit).collect::<Vec<_>>()
            }
        })?;
        let mut answers: Vec<(StageId, T)> = answers.into_iter().flatten().collect();
        if answers.len() != self.engine.here().len() {
            return Err(Error::Setting("a stage is not on its device".into()));
        }
        answers.sort_by_key(|(stage, _)| *stage);
        Ok(answers.into_iter().map(|(_, answer)| answer).collect())
    }
}
