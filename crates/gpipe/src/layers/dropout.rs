//! Dropout as a separate layer.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, only},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Dropout (Srivastava et al. 2014): in training mode, zeroes each element with probability `p`.
/// The input is [samples, ...] of floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability, from 0 to 1, in steps of 2^-16.
    pub p: f64,
}

/// Checks that `p` is a probability.
pub(super) fn check_probability(name: &str, p: f64) -> Result<(), LayerError> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    Err(LayerError::Value(format!("{name} is {p}: it is a probability, from 0 to 1")))
}

impl Layer for Dropout {
    fn kind(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        check_probability("p", self.p)?;
        let input = only(inputs)?;
        if !input.is_float() || input.shape.is_empty() {
            return Err(LayerError::Shape(format!(
                "it takes a float tensor [samples, ...], it got {input}"
            )));
        }
        Ok(vec![input.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![ctx.dropout(only(inputs)?, self.p)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.dropout(*inputs.first()?, self.p)])
    }
}
