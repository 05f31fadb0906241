//! Layers to build networks from. Each file is one layer; a network of one's own needs none of them
//! ([`crate::layer`] says how to write one).

mod activation;
mod attention;
mod batch_norm;
mod block;
mod cross_attention;
mod decoder_block;
mod dropout;
mod embedding;
mod head;
mod heads;
mod linear;
mod mlp;
mod norm;
mod sentences;
mod sinusoids;
mod skip;

pub use activation::Activation;
pub use attention::Attention;
pub use batch_norm::BatchNorm;
pub use block::Block;
pub use cross_attention::CrossAttention;
pub use decoder_block::DecoderBlock;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use head::Head;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::LayerNorm;
pub use sentences::{SourceEmbedding, TargetEmbedding, TokenEmbedding};
pub use skip::{Pop, Stash};

use crate::{
    error::LayerError,
    layer::{Infer, only},
    spec::TensorSpec,
};

/// The only input, if it is [samples, ..., features] in the parameters' dtype.
fn features<'a>(
    ctx: &Infer,
    inputs: &'a [TensorSpec],
    expected: i64,
) -> Result<&'a TensorSpec, LayerError> {
    let (input, kind) = (only(inputs)?, ctx.parameter_kind());
    if input.kind == kind && input.shape.len() >= 2 && input.last() == expected {
        return Ok(input);
    }
    Err(LayerError::Shape(format!("it takes {kind:?} [samples, ..., {expected}], it got {input}")))
}

/// Whether `input` is [samples, positions, features] in the parameters' dtype.
fn positions(ctx: &Infer, input: &TensorSpec, expected: i64) -> Result<(), LayerError> {
    let kind = ctx.parameter_kind();
    if input.kind == kind && input.shape.len() == 3 && input.last() == expected {
        return Ok(());
    }
    Err(LayerError::Shape(format!(
        "it takes {kind:?} [samples, positions, {expected}], it got {input}"
    )))
}

/// The input that a layer works on, and those that it may read and passes on.
fn first_and_rest<T>(inputs: &[T]) -> Result<(&T, &[T]), LayerError> {
    let none = || LayerError::Shape("it takes at least 1 tensor, it got 0".into());
    inputs.split_first().ok_or_else(none)
}

/// What became of the first input, and the others as they are.
fn passing_on<T>(first: T, rest: &[T], copy: impl Fn(&T) -> T) -> Vec<T> {
    std::iter::once(first).chain(rest.iter().map(copy)).collect()
}
