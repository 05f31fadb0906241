//! A whole transformer block as one layer: fewer, larger pieces for the partitioner.

use tch::Tensor;

use crate::{
    error::LayerError,
    estimate::{Tape, Var},
    layer::{Forward, Infer, Layer, ParameterSpec, only},
    layers::{Attention, Mlp},
    spec::TensorSpec,
};

/// [`Attention`] then [`Mlp`]: the same arithmetic as the two layers one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// The first half.
    pub attention: Attention,
    /// The second half.
    pub mlp: Mlp,
}

impl Layer for Block {
    fn kind(&self) -> &'static str {
        "block"
    }

    /// Those of both halves, named `attention.*` and `mlp.*`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.attention.parameters_named("attention.");
        parameters.extend(self.mlp.parameters_named("mlp."));
        parameters
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let middle = self.attention.check(ctx, inputs)?;
        Ok(vec![self.mlp.check(ctx, &[middle])?])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let middle = self.attention.apply(ctx, 0, only(inputs)?)?;
        Ok(vec![self.mlp.apply(ctx, Attention::PARAMETERS, &middle)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(self.attention.operations(inputs)? + self.mlp.operations(inputs)?)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let middle = self.attention.record_from(tape, 0, *inputs.first()?);
        Some(vec![self.mlp.record_from(tape, Attention::PARAMETERS, middle)])
    }
}
