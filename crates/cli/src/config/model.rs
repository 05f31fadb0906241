//! `[model]`: which network, by `kind`, and its sizes.

use serde::{Deserialize, Deserializer, Serialize, de::Error};

use super::kind::{KINDS_ARE, MODELS, with_kind};
use crate::values::{VariantName, as_text};

/// A network. Its other keys depend on `kind`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Model {
    Transformer(TransformerConfig),
    Translation(TranslationConfig),
    AmoebaNet(AmoebaNetConfig),
    ResNet(ResNetConfig),
}

/// The decoder transformer, for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TransformerConfig {
    pub vocabulary: usize,
    pub features: i64,
    pub heads: i64,
    pub hidden: i64,
    pub blocks: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    pub tied: bool,
    pub split_blocks: bool,
}

/// The encoder-decoder transformer, for parallel text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TranslationConfig {
    /// Tokens of all languages together.
    pub vocabulary: usize,
    pub features: i64,
    pub heads: i64,
    /// The attention is heads x head_size wide.
    pub head_size: i64,
    pub hidden: i64,
    pub encoder_layers: usize,
    pub decoder_layers: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    /// Logits are clipped to this magnitude; 0: they are not.
    pub logit_clip: f64,
    /// Whether the softmax is the target's embedding.
    pub tied: bool,
    /// Whether source and target have one embedding.
    pub shared: bool,
    pub split_blocks: bool,
}

/// For images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AmoebaNetConfig {
    #[serde(with = "as_text")]
    pub variant: VariantName,
    /// Normal cells.
    pub cells: usize,
    pub filters: i64,
    /// Of the last cell; less in those before it.
    pub drop_path: f64,
    /// How much the loss of the auxiliary head counts; 0: there is none.
    pub auxiliary: f64,
    /// 0: as many as the data have.
    pub classes: usize,
}

/// For images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ResNetConfig {
    /// Blocks of the four groups: [3, 4, 6, 3] is ResNet-50.
    pub blocks: [usize; 4],
    pub width: i64,
    /// 0: as many as the data have.
    pub classes: usize,
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (kind, rest) = with_kind(deserializer, "transformer")?;
        match kind.as_str() {
            "transformer" => rest.try_into().map(Self::Transformer),
            "translation" => rest.try_into().map(Self::Translation),
            "amoebanet" => rest.try_into().map(Self::AmoebaNet),
            "resnet" => rest.try_into().map(Self::ResNet),
            _ => {
                return Err(Error::custom(format!("'{kind}' {KINDS_ARE} {}", MODELS.join(", "))));
            }
        }
        .map_err(Error::custom)
    }
}

impl Default for Model {
    fn default() -> Self {
        Self::Transformer(TransformerConfig::default())
    }
}

impl Default for TransformerConfig {
    fn default() -> Self {
        Self {
            vocabulary: 4096,
            features: 256,
            heads: 4,
            hidden: 1024,
            blocks: 4,
            dropout: 0.0,
            attention_dropout: 0.0,
            tied: true,
            split_blocks: true,
        }
    }
}

impl Default for TranslationConfig {
    /// Small enough to learn on a laptop; two embeddings and a tied softmax as in the paper.
    fn default() -> Self {
        Self {
            vocabulary: 8192,
            features: 256,
            heads: 4,
            head_size: 64,
            hidden: 1024,
            encoder_layers: 3,
            decoder_layers: 3,
            dropout: 0.1,
            attention_dropout: 0.0,
            logit_clip: 0.0,
            tied: true,
            shared: false,
            split_blocks: true,
        }
    }
}

impl Default for AmoebaNetConfig {
    /// Small enough to learn on a laptop.
    fn default() -> Self {
        let (drop_path, auxiliary) = (0.0, 0.0);
        Self { variant: VariantName::D, cells: 6, filters: 64, drop_path, auxiliary, classes: 0 }
    }
}

impl Default for ResNetConfig {
    fn default() -> Self {
        Self { blocks: [3, 4, 6, 3], width: 64, classes: 0 }
    }
}
