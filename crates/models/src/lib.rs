//! Networks as sequences of layers. This crate only builds them; the layers are in
//! [`gpipe::layers`].

pub mod huggingface;
pub mod images;
pub mod llama;
pub mod transformer;
pub mod translation;
mod translator;

pub use images::{
    ImageError,
    amoebanet::{AmoebaNet, Variant},
    resnet::ResNet,
    unet::UNet,
};
pub use llama::{Experts, Llama, LlamaError};
pub use transformer::{Transformer, TransformerError};
pub use translation::{Translation, TranslationError};
pub use translator::{CachedLogits, RecomputedLogits};
