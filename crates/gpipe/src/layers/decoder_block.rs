//! A whole block of an encoder-decoder's decoder as one layer.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, ParameterSpec},
    layers::{Attention, CrossAttention, Mlp, first_and_rest, passing_on},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Causal [`Attention`], [`CrossAttention`], [`Mlp`]: the same arithmetic as the three layers in
/// sequence. Its inputs are those of [`CrossAttention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderBlock {
    /// The first part, which must be causal.
    pub self_attention: Attention,
    /// The second part.
    pub cross_attention: CrossAttention,
    /// The third part.
    pub mlp: Mlp,
}

const CROSS_ATTENTION: usize = Attention::PARAMETERS;
const MLP: usize = CROSS_ATTENTION + CrossAttention::PARAMETERS;

impl Layer for DecoderBlock {
    fn kind(&self) -> &'static str {
        "decoder block"
    }

    /// The parameters of all parts, named `self_attention.*`, `cross_attention.*` and `mlp.*`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.self_attention.parameters_named("self_attention.");
        parameters.extend(self.cross_attention.parameters_named("cross_attention."));
        parameters.extend(self.mlp.parameters_named("mlp."));
        parameters
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (_, rest) = first_and_rest(inputs)?;
        let x = self.self_attention.check(ctx, inputs)?;
        let x = self.cross_attention.check(ctx, &x, rest)?;
        Ok(passing_on(self.mlp.check(ctx, &x)?, rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        let x = self.self_attention.apply(ctx, 0, x, rest)?;
        let x = self.cross_attention.apply(ctx, CROSS_ATTENTION, &x, rest)?;
        let x = self.mlp.apply(ctx, MLP, &x)?;
        Ok(passing_on(x, rest, Tensor::shallow_clone))
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let attention = self.self_attention.operations(inputs)?;
        Some(attention + self.cross_attention.operations(inputs)? + self.mlp.operations(inputs)?)
    }

    fn adaptable(&self) -> Vec<usize> {
        super::matrices(&self.parameters()).collect()
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn unread(&self) -> Option<usize> {
        Some(MLP + Mlp::LAST)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (x, rest) = inputs.split_first()?;
        let x = self.self_attention.record_from(tape, 0, *x, rest)?;
        let x = self.cross_attention.record_from(tape, CROSS_ATTENTION, x, rest)?;
        Some(passing_on(self.mlp.record_from(tape, MLP, x), rest, |var| *var))
    }
}
