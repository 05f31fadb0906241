//! A loss with a load-balancing term for mixtures of experts.

use tch::Tensor;

use super::{Loss, LossContext};
use crate::{
    error::LayerError,
    parameter::ParameterSpec,
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Adds a load-balancing term to the loss of the first output:
///
/// `weight * experts * sum_e f_e * p_e`,
///
/// where `f_e` is the share of tokens that chose expert `e`, and `p_e` its mean probability (Fedus
/// et al. 2022, equations 4 to 6). As in Hugging Face's transformers, both are over all layers, and
/// padding does not count.
///
/// The second output is [samples, 2, experts], as [`LlamaBlock`](crate::layers::LlamaBlock) makes
/// it. The term is computed for each micro-batch and weighted by the micro-batch's share of the
/// targets, so the result depends on the number of micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalancedExperts<L> {
    /// The loss of the first output.
    pub loss: L,
    /// Weight of the term (`router_aux_loss_coef`).
    pub weight: f64,
    /// Number of experts that a token chooses.
    pub top_k: i64,
}

impl<L: Loss> Loss for BalancedExperts<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.loss.parameters()
    }

    fn pops(&self) -> Vec<String> {
        self.loss.pops()
    }

    fn takes_inputs(&self) -> bool {
        self.loss.takes_inputs()
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        if !self.weight.is_finite() || self.weight < 0.0 {
            return Err(LayerError::Value(format!(
                "the weight of the experts' balance is {}: it must be a number of at least 0",
                self.weight
            )));
        }
        let [first, division] = outputs else {
            return Err(LayerError::Shape(format!(
                "a balance of experts takes two outputs, logits and the division of tokens, and \
                there are {}",
                outputs.len()
            )));
        };
        if !matches!(division.shape[..], [_, 2, _]) || !division.is_float() {
            return Err(LayerError::Shape(format!(
                "the division of tokens is [samples, 2, experts], it got {division}"
            )));
        }
        self.loss.check(ctx, std::slice::from_ref(first), targets)
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let (first, rest) = outputs.split_at(outputs.len().min(1));
        let sum = self.loss.sum(ctx, first, targets)?;
        let Some(division) = rest.first() else { return Ok(sum) };
        let experts = division.size().last().copied().unwrap_or(1);
        // Sums over the samples: [2, experts].
        let all = division.f_sum_dim_intlist([0_i64].as_slice(), false, None)?;
        let (counts, probabilities) = (all.f_select(0, 0)?.f_detach()?, all.f_select(0, 1)?);
        // Each token of each layer chose this many experts. There may be padding alone.
        let tokens = counts.f_sum(counts.kind())?.f_div_scalar(self.top_k.max(1) as f64)?;
        let tokens = tokens.f_clamp_min(1.0)?;
        let squares = counts.f_mul(&probabilities)?.f_sum(counts.kind())?;
        let term = squares.f_div(&tokens.f_square()?)?.f_mul_scalar(experts as f64)?;
        let share = self.loss.count(ctx, targets)?;
        Ok(sum.f_add(&term.f_mul_scalar(self.weight * share)?.f_to_kind(sum.kind())?)?)
    }

    fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        self.loss.count(ctx, targets)
    }

    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        // The term's tensors are tiny.
        self.loss.record(tape, outputs.get(..1)?)
    }
}
