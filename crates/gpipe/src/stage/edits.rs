//! Reads and changes the gradients that an update in parts has accumulated, for the driver.

use tch::Tensor;

use super::{
    Stage,
    parameters::{ParamIndex, copy_to_cpu},
    step::Statistics,
};
use crate::{error::LayerError, guard::catching, spec::TensorSpec};

/// A parameter on one stage: its number in the model, its full name, and its place on the stage.
pub(crate) type Place = (usize, String, ParamIndex);

/// The gradients that `get` gives for `places`, multiplied by `unscale` in place. Places without a
/// gradient are left out.
fn unscaled(
    places: &[Place],
    unscale: f64,
    mut get: impl FnMut(ParamIndex) -> Result<Option<Tensor>, LayerError>,
) -> Result<Vec<(usize, String, Tensor)>, LayerError> {
    let _no_grad = tch::no_grad_guard();
    let mut all = Vec::new();
    for (number, name, place) in places {
        let Some(mut grad) = get(*place)? else { continue };
        if unscale != 1.0 {
            grad = grad.f_mul_scalar_(unscale)?;
        }
        all.push((*number, name.clone(), grad));
    }
    Ok(all)
}

impl Stage {
    /// Copies on the CPU of the gradients at these places, multiplied by `unscale`.
    pub(crate) fn copy_gradients(
        &mut self,
        places: &[Place],
        unscale: f64,
    ) -> Result<Vec<(usize, String, Tensor)>, LayerError> {
        self.device.charge_nobody()?;
        let Some(gradients) = self.pending.gradients() else { return Ok(Vec::new()) };
        unscaled(places, unscale, |place| gradients.of(place).map(copy_to_cpu).transpose())
    }

    /// Takes the gradients at these places out of the stage, multiplied by `unscale`, and drops all
    /// others. Applies the statistics of batch norms that have accumulated with them.
    pub(crate) fn take_gradients(
        &mut self,
        places: &[Place],
        unscale: f64,
    ) -> Result<Vec<(usize, String, Tensor)>, LayerError> {
        self.device.charge_nobody()?;
        let (gradients, statistics) = self.pending.take_accumulated();
        self.apply_statistics(statistics)?;
        let Some(mut gradients) = gradients else { return Ok(Vec::new()) };
        unscaled(places, unscale, |place| {
            let taken = gradients.place(place).take();
            Ok(taken.map(|grad| grad.f_to(tch::Device::Cpu)).transpose()?)
        })
    }

    /// Applies the statistics of batch norms of an open forward, so that its backward no longer
    /// does.
    pub(crate) fn apply_statistics_of(&mut self, forward: u64) -> Result<(), LayerError> {
        self.device.charge_stage()?;
        let statistics = self.pending.take_statistics_of(forward);
        self.apply_statistics(statistics)
    }

    fn apply_statistics(&mut self, statistics: Statistics) -> Result<(), LayerError> {
        let replicas = self.replicas.as_deref_mut();
        let running = self.parameters.running_statistics(&self.config, statistics, replicas)?;
        self.parameters.set_running(&running)
    }

    /// The squared norms of the gradients at these places, in float64.
    pub(crate) fn gradient_squares(
        &mut self,
        places: &[Place],
    ) -> Result<Vec<(usize, f64)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let Some(gradients) = self.pending.gradients() else { return Ok(Vec::new()) };
        let mut squares = Vec::new();
        for (number, _, place) in places {
            let Some(grad) = gradients.of(*place) else { continue };
            let norm = grad.f_norm()?.f_double_value(&[])?;
            squares.push((*number, norm * norm));
        }
        Ok(squares)
    }

    /// Replaces the gradients that exist at these places.
    pub(crate) fn change_gradients(
        &mut self,
        places: &[Place],
        change: &dyn Fn(&str, &Tensor) -> Result<Tensor, LayerError>,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_stage()?;
        let Some(gradients) = self.pending.gradients() else { return Ok(()) };
        for (_, name, place) in places {
            let Some(grad) = gradients.place(*place) else { continue };
            let new = catching(|| change(name, grad))?;
            if (new.size(), new.kind()) != (grad.size(), grad.kind()) {
                return Err(LayerError::Shape(format!(
                    "the gradient of '{name}' is {}, its replacement {}",
                    TensorSpec::of(grad),
                    TensorSpec::of(&new)
                )));
            }
            // A copy: the caller may keep what it returned.
            *grad = new.f_detach_copy()?.f_to(self.config.device.tch())?;
        }
        self.device.finish()
    }

    /// Sets the gradients at these places.
    pub(crate) fn set_gradients(
        &mut self,
        places: &[Place],
        value: &Tensor,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_stage()?;
        let Some(gradients) = self.pending.gradients() else { return Ok(()) };
        for (.., place) in places {
            let own = value.f_detach_copy()?.f_to(self.config.device.tch())?;
            *gradients.place(*place) = Some(own);
        }
        self.device.finish()
    }
}
