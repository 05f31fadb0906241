//! What a training changes from step to step, beside the parameters.

use std::sync::Arc;

use super::parameters::Averages;
use crate::{
    optim::{LearningRate, Optimizer},
    precision::LossScale,
};

/// The state of a training that the driver keeps. Parameters and optimizer state are on the stages.
pub(super) struct Training {
    /// Steps applied so far.
    pub(super) step: u64,
    pub(super) optimizer: Option<Arc<dyn Optimizer>>,
    /// The factor of the optimizer's learning rate at each step.
    pub(super) rate: LearningRate,
    /// What [`set_learning_rate`](super::Pipeline::set_learning_rate) set.
    pub(super) lr_override: Option<f64>,
    pub(super) loss_scale: LossScale,
    pub(super) averages: Averages,
    /// Why parameters and state are of no use any more.
    pub(super) torn: Option<&'static str>,
}

impl Training {
    /// The learning rate before the factor of the step.
    pub(super) fn base_lr(&self) -> f64 {
        self.lr_override.or(self.optimizer.as_ref().map(|optimizer| optimizer.lr())).unwrap_or(0.0)
    }

    /// The learning rate of the next step.
    pub(super) fn learning_rate(&self) -> f64 {
        self.base_lr() * self.rate.factor(self.step)
    }
}
