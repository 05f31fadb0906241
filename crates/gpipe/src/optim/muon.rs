//! Muon (Jordan et al. 2024): momentum whose direction is orthogonalized, for matrices; AdamW for
//! everything else.
//!
//! It is also the example of an optimizer that treats parameters by name and shape: see `state` and
//! `apply`.

use tch::{Kind, Tensor};

use super::{Adam, Optimizer, ParameterInfo, StateSpec, Update, name_matches, not_negative};
use crate::error::LayerError;

/// Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>), in PyTorch's form, with
/// AdamW for parameters that are no matrices or that [`Muon::others`] names.
///
/// ```text
/// b <- momentum b + (1 - momentum) g
/// u  = orthogonalize(momentum b + (1 - momentum) g)        Nesterov's form
/// w <- w - lr weight_decay w - lr sqrt(max(1, rows / columns)) u
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Muon {
    /// The learning rate of matrices.
    pub lr: f64,
    /// Share of the old momentum.
    pub momentum: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Steps of the Newton-Schulz iteration, at most 100.
    pub iterations: usize,
    /// Patterns of full names: matrices that AdamW updates, such as embeddings and heads.
    pub others: Vec<String>,
    /// The rule for all other parameters. Its learning rate follows the schedule of `lr`. Its
    /// weight decay is not used: `weight_decay`, or that of a group, applies to all parameters.
    pub adam: Adam,
}

impl Default for Muon {
    /// PyTorch's values, and AdamW with its usual ones.
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.95,
            weight_decay: 0.1,
            iterations: 5,
            others: Vec::new(),
            adam: Adam { lr: 1e-3, decoupled: true, ..Adam::default() },
        }
    }
}

/// The iteration converges in fewer steps, and none may keep a stage without end.
const ITERATIONS_MAX: usize = 100;

impl Muon {
    fn is_own(&self, name: &str, shape: &[i64]) -> bool {
        shape.len() == 2 && !self.others.iter().any(|pattern| name_matches(pattern, name))
    }
}

impl Optimizer for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        match self.is_own(parameter.name, parameter.shape) {
            true => vec![StateSpec::zeros("momentum", parameter.shape)],
            false => self.adam.state(parameter),
        }
    }

    fn patterns(&self) -> &[String] {
        &self.others
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
        if !(0.0..1.0).contains(&self.momentum) {
            let momentum = self.momentum;
            return Err(format!("momentum = {momentum}: use at least 0 and less than 1"));
        }
        if self.iterations > ITERATIONS_MAX {
            let iterations = self.iterations;
            return Err(format!("iterations = {iterations}: use at most {ITERATIONS_MAX}"));
        }
        if self.lr == 0.0 && self.adam.lr != 0.0 {
            return Err("lr = 0: AdamW's rate follows it, so use a number above 0".into());
        }
        not_negative(&[("lr", self.lr), ("weight_decay", self.weight_decay)])?;
        self.adam.check().map_err(|reason| format!("AdamW: {reason}"))
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        // All settings of a group apply to both rules; AdamW's rate differs by a constant factor.
        let ratio = if self.lr == 0.0 { 0.0 } else { self.adam.lr / self.lr };
        for (at, parameter) in update.parameters.iter().enumerate() {
            let own = at..at + 1;
            let alone = Update {
                names: &update.names[own.clone()],
                parameters: &update.parameters[own.clone()],
                grads: &update.grads[own.clone()],
                state: &update.state[own],
                lr: update.lr * ratio,
                ..*update
            };
            match self.is_own(update.names[at], &parameter.size()) {
                true => self.apply_one(parameter, update.grads[at], update.state[at], update)?,
                false => self.adam.apply(&alone)?,
            }
        }
        Ok(())
    }
}

impl Muon {
    fn apply_one(
        &self,
        parameter: &Tensor,
        grad: &Tensor,
        state: &[Tensor],
        update: &Update,
    ) -> Result<(), LayerError> {
        let [momentum] = state else {
            return Err(LayerError::Value("Muon has one state tensor for a matrix".into()));
        };
        let mut parameter = parameter.shallow_clone();
        let momentum = momentum.shallow_clone().f_lerp_(grad, 1.0 - self.momentum)?;
        let direction = grad.f_lerp(&momentum, self.momentum)?;
        let direction = orthogonalized(&direction, self.iterations)?.f_to_kind(parameter.kind())?;
        let shape = parameter.size();
        let scale = (shape[0] as f64 / shape[1].max(1) as f64).max(1.0).sqrt();
        if update.weight_decay != 0.0 {
            let _ = parameter.f_mul_scalar_(1.0 - update.lr * update.weight_decay)?;
        }
        let _ = parameter.f_sub_(&direction.f_mul_scalar(update.lr * scale)?)?;
        Ok(())
    }
}

/// An approximation of the orthogonal factor of `matrix` [rows, columns]: its singular values
/// become numbers between about 0.7 and 1.2. Newton-Schulz iteration of fifth order, in bfloat16,
/// with the coefficients of Jordan et al.
pub(crate) fn orthogonalized(matrix: &Tensor, iterations: usize) -> Result<Tensor, LayerError> {
    const A: f64 = 3.4445;
    const B: f64 = -4.7750;
    const C: f64 = 2.0315;
    let shape = matrix.size();
    let is_tall = shape[0] > shape[1];
    let mut x = matrix.f_to_kind(Kind::BFloat16)?;
    if is_tall {
        x = x.f_tr()?;
    }
    x = x.f_div(&x.f_norm()?.f_clamp_min(1e-7)?)?;
    for _ in 0..iterations {
        let gram = x.f_matmul(&x.f_tr()?)?;
        let inner = gram.f_mul_scalar(B)?.f_add(&gram.f_matmul(&gram)?.f_mul_scalar(C)?)?;
        x = x.f_mul_scalar(A)?.f_add(&inner.f_matmul(&x)?)?;
    }
    Ok(if is_tall { x.f_tr()? } else { x })
}
