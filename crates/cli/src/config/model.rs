//! `[model]`: the network, by `kind`, and its sizes.

use gpipe_models::huggingface::Described;
use serde::{Deserialize, Deserializer, Serialize, de::Error};

use super::kind::{KINDS_ARE, MODELS, with_kind};
use crate::{
    model_folder::described,
    values::{GeluChoice, VariantName, as_text},
};

/// The network. The other keys of the table depend on `kind`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Model {
    /// Decoder-only transformer, for text.
    Transformer(TransformerConfig),
    /// Decoder-only transformer built like Llama, for text.
    Llama(LlamaConfig),
    /// A model that Hugging Face's transformers describes, for text.
    HuggingFace(HuggingFaceConfig),
    /// Encoder-decoder transformer, for parallel text.
    Translation(TranslationConfig),
    /// AmoebaNet, for images.
    AmoebaNet(AmoebaNetConfig),
    /// ResNet, for images.
    ResNet(ResNetConfig),
}

/// The decoder-only transformer, for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TransformerConfig {
    /// Number of tokens that a new tokenizer learns at most. The model has as many as its
    /// tokenizer.
    pub vocabulary: usize,
    /// Width of the model (d_model).
    pub features: i64,
    /// Number of attention heads. It must divide `features`.
    pub heads: i64,
    /// Width of the feed-forward layers.
    pub hidden: i64,
    /// Number of transformer blocks.
    pub blocks: usize,
    /// Dropout probability of the embeddings and of the outputs of attention and feed-forward.
    pub dropout: f64,
    /// Dropout probability of the attention weights.
    pub attention_dropout: f64,
    /// Whether the output projection shares the token embedding (Press & Wolf 2017).
    pub tied: bool,
    /// Whether the partitioner may cut a block between attention and feed-forward.
    pub split_blocks: bool,
    /// Form of the activation: `exact`, or `tanh`, the approximation that GPT-2 has.
    #[serde(with = "as_text")]
    pub gelu: GeluChoice,
}

/// The decoder-only transformer built like Llama, for text: RMSNorm, rotary positions, grouped
/// queries, SwiGLU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LlamaConfig {
    /// Number of tokens that a new tokenizer learns at most. The model has as many as its
    /// tokenizer.
    pub vocabulary: usize,
    /// Width of the model (d_model).
    pub features: i64,
    /// Number of heads of queries.
    pub heads: i64,
    /// Number of heads of keys and values. It must divide `heads`.
    pub groups: i64,
    /// Size of a head. It must be even.
    pub head_size: i64,
    /// Width of the feed-forward layers.
    pub hidden: i64,
    /// Number of blocks.
    pub blocks: usize,
    /// Base of the rotary positions' angles.
    pub theta: f64,
    /// Number of positions that a position sees: its own and those before it. 0: all before it.
    pub window: i64,
    /// Whether each head of queries and keys is normalised, as in Qwen 3.
    pub head_norms: bool,
    /// Whether queries, keys and values have a bias, as in Qwen 2.5.
    pub qkv_bias: bool,
    /// Number that the norms add to the mean of the squares.
    pub eps: f64,
    /// Dropout probability of the attention weights.
    pub attention_dropout: f64,
    /// Whether the logits share the token table (Press & Wolf 2017).
    pub tied: bool,
}

/// A model that Hugging Face's transformers describes, for text. `--from FOLDER` chooses it.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HuggingFaceConfig {
    /// The text of the model's `config.json`. A key that is not supported is refused by name.
    pub config: String,
}

impl HuggingFaceConfig {
    /// What the text describes. The sizes fit each other.
    pub(crate) fn described(&self) -> Result<Described, String> {
        described(&self.config)
    }
}

/// The encoder-decoder transformer, for parallel text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TranslationConfig {
    /// Number of tokens that a new tokenizer learns at most, for all languages together. The model
    /// has as many as its tokenizer.
    pub vocabulary: usize,
    /// Width of the model (d_model). It must be even.
    pub features: i64,
    /// Number of attention heads.
    pub heads: i64,
    /// Width of one attention head. The attention is `heads` x `head_size` wide.
    pub head_size: i64,
    /// Width of the feed-forward layers.
    pub hidden: i64,
    /// Number of encoder layers.
    pub encoder_layers: usize,
    /// Number of decoder layers.
    pub decoder_layers: usize,
    /// Dropout probability of the embeddings and of each branch's output.
    pub dropout: f64,
    /// Dropout probability of the attention weights.
    pub attention_dropout: f64,
    /// Magnitude that logits are clipped to. 0 turns clipping off.
    pub logit_clip: f64,
    /// Whether the output projection shares the target's embedding (Press & Wolf 2017).
    pub tied: bool,
    /// Whether the source shares the target's embedding.
    pub shared: bool,
    /// Whether the partitioner may cut a layer between attention and feed-forward.
    pub split_blocks: bool,
}

/// AmoebaNet, for images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AmoebaNetConfig {
    /// Which AmoebaNet to build: `D` or `B`.
    #[serde(with = "as_text")]
    pub variant: VariantName,
    /// Number of normal cells. It must be a multiple of 3.
    pub cells: usize,
    /// Number of filters of the first normal cells. It must be a multiple of 4.
    pub filters: i64,
    /// Probability that training drops a path of the last cell. Earlier cells drop less.
    pub drop_path: f64,
    /// Weight of the auxiliary head's loss. 0 builds the network without the head.
    pub auxiliary: f64,
    /// Number of classes. 0 takes the number from the data.
    pub classes: usize,
}

/// ResNet, for images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ResNetConfig {
    /// Number of bottleneck blocks in each of the four groups. `[3, 4, 6, 3]` is ResNet-50, `[3, 4,
    /// 23, 3]` is ResNet-101.
    pub blocks: [usize; 4],
    /// Number of channels after the stem and inside the first bottleneck blocks.
    pub width: i64,
    /// Number of classes. 0 takes the number from the data.
    pub classes: usize,
}

impl Model {
    /// The tokens that end a text, as far as the model's description names them.
    pub(super) fn ends(&self) -> Vec<u32> {
        match self {
            Self::HuggingFace(model) => model.described().map(|own| own.ends).unwrap_or_default(),
            _ => Vec::new(),
        }
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (kind, rest) = with_kind(deserializer, "transformer")?;
        match kind.as_str() {
            "transformer" => rest.try_into().map(Self::Transformer),
            "llama" => rest.try_into().map(Self::Llama),
            "huggingface" => rest.try_into().map(Self::HuggingFace),
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
            gelu: GeluChoice::Exact,
        }
    }
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            vocabulary: 4096,
            features: 256,
            heads: 8,
            groups: 4,
            head_size: 32,
            hidden: 704,
            blocks: 4,
            theta: 10_000.0,
            window: 0,
            head_norms: false,
            qkv_bias: false,
            eps: 1e-6,
            attention_dropout: 0.0,
            tied: true,
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
