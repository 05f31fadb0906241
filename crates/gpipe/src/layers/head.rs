//! The output layer of a language model.

use tch::Tensor;

use crate::{
    error::LayerError,
    estimate::{Tape, Var},
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    layers::norm::{norm_parameters, normalise},
    spec::TensorSpec,
};

/// Layer norm, then the projection to logits: [samples, positions, features] -> [.., vocabulary].
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// Size of the model.
    pub features: i64,
    /// Number of logits.
    pub vocabulary: i64,
    /// Standard deviation of the initial projection (where it is not tied).
    pub std: f64,
    /// Ties the projection with the other weights of this name (Press & Wolf 2017).
    pub tie: Option<String>,
}

impl Layer for Head {
    fn kind(&self) -> &'static str {
        "head"
    }

    /// `norm.weight`, `norm.bias` `[features]` and `weight` `[vocabulary, features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [weight, bias] = norm_parameters("norm.", self.features);
        let init = Init::Normal { std: self.std };
        let projection = ParameterSpec::new("weight", [self.vocabulary, self.features], init);
        vec![weight, bias, projection.tied(self.tie.as_deref())]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![super::features(ctx, inputs, self.features)?.with_last(self.vocabulary)])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let h = normalise(ctx, 0, only(inputs)?)?;
        Ok(vec![ctx.linear(&h, ctx.parameter(2)?, None)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(2.0 * inputs.first()?.elements() * self.vocabulary as f64)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let h = tape.layer_norm(*inputs.first()?, 0);
        Some(vec![tape.linear(h, 2, None)])
    }
}
