//! Stochastic gradient descent with momentum, as PyTorch defines it.

use super::{Optimizer, Update, not_negative};
use crate::error::LayerError;

/// v <- momentum v + g + weight_decay w; w <- w - lr v (Sutskever et al. 2013, in PyTorch's form).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Share of the last velocity that is kept; 0 for plain SGD.
    pub momentum: f64,
    /// Added to the gradient, times the weight.
    pub weight_decay: f64,
}

impl Sgd {
    /// Plain SGD.
    pub fn new(lr: f64) -> Self {
        Self { lr, momentum: 0.0, weight_decay: 0.0 }
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum"] }
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<(), String> {
        not_negative(&[
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
        ])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let momenta = update.slots.first().map_or(&[][..], Vec::as_slice);
        Ok(gpipe_bridge::optim::sgd(
            update.parameters,
            update.grads,
            momenta,
            update.lr,
            self.momentum,
            self.weight_decay,
            update.update == 1,
        )?)
    }
}
