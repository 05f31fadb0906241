//! A whole block of a decoder-only transformer or of an encoder as one layer, which gives the
//! partitioner fewer and larger units.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, ParameterSpec},
    layers::{Attention, Mlp, first_and_rest, passing_on},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// [`Attention`], then [`Mlp`]: the same arithmetic as the two layers in sequence.
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

    /// The parameters of both halves, named `attention.*` and `mlp.*`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.attention.parameters_named("attention.");
        parameters.extend(self.mlp.parameters_named("mlp."));
        parameters
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (_, rest) = first_and_rest(inputs)?;
        let middle = self.attention.check(ctx, inputs)?;
        Ok(passing_on(self.mlp.check(ctx, &middle)?, rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        let middle = self.attention.apply(ctx, 0, x, rest)?;
        let y = self.mlp.apply(ctx, Attention::PARAMETERS, &middle)?;
        Ok(passing_on(y, rest, Tensor::shallow_clone))
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(self.attention.operations(inputs)? + self.mlp.operations(inputs)?)
    }

    fn adaptable(&self) -> Vec<usize> {
        super::matrices(&self.parameters()).collect()
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn unread(&self) -> Option<usize> {
        Some(Attention::PARAMETERS + Mlp::LAST)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (x, rest) = inputs.split_first()?;
        let middle = self.attention.record_from(tape, 0, *x, rest)?;
        let y = self.mlp.record_from(tape, Attention::PARAMETERS, middle);
        Some(passing_on(y, rest, |var| *var))
    }
}
