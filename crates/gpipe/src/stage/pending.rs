//! What the parts of an update leave for each other on a stage: open forwards, and the gradients
//! and statistics that have accumulated.
//!
//! Nothing is here between two updates, nor while whole steps run.

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{MicroBatch, lower::Part};

use tch::Tensor;

use super::{
    Stage,
    config::StageConfig,
    gradients::Gradients,
    guard::catching,
    held::SavedActivations,
    parameters::{ParamIndex, copy_to_cpu},
    step::{Statistics, StepState},
};
use crate::{error::LayerError, spec::TensorSpec};

/// What the parts of an update have left so far.
#[derive(Default)]
pub(crate) struct Pending {
    /// Forwards whose backward has not run, by number.
    open: BTreeMap<u64, OpenForward>,
    /// `None` before the first backward.
    gradients: Option<Gradients>,
    statistics: Statistics,
    /// How many micro-batches the statistics come from.
    counted: u32,
}

/// What a forward keeps for its backward.
#[derive(Default)]
struct OpenForward {
    held: HashMap<MicroBatch, SavedActivations>,
    statistics: Statistics,
}

impl Pending {
    /// Moves what a part of an update continues from into its state.
    pub(super) fn hand_to(&mut self, step: &mut StepState, config: &StageConfig) {
        let part = step.feed.part;
        if part == Part::Backward {
            let open = self.open.remove(&step.feed.forward).unwrap_or_default();
            (step.held, step.statistics) = (open.held, open.statistics);
        }
        if !matches!(part, Part::Inference | Part::Step | Part::Forward) {
            step.gradients = self.gradients.take().unwrap_or_else(|| Gradients::new(config));
            step.gradients.start_turns();
        }
        if matches!(part, Part::Update | Part::Finish) {
            step.statistics = std::mem::take(&mut self.statistics);
            self.counted = 0;
        }
    }

    /// Takes from a finished part what later parts need.
    pub(super) fn take_from(&mut self, step: &mut StepState) {
        match step.feed.part {
            Part::Inference | Part::Step => {}
            // The parameters have changed, so no backward of an open forward would be right.
            Part::Update | Part::Finish => self.open.clear(),
            Part::Forward => {
                let held = std::mem::take(&mut step.held);
                let statistics = std::mem::take(&mut step.statistics);
                self.open.insert(step.feed.forward, OpenForward { held, statistics });
            }
            Part::Backward | Part::Gradients | Part::Reduce => {
                let gradients = std::mem::take(&mut step.gradients);
                self.gradients = Some(gradients);
                let before = self.counted;
                for (place, seen) in std::mem::take(&mut step.statistics) {
                    let later = |(m, seen): (MicroBatch, _)| (MicroBatch(before + m.0), seen);
                    self.statistics.entry(place).or_default().extend(seen.into_iter().map(later));
                }
                self.counted += step.feed.slices.len() as u32;
            }
        }
    }

    /// Drops the forward with this number.
    pub(crate) fn close(&mut self, forward: u64) {
        self.open.remove(&forward);
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Changes of the accumulated gradients, for the driver.
impl Stage {
    /// Copies on the CPU of the gradients at these places, multiplied by `unscale`.
    pub(crate) fn copy_gradients(
        &mut self,
        places: &[(usize, String, ParamIndex)],
        unscale: f64,
    ) -> Result<Vec<(usize, String, Tensor)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_nobody()?;
        let mut copies = Vec::new();
        for (number, name, place) in places {
            let gradients = self.pending.gradients.as_ref();
            let Some(grad) = gradients.and_then(|gradients| gradients.of(*place)) else { continue };
            let copy = copy_to_cpu(grad)?;
            let copy = if unscale == 1.0 { copy } else { copy.f_mul_scalar(unscale)? };
            copies.push((*number, name.clone(), copy));
        }
        Ok(copies)
    }

    /// The squared norms of the gradients at these places, in float64.
    pub(crate) fn gradient_squares(
        &mut self,
        places: &[(usize, String, ParamIndex)],
    ) -> Result<Vec<(usize, f64)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let mut squares = Vec::new();
        for (number, _, place) in places {
            let gradients = self.pending.gradients.as_ref();
            let Some(grad) = gradients.and_then(|gradients| gradients.of(*place)) else { continue };
            let norm = grad.f_norm()?.f_double_value(&[])?;
            squares.push((*number, norm * norm));
        }
        Ok(squares)
    }

    /// Replaces the gradients that exist at these places.
    pub(crate) fn change_gradients(
        &mut self,
        places: &[(usize, String, ParamIndex)],
        change: &dyn Fn(&str, &Tensor) -> Result<Tensor, LayerError>,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_stage()?;
        let Some(gradients) = self.pending.gradients.as_mut() else { return Ok(()) };
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
        places: &[(usize, String, ParamIndex)],
        value: &Tensor,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        self.device.charge_stage()?;
        let Some(gradients) = self.pending.gradients.as_mut() else { return Ok(()) };
        for (.., place) in places {
            let own = value.f_detach_copy()?.f_to(self.config.device.tch())?;
            *gradients.place(*place) = Some(own);
        }
        self.device.finish()
    }
}
