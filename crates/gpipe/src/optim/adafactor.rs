//! Adafactor (Shazeer & Stern 2018): Adam with the second moment factored into a row and a column.

use tch::{Kind, Tensor};

use super::{Optimizer, ParameterInfo, StateSpec, Update, not_negative};
use crate::error::LayerError;

/// Adafactor without a first moment (Shazeer & Stern 2018, algorithms 4 and 5), in PyTorch's form.
///
/// The state of a matrix [n, m] is n + m numbers, where Adam keeps 2 n m.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// Largest relative step. The step is min(lr, 1 / sqrt(t)) times the root mean square of the
    /// parameter.
    pub lr: f64,
    /// Decay of the second moment: at update t it is 1 - t^beta2_decay.
    pub beta2_decay: f64,
    /// Lower bound of a parameter's root mean square, for parameters that start at 0 (eps_2).
    pub eps: f64,
    /// Largest root mean square of an update (d).
    pub clip_threshold: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for Adafactor {
    /// The values of Shazeer & Stern, without weight decay.
    fn default() -> Self {
        Self { lr: 1e-2, beta2_decay: -0.8, eps: 1e-3, clip_threshold: 1.0, weight_decay: 0.0 }
    }
}

impl Optimizer for Adafactor {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        let shape = parameter.shape;
        let [outer @ .., rows, columns] = shape else {
            return vec![StateSpec::zeros("variance", shape)];
        };
        let (row, column) = ([outer, &[*rows, 1]].concat(), [outer, &[1, *columns]].concat());
        vec![StateSpec::zeros("row_variance", &row), StateSpec::zeros("column_variance", &column)]
    }

    fn temporaries(&self) -> usize {
        6
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn check(&self) -> Result<(), String> {
        if self.beta2_decay.is_nan() || self.beta2_decay > 0.0 {
            let decay = self.beta2_decay;
            return Err(format!("beta2_decay = {decay}: use at most 0, such as -0.8"));
        }
        if self.clip_threshold.is_nan() || self.clip_threshold < 1.0 {
            let threshold = self.clip_threshold;
            return Err(format!("clip_threshold = {threshold}: use at least 1"));
        }
        not_negative(&[("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)])
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let pairs = update.parameters.iter().zip(update.grads).zip(update.state);
        for ((parameter, grad), state) in pairs {
            self.apply_one(parameter, grad, state, update)?;
        }
        Ok(())
    }
}

impl Adafactor {
    fn apply_one(
        &self,
        parameter: &Tensor,
        grad: &Tensor,
        state: &[Tensor],
        update: &Update,
    ) -> Result<(), LayerError> {
        let mut parameter = parameter.shallow_clone();
        let t = update.update as f64;
        let new_share = t.powf(self.beta2_decay);
        let relative = update.lr.min(1.0 / t.sqrt());
        let step = root_mean_square(&parameter)?.max(self.eps) * relative;
        if update.weight_decay != 0.0 {
            let _ = parameter.f_mul_scalar_(1.0 - update.lr * update.weight_decay)?;
        }
        let square = grad.f_square()?;
        // Rows and columns are means, so their products have the scale of one squared element.
        let variance = match state {
            [variance] => variance.shallow_clone().f_lerp_(&square, new_share)?.f_detach_copy()?,
            [row, column] => {
                let mean = |axis: i64| square.f_mean_dim(&[axis][..], true, None::<Kind>);
                let row = row.shallow_clone().f_lerp_(&mean(-1)?, new_share)?;
                let column = column.shallow_clone().f_lerp_(&mean(-2)?, new_share)?;
                let norm = row.f_mean_dim(&[-2_i64][..], true, None::<Kind>)?;
                row.f_matmul(&column)?.f_div(&norm.f_clamp_min(least(grad.kind()))?)?
            }
            _ => return Err(LayerError::Value("Adafactor has one or two state tensors".into())),
        };
        let least = least(grad.kind());
        let direction = variance.f_clamp_min(least * least)?.f_rsqrt()?.f_mul(grad)?;
        let clip = (root_mean_square(&direction)? / self.clip_threshold).max(1.0);
        let _ = parameter.f_sub_(&direction.f_mul_scalar(step / clip)?)?;
        Ok(())
    }
}

/// eps_1 of Shazeer & Stern. As in PyTorch, this is the dtype's epsilon.
fn least(kind: Kind) -> f64 {
    if kind == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) }
}

fn root_mean_square(tensor: &Tensor) -> Result<f64, LayerError> {
    let norm = tensor.f_norm()?.f_double_value(&[])?;
    Ok(norm / (tensor.numel().max(1) as f64).sqrt())
}
