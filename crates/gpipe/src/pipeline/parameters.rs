//! Access to a pipeline's parameters, gradients and averages by their full names.

use std::collections::HashSet;

use gpipe_core::{DeviceId, StageId};
use gpipe_runtime::StageExecutor;
use tch::Tensor;

use super::{Pipeline, model::OwnedParameter};
use crate::{
    TensorSpec,
    error::{Error, LayerError, Result},
    optim::name_matches,
    stage::{Stage, parameters::Parameters},
};

/// Where the moving averages are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Averages {
    /// Averages are not kept.
    None,
    /// Averages are stored beside the parameters.
    Kept,
    /// Averages are in the parameters' place, and the parameters in theirs.
    InUse,
}

/// Copies a stage's parameters, given by name and place.
type Copy = fn(
    &Parameters,
    &[(String, (usize, usize))],
) -> std::result::Result<Vec<(String, Tensor)>, LayerError>;

/// The reason for a torn pipeline whose layers changed their parameters.
pub(super) const CHANGED_PARAMETERS: &str = "a forward changed parameters in place";

impl Pipeline {
    /// Returns copies of all parameters with their full names (`layer.parameter`), in layer order.
    ///
    /// A tied weight appears once, under its first use. With several processes, each returns the
    /// parameters of its own stages.
    ///
    /// # Errors
    /// If a device does not answer.
    pub fn parameters(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.parameters_matching("*")
    }

    /// The full names of the parameters that a stage of this process uses, a tied weight included.
    pub fn parameters_here(&self) -> HashSet<String> {
        let here = self.engine.here();
        let is_here =
            |own: &&OwnedParameter| own.uses.iter().any(|(stage, _)| here.contains(&stage.index()));
        let own = self.model.parameters.iter().filter(is_here);
        own.map(|parameter| parameter.name.clone()).collect()
    }

    /// Returns copies of the parameters whose full names match `pattern` (`*` stands for any text),
    /// in the same form as [`Pipeline::parameters`]. None may match.
    ///
    /// # Errors
    /// If a device does not answer.
    pub fn parameters_matching(&mut self, pattern: &str) -> Result<Vec<(String, Tensor)>> {
        self.copies(pattern, Parameters::copies)
    }

    /// Returns copies of the moving averages, in the same form as [`Pipeline::parameters`].
    ///
    /// # Errors
    /// If [`crate::PipelineBuilder::average`] was not set, or if a device does not answer.
    pub fn averages(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.needs_averages()?;
        match self.training.averages {
            Averages::InUse => self.copies("*", Parameters::copies),
            _ => self.copies("*", Parameters::average_copies),
        }
    }

    /// Applies `copy` to the matching parameters of each stage. The result is in layer order.
    fn copies(&mut self, pattern: &str, copy: Copy) -> Result<Vec<(String, Tensor)>> {
        self.needs_whole_state()?;
        let mut all = Vec::with_capacity(self.model.parameters.len());
        for stage in self.engine.here() {
            let owned =
                self.model.parameters.iter().map(|parameter| (&parameter.name, parameter.uses[0]));
            let own = owned
                .filter(|(name, (own, _))| own.index() == stage && name_matches(pattern, name));
            let places: Vec<_> = own.map(|(name, (_, place))| (name.clone(), place)).collect();
            all.extend(self.visit(stage, move |stage| copy(stage.visit_parameters()?, &places))??);
        }
        Ok(all)
    }

    /// Calls `evaluate` with the averages in the parameters' place. Evaluations, predictions and
    /// copies of parameters inside it use the averages. Training inside it is an error.
    ///
    /// # Errors
    /// As for [`Pipeline::averages`], or an error of `evaluate`.
    pub fn with_averages<T>(&mut self, evaluate: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.needs_averages()?;
        if self.training.averages == Averages::InUse {
            return evaluate(self);
        }
        self.needs_no_update("use the averages")?;
        self.exchange(Averages::InUse)?;
        let result = evaluate(self);
        let back = self.exchange(Averages::Kept);
        let result = result?;
        back.map(|()| result)
    }

    /// Returns an error if averages are in the parameters' place: a write would be lost or
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

    /// Returns an error if something that writes parameters failed half-way.
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
    /// trained again. Returns whether there was anything to accept.
    ///
    /// Use it for a pipeline that refuses to continue, for one of two reasons. Some stages applied
    /// an update and others did not ([`gpipe_runtime::StepError::Torn`]), or a forward changed its
    /// own parameters in place. The step number does not change.
    ///
    /// A step is all or nothing until its update begins. If a custom optimizer fails in its update
    /// after other stages have applied theirs, the parameters are a mix of two steps.
    ///
    /// # Errors
    /// If a stage's thread is gone, or if stages are in other processes: restore a checkpoint
    /// instead.
    pub fn accept_torn_update(&mut self) -> Result<bool> {
        let accepted = self.engine.pool.accept_torn_update()?;
        // While it was torn, no stage could free what its open forwards keep.
        if accepted {
            self.visit_all(|_| |stage: &mut Stage| stage.pending().clear())?;
        }
        let changed = self.training.torn.take_if(|torn| *torn == CHANGED_PARAMETERS).is_some();
        Ok(accepted || changed)
    }

    fn needs_averages(&self) -> Result<()> {
        match self.training.averages {
            Averages::None => Err(Error::Setting(
                "there are no averages: build the pipeline with `average`".into(),
            )),
            Averages::Kept | Averages::InUse => Ok(()),
        }
    }

    /// Exchanges parameters and averages on every stage. If one stage fails, the state of all
    /// stages is unknown, so the pipeline stays torn.
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

    /// Returns copies of the last step's gradients, before clipping, with full names, in layer
    /// order. Empty unless [`crate::PipelineBuilder::keep_gradients`] was set.
    ///
    /// # Errors
    /// If a device does not answer.
    pub fn gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for stage in self.engine.here() {
            all.extend(self.visit(stage, |stage| stage.visit_parameters()?.last_grads())??);
        }
        Ok(all)
    }

    /// Overwrites the given parameters by their full names. Other parameters keep their values.
    ///
    /// # Errors
    /// If the model has no parameter of a name, or if a shape or dtype differs: nothing is
    /// overwritten then. If a device does not answer, some parameters may be overwritten.
    pub fn set_parameters(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.needs_own_parameters("set parameters")?;
        self.needs_no_update("set parameters")?;
        self.check_values(values)?;
        let here = self.engine.here();
        for (name, value) in values {
            let uses = self.uses_of(name, &here);
            for of_stage in uses.chunk_by(|(a, _), (b, _)| a == b) {
                let Some(&(stage, _)) = of_stage.first() else { continue };
                let places: Vec<_> = of_stage.iter().map(|(_, place)| *place).collect();
                let value = value.f_to(tch::Device::Cpu)?.f_detach_copy()?;
                let set = move |stage: &mut Stage| stage.set_parameter(&places, &value);
                self.visit(stage, set)??;
            }
        }
        Ok(())
    }

    /// Makes the given tensors the storage of the parameters with these full names: every update is
    /// written into them, and every later step computes with what is in them. So the caller may
    /// read and change them between steps.
    ///
    /// For stages on a CPU, that compute in the parameters' dtype, nothing is copied then. For
    /// stages on a GPU the values are copied, once. In a reduced dtype, copies for the layers are
    /// made after each update, and by [`Pipeline::refresh_parameters`].
    ///
    /// Memory of the caller's tensors is not counted as a stage's.
    ///
    /// # Errors
    /// As for [`Pipeline::set_parameters`]. If a tensor is not on the CPU or not contiguous.
    pub fn share_parameters(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.needs_own_parameters("share parameters")?;
        self.needs_no_update("share parameters")?;
        self.check_values(values)?;
        for (name, value) in values {
            if value.device() != tch::Device::Cpu || !value.is_contiguous() {
                return Err(Error::Setting(format!(
                    "the tensor for parameter '{name}' is not on the CPU, or not contiguous: it \
                    cannot be shared; use set_parameters"
                )));
            }
        }
        let here = self.engine.here();
        for (name, value) in values {
            let uses = self.uses_of(name, &here);
            let Some(&(owner, _)) = uses.first() else { continue };
            let mut of_stage = (owner, value.shallow_clone());
            for (number, &(stage, place)) in uses.iter().enumerate() {
                // Each stage updates its own copy of a tied weight, so only one has the caller's.
                let is_first = number == 0 || of_stage.0 != stage;
                if of_stage.0 != stage {
                    // `detach_copy` alone would be a part of the graph.
                    of_stage = (stage, value.f_detach()?.f_detach_copy()?);
                }
                let value = of_stage.1.shallow_clone();
                let share =
                    move |own: &mut Stage| own.visit_parameters()?.share(place, &value, is_first);
                self.visit(stage, share)??;
            }
            if uses.iter().any(|&(stage, _)| stage != owner) {
                self.shared_ties.retain(|(own, _)| own != name);
                self.shared_ties.push((name.clone(), value.shallow_clone()));
            }
        }
        Ok(())
    }

    /// Brings copies of shared tensors up to date: of tied weights on further stages, and where
    /// layers compute in a reduced dtype. Needed after the caller has changed tensors that the
    /// pipeline shares.
    ///
    /// # Errors
    /// If a device does not answer.
    pub fn refresh_parameters(&mut self) -> Result<()> {
        self.needs_own_parameters("refresh parameters")?;
        let shared: Vec<(String, Tensor)> =
            self.shared_ties.iter().map(|(name, value)| (name.clone(), value.detach())).collect();
        self.set_parameters(&shared)?;
        let refresh = |_| |stage: &mut Stage| stage.visit_parameters()?.refresh_all();
        Ok(self.visit_all(refresh)?.into_iter().collect::<std::result::Result<(), _>>()?)
    }

    /// The stages of this process that use a parameter, and its place on them, in layer order.
    fn uses_of(&self, name: &str, here: &[usize]) -> Vec<(usize, (usize, usize))> {
        let owned = self.model.parameter(name);
        let uses = owned.into_iter().flat_map(|owned| &owned.uses);
        let uses = uses.map(|(stage, place)| (stage.index(), *place));
        uses.filter(|(stage, _)| here.contains(stage)).collect()
    }

    /// Checks that values fit the parameters with these names.
    fn check_values(&self, values: &[(String, Tensor)]) -> Result<()> {
        for (name, value) in values {
            let Some(own) = self.model.parameter(name) else {
                return Err(Error::Setting(format!("the model has no parameter '{name}'")));
            };
            let spec = &self.model.sequence.layers[own.layer].parameters[own.slot];
            let (shape, kind) = (&spec.shape, spec.stored(self.model.precision));
            if *shape != value.size() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {shape:?}, the value for it {:?}",
                    value.size()
                )));
            }
            if kind != value.kind() {
                return Err(Error::Setting(format!(
                    "parameter '{name}' is {}, the value for it {}: convert it first",
                    TensorSpec::new(shape.as_slice(), kind),
                    TensorSpec::of(value)
                )));
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

    /// Calls a visitor on every stage of this process in parallel. Returns the answers in stage
    /// order.
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
