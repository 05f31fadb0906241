//! Layers to build networks from. Each file is one layer; a network of one's own needs none of them
//! ([`crate::layer`] says how to write one).

mod activation;
mod attention;
mod batch_norm;
mod block;
mod dropout;
mod embedding;
mod head;
mod linear;
mod mlp;
mod norm;
mod skip;

pub use activation::Activation;
pub use attention::Attention;
pub use batch_norm::BatchNorm;
pub use block::Block;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use head::Head;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::LayerNorm;
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
