//! Layer normalisation.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Layer normalisation over the last axis (Ba, Kiros & Hinton 2016): [samples, ..., features].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNorm {
    /// Size of the last axis.
    pub features: i64,
}

const EPS: f64 = 1e-5;

/// The parameters of a layer norm, with `prefix` before each name.
pub(super) fn norm_parameters(prefix: &str, features: i64) -> [ParameterSpec; 2] {
    [
        ParameterSpec::new(&format!("{prefix}weight"), [features], Init::Ones),
        ParameterSpec::new(&format!("{prefix}bias"), [features], Init::Zeros),
    ]
}

/// Layer norm of `x` with parameters `first` and `first + 1`.
pub(super) fn normalise(ctx: &Forward, first: usize, x: &Tensor) -> Result<Tensor, LayerError> {
    let (weight, bias) = (ctx.parameter(first)?, ctx.parameter(first + 1)?);
    Ok(x.f_layer_norm(weight.size(), Some(weight), Some(bias), EPS, true)?)
}

impl Layer for LayerNorm {
    fn kind(&self) -> &'static str {
        "norm"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        norm_parameters("", self.features).into()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![super::features(ctx, inputs, self.features)?.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![normalise(ctx, 0, only(inputs)?)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.layer_norm(*inputs.first()?, 0)])
    }
}
