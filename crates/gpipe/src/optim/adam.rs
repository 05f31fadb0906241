//! Adam and AdamW.

use gpipe_bridge::optim::AdamStep;
use tch::{Kind, Tensor};

use super::{Optimizer, ParameterInfo, StateSpec, Update, fraction, not_negative};
use crate::error::LayerError;

/// Adam (Kingma & Ba 2015, algorithm 1), or AdamW where `decoupled` (Loshchilov & Hutter 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether weight decay acts on the weight directly (AdamW) or through the gradient.
    pub decoupled: bool,
}

impl Default for Adam {
    /// The values of Kingma & Ba, without weight decay.
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }
}

impl Optimizer for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        ["exp_avg", "exp_avg_sq"].map(|name| StateSpec::zeros(name, parameter.shape)).into()
    }

    fn temporaries(&self) -> usize {
        0 // ATen's fused kernel works in place
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn check(&self) -> Result<(), String> {
        fraction(&[("beta1", self.beta1), ("beta2", self.beta2)])?;
        not_negative(&[("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let Some(device) = update.parameters.first().map(|parameter| parameter.device()) else {
            return Ok(());
        };
        let mut step = Tensor::f_empty([0_i64; 0], (Kind::Float, device))?;
        let step = step.f_fill_(f64::from(update.update as f32))?;
        let steps = vec![&step; update.parameters.len()];
        let numbers = AdamStep {
            lr: update.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: update.weight_decay,
            decoupled: self.decoupled,
        };
        Ok(gpipe_bridge::optim::adam(
            update.parameters,
            update.grads,
            &update.column(0)?,
            &update.column(1)?,
            &steps,
            &numbers,
        )?)
    }
}
