//! Adam and AdamW.

use gpipe_bridge::optim::{AdamStep, adam};
use tch::{Kind, Tensor};

use super::{Optimizer, ParameterInfo, StateSpec, Update, fraction, not_negative};
use crate::{
    error::LayerError,
    rng::{RoundingKey, round_to_bfloat16},
};

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
    /// The dtype in which the moments are kept.
    pub moments: Moments,
}

/// The dtype in which [`Adam`] keeps its two moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Moments {
    /// The dtype in which the parameter is updated: float32, or float64 if the pipeline computes in
    /// it.
    #[default]
    Full,
    /// bfloat16: 4 bytes for a parameter instead of 8. An update computes in the parameter's dtype
    /// and rounds the new moments stochastically. The random bits depend only on the seed, the
    /// parameter's name, the moment, the number of the update and the element, so the result does
    /// not depend on stages, schedule or replicas.
    BFloat16,
}

/// Bytes of a parameter that are updated at once where moments are rounded. It bounds the
/// temporaries.
const PART: u64 = 1 << 20;

impl Default for Adam {
    /// The values of Kingma & Ba, without weight decay.
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            moments: Moments::Full,
        }
    }
}

impl Optimizer for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        let moment = |name| StateSpec::zeros(name, parameter.shape);
        let moments = ["exp_avg", "exp_avg_sq"].map(moment);
        match self.moments {
            Moments::Full => moments.into(),
            Moments::BFloat16 => moments.map(|moment| moment.kind(Kind::BFloat16)).into(),
        }
    }

    fn temporaries(&self) -> usize {
        match self.moments {
            Moments::Full => 0, // ATen's fused kernel works in place
            // Both moments in the parameter's dtype, and what a GPU needs for random bits.
            Moments::BFloat16 => 5,
        }
    }

    fn temporary_bytes(&self, largest: u64) -> u64 {
        largest.min(PART) * self.temporaries() as u64
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
        match self.moments {
            Moments::Full => {
                let moments = [&*update.column(0)?, &*update.column(1)?];
                self.step(update, update.parameters, update.grads, moments)
            }
            Moments::BFloat16 => (0..update.parameters.len())
                .try_for_each(|position| self.apply_rounded(update, position)),
        }
    }
}

impl Adam {
    /// Updates one parameter whose moments are in bfloat16, part by part.
    fn apply_rounded(&self, update: &Update, position: usize) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let [exp_avg, exp_avg_sq] = update.state[position] else {
            return Err(LayerError::Value("Adam has two state tensors".into()));
        };
        let parameter = update.parameters[position].f_view([-1])?;
        let grad = update.grads[position].f_reshape([-1])?;
        let moments = [exp_avg.f_view([-1])?, exp_avg_sq.f_view([-1])?];
        let (kind, count) = (parameter.kind(), parameter.size1()?);
        let part = PART as i64 / kind.elt_size_in_bytes() as i64;
        for first in (0..count).step_by(part as usize) {
            let part = |all: &Tensor| all.f_narrow(0, first, part.min(count - first));
            let kept = [part(&moments[0])?, part(&moments[1])?];
            let wide = [kept[0].f_to_kind(kind)?, kept[1].f_to_kind(kind)?];
            let (parameter, grad) = (part(&parameter)?, part(&grad)?);
            self.step(update, &[&parameter], &[&grad], [&[&wide[0]], &[&wide[1]]])?;
            for (tensor, (wide, kept)) in (0..).zip(wide.into_iter().zip(&kept)) {
                let (seed, parameter) = (update.seed, update.names[position]);
                let key = RoundingKey { seed, parameter, tensor, update: update.update };
                round_to_bfloat16(wide.f_to_kind(Kind::Float)?, kept, key, first)?;
            }
        }
        Ok(())
    }

    /// One step of ATen's kernel in place. All lists have the same length.
    fn step(
        &self,
        update: &Update,
        parameters: &[&Tensor],
        grads: &[&Tensor],
        [exp_avgs, exp_avg_sqs]: [&[&Tensor]; 2],
    ) -> Result<(), LayerError> {
        let Some(device) = parameters.first().map(|parameter| parameter.device()) else {
            return Ok(());
        };
        let mut step = Tensor::f_empty([0_i64; 0], (Kind::Float, device))?;
        let step = step.f_fill_(f64::from(update.update as f32))?;
        let steps = vec![&step; parameters.len()];
        let numbers = AdamStep {
            lr: update.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: update.weight_decay,
            decoupled: self.decoupled,
        };
        Ok(adam(parameters, grads, exp_avgs, exp_avg_sqs, &steps, &numbers)?)
    }
}
