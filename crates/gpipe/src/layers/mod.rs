//! Ready-made layers, one per file. They are optional: [`crate::layer`] explains how to write a
//! layer.

mod activation;
mod attention;
mod batch_norm;
mod block;
mod cross_attention;
mod decoder_block;
mod documents;
mod dropout;
mod embedding;
mod expert_mlp;
mod gated_mlp;
mod grouped_attention;
mod head;
mod heads;
mod linear;
mod llama_block;
mod mlp;
mod norm;
mod projections;
mod rms_norm;
mod rotary;
mod sentences;
mod sinusoids;
mod skip;
mod vocabulary;

pub use activation::Activation;
pub use attention::Attention;
pub use batch_norm::BatchNorm;
pub use block::Block;
pub use cross_attention::CrossAttention;
pub use decoder_block::DecoderBlock;
pub use documents::DOCUMENTS;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use expert_mlp::{ExpertMlp, ExpertNames};
pub use gated_mlp::GatedMlp;
pub use grouped_attention::GroupedAttention;
pub use head::Head;
pub use linear::Linear;
pub use llama_block::{FeedForward, LlamaBlock};
pub use mlp::{Gelu, Mlp};
pub use norm::LayerNorm;
pub use rms_norm::RmsNorm;
pub use rotary::{Rotary, RotaryScaling};
pub use sentences::{SourceEmbedding, TargetEmbedding, TokenEmbedding};
pub use skip::{Pop, Stash};
pub use vocabulary::{TokenLogits, TokenTable};

use crate::{
    error::LayerError,
    layer::{Infer, ParameterSpec, only},
    spec::{TensorSpec, dtype},
};

/// The indices of the parameters with two axes.
fn matrices(parameters: &[ParameterSpec]) -> impl Iterator<Item = usize> + '_ {
    let all = parameters.iter().enumerate();
    all.filter(|(_, own)| own.shape.len() == 2).map(|(number, _)| number)
}

/// Checks that the only input is [samples, ..., features] in the parameters' dtype.
fn features<'a>(
    ctx: &Infer,
    inputs: &'a [TensorSpec],
    expected: i64,
) -> Result<&'a TensorSpec, LayerError> {
    let (input, kind) = (only(inputs)?, ctx.parameter_kind());
    if input.kind == kind && input.shape.len() >= 2 && input.last() == expected {
        return Ok(input);
    }
    let kind = dtype(kind);
    Err(LayerError::Shape(format!("it takes {kind} [samples, ..., {expected}], it got {input}")))
}

/// Checks that `input` is [samples, positions, features] in the parameters' dtype.
fn positions(ctx: &Infer, input: &TensorSpec, expected: i64) -> Result<(), LayerError> {
    let kind = ctx.parameter_kind();
    if input.kind == kind && input.shape.len() == 3 && input.last() == expected {
        return Ok(());
    }
    Err(LayerError::Shape(format!(
        "it takes {} [samples, positions, {expected}], it got {input}",
        dtype(kind)
    )))
}

/// Splits the inputs into the first, which a layer works on, and the rest, which it passes on.
fn first_and_rest<T>(inputs: &[T]) -> Result<(&T, &[T]), LayerError> {
    let none = || LayerError::Shape("it takes at least 1 tensor, it got 0".into());
    inputs.split_first().ok_or_else(none)
}

/// The outputs of a layer: the new first value, and copies of the rest.
fn passing_on<T>(first: T, rest: &[T], copy: impl Fn(&T) -> T) -> Vec<T> {
    std::iter::once(first).chain(rest.iter().map(copy)).collect()
}
