//! Elementwise activations.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, only},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// An elementwise activation of a float tensor of any shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Gaussian error linear unit, exact (Hendrycks & Gimpel 2016).
    Gelu,
    /// Rectified linear unit.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
}

impl Layer for Activation {
    fn kind(&self) -> &'static str {
        match self {
            Activation::Gelu => "gelu",
            Activation::Relu => "relu",
            Activation::Tanh => "tanh",
        }
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let input = only(inputs)?;
        if !input.is_float() {
            return Err(LayerError::Shape(format!("it takes a float tensor, it got {input}")));
        }
        Ok(vec![input.clone()])
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = only(inputs)?;
        Ok(vec![match self {
            Activation::Gelu => x.f_gelu("none")?,
            Activation::Relu => x.f_relu()?,
            Activation::Tanh => x.f_tanh()?,
        }])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let x = *inputs.first()?;
        Some(vec![match self {
            Activation::Gelu => tape.elementwise(x),
            Activation::Relu | Activation::Tanh => tape.elementwise_by_output(x),
        }])
    }
}
