//! Models as Hugging Face's transformers describes and names them.
//!
//! - [`config`]: `config.json`, read
//! - `keys`: reads its keys; none is ignored
//! - `llama` with its `rope` (rotary positions), `gpt2`: the architectures
//! - [`names`]: which tensor of a folder is which parameter
//! - `write`: `config.json` of a model that was not read from one

mod gpt2;
mod keys;
mod llama;
pub mod names;
mod rope;
mod write;

use gpipe::Sequence;
use serde_json::Value;

pub use self::{keys::ConfigError, write::written};
use self::{keys::Keys, names::Name};
use crate::{Llama, LlamaError, Transformer, TransformerError};

/// A model that a `config.json` describes.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The network.
    pub network: Network,
    /// The network's kind, as `model_type` gives it.
    pub model_type: String,
    /// Tokens that end a text (`eos_token_id`), if the file names any.
    pub ends: Vec<u32>,
}

/// The network of a [`Described`] model.
#[derive(Debug, Clone, PartialEq)]
pub enum Network {
    /// Llama, Mistral, Qwen 2.5, Qwen 3.
    Llama(Llama),
    /// GPT-2.
    Gpt2(Transformer),
}

/// A described model has invalid sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// Of the Llama family.
    #[error(transparent)]
    Llama(#[from] LlamaError),
    /// Of GPT-2.
    #[error(transparent)]
    Gpt2(#[from] TransformerError),
}

/// Reads the text of a `config.json`.
///
/// # Errors
/// [`ConfigError`]: it is not JSON; another architecture; a key that is missing, has another type
/// or value, or is not supported.
pub fn config(text: &str) -> Result<Described, ConfigError> {
    let mut keys = Keys::parse(text)?;
    let named = keys.get("model_type");
    let model_type = named.as_ref().and_then(Value::as_str).unwrap_or("missing").to_owned();
    let network = match (llama::Family::of(&model_type), model_type.as_str()) {
        (Some(family), _) => Network::Llama(llama::read(&mut keys, family)?),
        (None, gpt2::MODEL_TYPE) => Network::Gpt2(gpt2::read(&mut keys)?),
        (None, other) => {
            let mut known: Vec<&str> = llama::Family::ALL.map(|(name, _)| name).into();
            known.push(gpt2::MODEL_TYPE);
            let known = known.join(", ");
            return Err(ConfigError(format!("model_type is {other}: supported are {known}")));
        }
    };
    let ends = keys.tokens("eos_token_id")?;
    keys.causal()?;
    keys.finish()?;
    Ok(Described { network, model_type, ends })
}

impl Network {
    /// Builds the layers.
    ///
    /// # Errors
    /// A size is below 1 or too large, or sizes do not fit each other.
    pub fn build(&self) -> Result<Sequence, NetworkError> {
        match self {
            Self::Llama(model) => Ok(model.build()?),
            Self::Gpt2(model) => Ok(model.build()?),
        }
    }

    /// Size of the vocabulary.
    pub fn vocabulary(&self) -> i64 {
        match self {
            Self::Llama(model) => model.vocabulary,
            Self::Gpt2(model) => model.vocabulary,
        }
    }

    /// The number of positions that it was trained for.
    pub fn positions(&self) -> i64 {
        match self {
            Self::Llama(model) => model.rotary.positions,
            Self::Gpt2(model) => model.positions,
        }
    }

    /// Whether no position may follow [`Network::positions`]. Rotary positions have no last one.
    pub fn ends_with_positions(&self) -> bool {
        matches!(self, Self::Gpt2(_))
    }

    /// Whether logits share the token table.
    pub fn tied(&self) -> bool {
        match self {
            Self::Llama(model) => model.tied,
            Self::Gpt2(model) => model.tied,
        }
    }

    /// `name` without a prefix that a folder may leave out. [`names::Found::CopyOf`] has none.
    pub fn bare<'n>(&self, name: &'n str) -> &'n str {
        match self {
            Self::Llama(_) => name,
            Self::Gpt2(_) => gpt2::bare(name),
        }
    }

    /// How a folder names the parameter `name`.
    pub fn name_of(&self, name: &str) -> Name {
        match self {
            Self::Llama(_) => Name::same(name),
            Self::Gpt2(_) => gpt2::name_of(name),
        }
    }

    /// The parameter that a folder names `name`, or why a tensor of this name is left out.
    pub fn parameter_of(&self, name: &str) -> names::Found {
        match self {
            Self::Llama(model) => llama::parameter_of(name, model.tied),
            Self::Gpt2(model) => gpt2::parameter_of(name, model.tied),
        }
    }
}
