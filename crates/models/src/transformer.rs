//! A decoder-only transformer language model (Radford et al. 2019): pre-LN, learned positions,
//! GELU.

use gpipe::{
    Sequence,
    layers::{Attention, Block, Embedding, Head, Mlp},
};

pub use gpipe::layers::Gelu;

/// Standard deviation of initial weights (Radford et al. 2019).
const STD: f64 = 0.02;
/// Maximum number of layers.
const LAYERS_MAX: usize = 4096;
/// Maximum size. Products of two sizes stay far from overflow.
const SIZE_MAX: i64 = 1 << 24;

/// The model's sizes. Inputs are int64 tokens [samples, positions]. Outputs are logits [..,
/// vocabulary].
#[derive(Debug, Clone, PartialEq)]
pub struct Transformer {
    /// Size of the vocabulary. Tokens are 0 .. vocabulary.
    pub vocabulary: i64,
    /// Maximum number of positions per sample.
    pub positions: i64,
    /// Model width (d_model).
    pub features: i64,
    /// Number of attention heads, a divisor of `features`.
    pub heads: i64,
    /// Width of the feed-forward layer.
    pub hidden: i64,
    /// Number of transformer blocks.
    pub blocks: usize,
    /// Dropout of embeddings and of the outputs of attention and feed-forward.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Whether the output projection shares the token embedding's weight (Press & Wolf 2017).
    pub tied: bool,
    /// Whether attention and feed-forward are two layers for the partitioner instead of one.
    pub split_blocks: bool,
    /// The activation of the feed-forward layers.
    pub gelu: Gelu,
}

/// A transformer's sizes are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("transformer: {0}")]
pub struct TransformerError(String);

impl Transformer {
    /// Builds the layers: `embedding`; `0.attention`, `0.mlp`, ... (or `0.block`, ...); `head`.
    ///
    /// # Errors
    /// Fails if a size is below 1, the heads do not divide the features, or a dropout is not a
    /// probability.
    pub fn build(&self) -> Result<Sequence, TransformerError> {
        self.check()?;
        let tie = self.tied.then(|| "tokens".to_owned());
        // Each block adds twice to the residual stream. This scale keeps its variance (Radford et
        // al. 2019, 2.3).
        let output_std = STD / (2.0 * self.blocks as f64).sqrt();
        let attention = Attention {
            features: self.features,
            heads: self.heads,
            head_size: self.features / self.heads,
            causal: true,
            attention_dropout: self.attention_dropout,
            dropout: self.dropout,
            std: STD,
            output_std,
        };
        let mlp = Mlp {
            features: self.features,
            hidden: self.hidden,
            dropout: self.dropout,
            std: STD,
            output_std,
            gelu: self.gelu,
        };
        let embedding = Embedding {
            vocabulary: self.vocabulary,
            features: self.features,
            positions: self.positions,
            std: STD,
            dropout: self.dropout,
            tie: tie.clone(),
        };
        let mut sequence = Sequence::new().push("embedding", embedding);
        for block in 0..self.blocks {
            sequence = if self.split_blocks {
                sequence
                    .push(format!("{block}.attention"), attention)
                    .push(format!("{block}.mlp"), mlp)
            } else {
                sequence.push(format!("{block}.block"), Block { attention, mlp })
            };
        }
        let (features, vocabulary) = (self.features, self.vocabulary);
        let logit_clip = 0.0;
        Ok(sequence.push("head", Head { features, vocabulary, std: STD, logit_clip, tie }))
    }

    fn check(&self) -> Result<(), TransformerError> {
        let refuse = |reason| Err(TransformerError(reason));
        let sizes = [
            ("vocabulary", self.vocabulary),
            ("positions", self.positions),
            ("features", self.features),
            ("heads", self.heads),
            ("hidden", self.hidden),
            ("blocks", i64::try_from(self.blocks).unwrap_or(i64::MAX)),
        ];
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size < 1) {
            return refuse(format!("{name} = {size}: use at least 1"));
        }
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size > SIZE_MAX) {
            return refuse(format!("{name} = {size}: use at most {SIZE_MAX}"));
        }
        if self.blocks > LAYERS_MAX {
            return refuse(format!("blocks = {}: use at most {LAYERS_MAX}", self.blocks));
        }
        if self.features % self.heads != 0 {
            return refuse(format!(
                "features = {} is no multiple of heads = {}: change one of them",
                self.features, self.heads
            ));
        }
        let dropouts = [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)];
        if let Some((name, p)) = dropouts.iter().find(|(_, p)| !(0.0..=1.0).contains(p)) {
            return refuse(format!("{name} = {p}: use a probability, from 0 to 1"));
        }
        Ok(())
    }
}
