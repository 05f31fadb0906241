//! RMSProp (Tieleman & Hinton 2012) with momentum, in TensorFlow's form and in PyTorch's.

use super::{Optimizer, ParameterInfo, StateSpec, Update, fraction, not_negative};
use crate::error::LayerError;

/// The two definitions of RMSProp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RmsForm {
    /// TensorFlow's definition: v <- momentum v + lr g / sqrt(s + eps); w <- w - v.
    ///
    /// The mean square s starts at 1, and the learning rate is inside the momentum. AmoebaNet was
    /// trained with this form (Real et al. 2019: decay 0.9, momentum 0.9, eps 1).
    #[default]
    TensorFlow,
    /// PyTorch's definition: v <- momentum v + g / (sqrt(s) + eps); w <- w - lr v. s starts at 0.
    PyTorch,
}

/// RMSProp: s <- decay s + (1 - decay) g^2, then an update as [`RmsForm`] defines it. Weight decay
/// is added to g.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean square.
    pub decay: f64,
    /// Momentum factor; 0 for none.
    pub momentum: f64,
    /// Added under the root (TensorFlow's form) or after it (PyTorch's).
    pub eps: f64,
    /// L2 penalty: this factor times the weight is added to the gradient.
    pub weight_decay: f64,
    /// Which definition to use.
    pub form: RmsForm,
}

impl Default for RmsProp {
    /// AmoebaNet's values: TensorFlow's form, decay and momentum 0.9, eps 1.
    fn default() -> Self {
        let form = RmsForm::TensorFlow;
        Self { lr: 1e-3, decay: 0.9, momentum: 0.9, eps: 1.0, weight_decay: 0.0, form }
    }
}

impl Optimizer for RmsProp {
    fn name(&self) -> &'static str {
        "rmsprop"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        let fill = if self.form == RmsForm::TensorFlow { 1.0 } else { 0.0 };
        let square = StateSpec { fill, ..StateSpec::zeros("square_avg", parameter.shape) };
        if self.momentum == 0.0 {
            return vec![square];
        }
        vec![square, StateSpec::zeros("momentum", parameter.shape)]
    }

    fn temporaries(&self) -> usize {
        5
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn check(&self) -> Result<(), String> {
        fraction(&[("decay", self.decay)])?;
        not_negative(&[
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let pairs = update.parameters.iter().zip(update.grads).zip(update.state);
        for ((parameter, grad), state) in pairs {
            let grad = match update.weight_decay {
                0.0 => grad.shallow_clone(),
                decay => grad.f_add(&parameter.f_mul_scalar(decay)?)?,
            };
            let [square, momentum @ ..] = state else {
                return Err(LayerError::Value("RMSProp has a mean square per parameter".into()));
            };
            let mut square = square.shallow_clone();
            let _ = square
                .f_mul_scalar_(self.decay)?
                .f_add_(&grad.f_square()?.f_mul_scalar(1.0 - self.decay)?)?;
            let scaled = match self.form {
                RmsForm::TensorFlow => grad
                    .f_div(&square.f_add_scalar(self.eps)?.f_sqrt()?)?
                    .f_mul_scalar(update.lr)?,
                RmsForm::PyTorch => grad.f_div(&square.f_sqrt()?.f_add_scalar(self.eps)?)?,
            };
            let velocity = match momentum.first() {
                Some(velocity) => {
                    let mut velocity = velocity.shallow_clone();
                    velocity.f_mul_scalar_(self.momentum)?.f_add_(&scaled)?
                }
                None => scaled,
            };
            let step = match self.form {
                RmsForm::TensorFlow => velocity,
                RmsForm::PyTorch => velocity.f_mul_scalar(update.lr)?,
            };
            let _ = parameter.shallow_clone().f_sub_(&step)?;
        }
        Ok(())
    }
}
