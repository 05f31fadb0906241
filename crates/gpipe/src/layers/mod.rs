//! Layers to build networks from. Each file is one layer; a network of one's own needs none of them
//! ([`crate::layer`] says how to write one).

mod activation;
mod attention;
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
pub use block::Block;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use head::Head;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::LayerNorm;
pub use skip::{Pop, Stash};

use crate::{error::LayerError, layer::only, spec::TensorSpec};

/// The only input, if it is a float tensor [samples, ..., features].
fn features(inputs: &[TensorSpec], expected: i64) -> Result<&TensorSpec, LayerError> {
    let input = only(inputs)?;
    if input.is_float() && input.shape.len() >= 2 && input.last() == expected {
        return Ok(input);
    }
    Err(LayerError::Shape(format!(
        "it takes a float tensor [samples, ..., {expected}], it got {input}"
    )))
}
