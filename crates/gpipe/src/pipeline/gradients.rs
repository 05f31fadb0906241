//! The gradients of an update that runs in parts: read, scaled, replaced and clipped by name, on
//! their stages, before [`Pipeline::update`] applies them.
//!
//! The first of these calls ends the accumulation: it sums the gradients of tied weights, and those
//! of all replicas ([`Part::Reduce`]). The stages then hold one final gradient for each parameter.

use std::sync::Arc;

use gpipe_core::{StageId, lower::Part};
use tch::Tensor;

use super::{Outputs, Pipeline, mini_batch::MiniBatch, run::Task};
use crate::{
    error::{Error, LayerError, Result},
    optim::name_matches,
    spec::TensorSpec,
    stage::{Stage, edits::Place, feed::Mode},
};

/// A change of a gradient, given its parameter's full name.
type Change = dyn Fn(&str, &Tensor) -> std::result::Result<Tensor, LayerError> + Send + Sync;

impl Pipeline {
    /// Copies of the gradients that have accumulated, on the CPU, with full names, in layer order:
    /// as [`Pipeline::update`] will apply them, before clipping. A parameter without a gradient is
    /// left out. With several processes, each returns those of its own stages.
    ///
    /// # Errors
    /// [`Error::Setting`] if no gradient has accumulated. An error of the sum over tied weights or
    /// replicas discards the update. An error of a copy does not.
    pub fn accumulated_gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.reduce()?;
        let unscale = 1.0 / self.gradient_scale();
        let mut all = Vec::new();
        for (stage, places) in self.gradient_places(|_| true, true) {
            all.extend(self.visit(stage, move |stage| stage.copy_gradients(&places, unscale))??);
        }
        all.sort_by_key(|(number, ..)| *number);
        Ok(all.into_iter().map(|(_, name, grad)| (name, grad)).collect())
    }

    /// Takes the gradients that have accumulated out of the pipeline, in the form of
    /// [`Pipeline::accumulated_gradients`], for an update that the caller makes. Forwards that are
    /// open stay open: the caller updates the parameters after their backwards.
    ///
    /// Applies the running statistics of batch norms. The step number stays, and the samples of
    /// later forwards continue the numbers by which dropout is keyed.
    ///
    /// # Errors
    /// [`Error::Setting`] if no gradient has accumulated. An error of a stage discards the update.
    /// In float16, [`Error::NotFinite`] if a gradient overflows. The update is discarded then, and
    /// the loss scale halved.
    pub fn take_gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.reduce()?;
        let unscale = 1.0 / self.gradient_scale(); // before the loss scale changes
        self.count_overflow()?;
        let mut all = Vec::new();
        for (stage, places) in self.gradient_places(|_| true, true) {
            let taken = self.visit(stage, move |stage| stage.take_gradients(&places, unscale))?;
            all.extend(taken.or_else(|error| self.lose_update(error.into()))?);
        }
        self.update.taken();
        all.sort_by_key(|(number, ..)| *number);
        Ok(all.into_iter().map(|(_, name, grad)| (name, grad)).collect())
    }

    /// Counts a good step of the loss scale, or one that overflows.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if a gradient is not finite. Only in float16, where a loss scale may be
    /// the reason.
    fn count_overflow(&mut self) -> Result<()> {
        if self.training.loss_scale.dynamic_scale().is_none() {
            return Ok(());
        }
        let squares = match self.gradient_squares(|_| true) {
            Ok(squares) => squares,
            Err(error) => return self.lose_update(error),
        };
        if squares.iter().all(|(_, square)| square.is_finite()) {
            self.training.loss_scale.step_was_good();
            return Ok(());
        }
        let what = if self.training.loss_scale.step_overflowed() {
            let scale = self.training.loss_scale.scale;
            format!("a gradient in float16 (the loss scale is now {scale}: try it again)")
        } else {
            "a gradient in float16, at every loss scale,".to_owned()
        };
        self.lose_update(Error::NotFinite { what })
    }

    /// Applies the running statistics of batch norms of a forward now, as PyTorch does, instead of
    /// with the update.
    ///
    /// # Errors
    /// If the forward is not open any more, or an error of a stage.
    pub fn apply_statistics(&mut self, outputs: &Outputs) -> Result<()> {
        self.needs_open(outputs)?;
        let number = outputs.number;
        let applied = self
            .visit_all(|_| move |stage: &mut Stage| stage.apply_statistics_of(number))?
            .into_iter()
            .collect::<std::result::Result<(), _>>();
        Ok(applied?)
    }

    /// Multiplies the gradients whose full names match `pattern` (`*` stands for any text).
    ///
    /// # Errors
    /// [`Error::Setting`] if no gradient has accumulated, if `factor` is not finite, or if no
    /// parameter matches. An error of a stage discards the update.
    pub fn scale_gradients(&mut self, pattern: &str, factor: f64) -> Result<()> {
        if !factor.is_finite() {
            return Err(Error::Setting(format!(
                "the factor of the gradients '{pattern}' is {factor}: give a finite number"
            )));
        }
        self.change_gradients(pattern, Arc::new(move |_, grad| Ok(grad.f_mul_scalar(factor)?)))
    }

    /// Replaces each gradient whose full name matches `pattern` by `change(name, gradient)`, which
    /// has the gradient's shape. `change` runs on the threads of the stages, once for each
    /// gradient. For a tied weight it runs once on every stage that uses the weight, and must
    /// return the same result each time.
    ///
    /// # Errors
    /// As for [`Pipeline::scale_gradients`]. An error of `change` discards the update.
    pub fn map_gradients(
        &mut self,
        pattern: &str,
        change: impl Fn(&str, &Tensor) -> std::result::Result<Tensor, LayerError>
        + Send
        + Sync
        + 'static,
    ) -> Result<()> {
        let (scale, unscale) = (self.gradient_scale(), 1.0 / self.gradient_scale());
        self.change_gradients(
            pattern,
            Arc::new(move |name, grad| {
                let own =
                    if scale == 1.0 { grad.shallow_clone() } else { grad.f_mul_scalar(unscale)? };
                let new = change(name, &own)?;
                Ok(if scale == 1.0 { new } else { new.f_mul_scalar(scale)? })
            }),
        )
    }

    /// Replaces the gradients with these full names. Parameters without a gradient get one.
    ///
    /// # Errors
    /// [`Error::Setting`] before anything changes: no gradient has accumulated, a name is unknown,
    /// its parameter is frozen, or a shape or dtype differs. An error of a stage discards the
    /// update.
    pub fn set_gradients(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        for (name, value) in values {
            let refuse = |reason: String| Err(Error::Setting(reason));
            let Some(own) = self.model.parameter(name) else {
                return refuse(format!("the model has no parameter '{name}'"));
            };
            let spec = &self.model.sequence.layers[own.layer].parameters[own.slot];
            if !spec.trainable {
                return refuse(format!("parameter '{name}' is frozen: it has no gradient"));
            }
            let own = TensorSpec::new(spec.shape.clone(), self.model.precision.master);
            if own != TensorSpec::of(value) {
                let given = TensorSpec::of(value);
                return refuse(format!("parameter '{name}' is {own}, the gradient for it {given}"));
            }
        }
        self.reduce()?;
        let scale = self.gradient_scale();
        for (name, value) in values {
            let value = value.f_detach()?.f_to(tch::Device::Cpu)?.f_mul_scalar(scale)?;
            for (stage, places) in self.gradient_places(|own| own == name, false) {
                let value = value.shallow_clone();
                let set = move |stage: &mut Stage| stage.set_gradients(&places, &value);
                self.visit(stage, set)?.or_else(|error| self.lose_update(error.into()))?;
            }
        }
        Ok(())
    }

    /// Scales the gradients whose full names match `pattern` down together, if their norm exceeds
    /// `max_norm`. Returns the norm before. The norm is summed in layer order, so it does not
    /// depend on the cut.
    ///
    /// # Errors
    /// As for [`Pipeline::scale_gradients`]; [`Error::NotFinite`] if the norm is not finite: the
    /// gradients are unchanged then.
    pub fn clip_gradients(&mut self, pattern: &str, max_norm: f64) -> Result<f64> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(Error::Setting(format!(
                "the largest norm of the gradients '{pattern}' is {max_norm}: give a number above 0"
            )));
        }
        self.check_pattern(pattern)?;
        self.reduce()?;
        let mut squares = self.gradient_squares(|name| name_matches(pattern, name))?;
        squares.sort_by_key(|(number, _)| *number);
        let sum: f64 = squares.iter().map(|(_, square)| square).sum();
        let norm = sum.sqrt() / self.gradient_scale();
        if !norm.is_finite() {
            return Err(Error::NotFinite { what: format!("the norm of '{pattern}' ({norm})") });
        }
        if norm > max_norm {
            // The same formula as torch.nn.utils.clip_grad_norm_.
            self.scale_gradients(pattern, max_norm / (norm + 1e-6))?;
        }
        Ok(norm)
    }

    /// The squared norms of the gradients of all processes whose names pass `test`, each with the
    /// number of its parameter.
    fn gradient_squares(&mut self, test: impl Fn(&str) -> bool) -> Result<Vec<(usize, f64)>> {
        let mut squares: Vec<(usize, f64)> = Vec::new();
        for (stage, places) in self.gradient_places(test, true) {
            squares.extend(self.visit(stage, move |stage| stage.gradient_squares(&places))??);
        }
        match &self.engine.peers {
            Some(peers) => peers.gather_squares(&squares),
            None => Ok(squares),
        }
    }

    fn change_gradients(&mut self, pattern: &str, change: Arc<Change>) -> Result<()> {
        self.check_pattern(pattern)?;
        self.reduce()?;
        for (stage, places) in self.gradient_places(|name| name_matches(pattern, name), false) {
            let change = Arc::clone(&change);
            let visit = move |stage: &mut Stage| stage.change_gradients(&places, change.as_ref());
            self.visit(stage, visit)?.or_else(|error| self.lose_update(error.into()))?;
        }
        Ok(())
    }

    fn check_pattern(&self, pattern: &str) -> Result<()> {
        match self.model.parameters.iter().any(|own| name_matches(pattern, &own.name)) {
            true => Ok(()),
            false => Err(Error::Setting(format!(
                "no parameter's name matches '{pattern}': names are layer.parameter, * stands for \
                any text"
            ))),
        }
    }

    /// Sums the gradients of tied weights and of replicas, once per update.
    fn reduce(&mut self) -> Result<()> {
        self.needs_own_parameters("read or change gradients")?;
        if !self.update.has_gradients() {
            return Err(Error::Setting(
                "there is no gradient: call backward or accumulate first".into(),
            ));
        }
        if self.update.reduced {
            return Ok(());
        }
        let batch = MiniBatch::default();
        let ran = self.run(Task::new(Mode::Train, Part::Reduce, &batch));
        ran.or_else(|error| self.lose_update(error))?;
        self.update.reduced = true;
        Ok(())
    }

    /// The factor that the stages' gradients have.
    fn gradient_scale(&self) -> f64 {
        self.training.loss_scale.scale * self.update.divisor()
    }

    /// The places of the gradients of parameters whose name passes `test`, by stage of this
    /// process. `owned`: only on the stage that owns a tied weight. Otherwise also the copies of
    /// its gradient on the stages that use it.
    fn gradient_places(
        &self,
        test: impl Fn(&str) -> bool,
        owned: bool,
    ) -> Vec<(usize, Vec<Place>)> {
        let places = |stage: usize| {
            let id = StageId::from_index(stage);
            let parameters = self.model.parameters.iter().enumerate();
            let own = parameters.filter(|(_, parameter)| test(&parameter.name));
            own.filter_map(|(number, parameter)| {
                let uses = if owned { &parameter.uses[..1] } else { &parameter.uses[..] };
                let (_, place) = uses.iter().find(|(stage, _)| *stage == id)?;
                Some((number, parameter.name.clone(), *place))
            })
            .collect()
        };
        self.engine.here().into_iter().map(|stage| (stage, places(stage))).collect()
    }
}
