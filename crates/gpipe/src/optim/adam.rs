//! Adam and AdamW.

use gpipe_bridge::optim::AdamStep;
use tch::Tensor;

use super::{Optimizer, Update, not_negative};
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
    /// The paper's numbers, no weight decay.
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }
}

impl Optimizer for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<(), String> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(format!("{name} is {beta}: it must be at least 0 and below 1"));
            }
        }
        not_negative(&[("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let step = Tensor::f_from_slice(&[update.update as f32])?.f_reshape([0_i64; 0])?;
        let steps = vec![&step; update.parameters.len()];
        let [exp_avgs, exp_avg_sqs] = update.slots else {
            return Err(LayerError::Value("Adam has two state tensors per parameter".into()));
        };
        let numbers = AdamStep {
            lr: update.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            decoupled: self.decoupled,
        };
        Ok(gpipe_bridge::optim::adam(
            update.parameters,
            update.grads,
            exp_avgs,
            exp_avg_sqs,
            &steps,
            &numbers,
        )?)
    }
}
