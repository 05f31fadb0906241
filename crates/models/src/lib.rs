//! Networks as sequences of layers. Builders only: the layers themselves are in [`gpipe::layers`].

pub mod transformer;

pub use transformer::{Transformer, TransformerError};
