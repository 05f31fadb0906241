//! What training changes from step to step, besides the parameters.

use std::sync::Arc;

use super::parameters::Averages;
use crate::{
    optim::{LearningRate, Optimizer},
    precision::LossScale,
};

/// The training state that the driver keeps. Parameters and optimizer state are on the stages.
pub(super) struct Training {
    /// Steps applied so far.
    pub(super) step: u64,
    pub(super) optimizer: Option<Arc<dyn Optimizer>>,
    /// The schedule of the learning rate: a factor for each step.
    pub(super) rate: LearningRate,
    /// The rate set by [`set_learning_rate`](super::Pipeline::set_learning_rate).
    pub(super) lr_override: Option<f64>,
    pub(super) loss_scale: LossScale,
    pub(super) averages: Averages,
    /// Why parameters and state are unusable, if they are.
    pub(super) torn: Option<&'static str>,
}

impl Training {
    /// The learning rate before the step's factor.
    pub(super) fn base_lr(&self) -> f64 {
        self.lr_override.or(self.optimizer.as_ref().map(|optimizer| optimizer.lr())).unwrap_or(0.0)
    }

    /// The learning rate of the next step.
    pub(super) fn learning_rate(&self) -> f64 {
        self.base_lr() * self.rate.factor(self.step)
    }
}
