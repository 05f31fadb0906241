//! Stochastic gradient descent with momentum, as PyTorch defines it.

use gpipe_bridge::optim::SgdStep;

use super::{Optimizer, ParameterInfo, StateSpec, Update, not_negative};
use crate::error::LayerError;

/// SGD (Sutskever et al. 2013, in PyTorch's form): v <- momentum v + g + weight_decay w; w <- w -
/// lr v.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum factor; 0 for plain SGD.
    pub momentum: f64,
    /// Whether to use Nesterov's form: w <- w - lr (g + momentum v).
    pub nesterov: bool,
    /// L2 penalty: this factor times the weight is added to the gradient.
    pub weight_decay: f64,
}

impl Sgd {
    /// Plain SGD, without momentum or weight decay.
    pub fn new(lr: f64) -> Self {
        Self { lr, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        match self.momentum == 0.0 {
            true => vec![],
            false => vec![StateSpec::zeros("momentum", parameter.shape)],
        }
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
        if self.nesterov && self.momentum == 0.0 {
            return Err("nesterov needs a momentum above 0".into());
        }
        not_negative(&[
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
        ])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let momenta = if self.momentum == 0.0 { vec![] } else { update.column(0)? };
        let step = SgdStep {
            lr: update.lr,
            momentum: self.momentum,
            nesterov: self.nesterov,
            weight_decay: update.weight_decay,
            first: update.update == 1,
        };
        Ok(gpipe_bridge::optim::sgd(update.parameters, update.grads, &momenta, &step)?)
    }
}
