//! GPipe's encoder-decoder transformer for translation as one sequence.
//!
//! The model is T(L, H, A) (Huang et al. 2019, section 5; Vaswani et al. 2017) with pre-LN (Xiong
//! et al. 2020). Layers pass tuples of several dtypes, so the sequence may be cut anywhere:
//!
//! ```text
//! (source [N, S], target [N, T])                    int64
//!   source_embedding
//! (states [N, S, D], mask [N, S], target [N, T])    float, bool (true: not padding), int64
//!   encoder.0.attention, encoder.0.mlp, ...         or encoder.0.block, ...
//!   target_embedding                                normalises the encoder's states (now memory)
//! (states [N, T, D], memory [N, S, D], mask [N, S])
//!   decoder.0.self_attention, decoder.0.cross_attention, decoder.0.mlp, ...
//!                                                   or decoder.0.block, ...
//!   softmax
//! logits [N, T, vocabulary]
//! ```
//!
//! Each layer works on the first value, and reads or passes on the others. The decoder's input is a
//! begin token followed by the sentence. The loss's targets are the sentence followed by an end
//! token, and padding is ignored. Both sentences are padded at their end.
//!
//! Three measures keep deep models stable, as in the paper:
//!
//! - In a stack with B residual branches (two per encoder layer, three per decoder layer), the
//!   output projections start 1 / sqrt(B) times as large as other weights. All branches together
//!   thus add as much as one would. The paper scales only the feed-forward layers, by the number of
//!   layers (after Zhang et al. 2019).
//! - Logits are clipped (`logit_clip`).
//! - The loss may smooth labels ([`gpipe::CrossEntropy`]).

use gpipe::{
    Sequence,
    layers::{
        Attention, Block, CrossAttention, DecoderBlock, Gelu, Head, Mlp, SourceEmbedding,
        TargetEmbedding, TokenEmbedding,
    },
};

/// Maximum number of layers in a stack.
const LAYERS_MAX: usize = 4096;
/// Maximum size. Products of two sizes stay far from overflow.
const SIZE_MAX: i64 = 1 << 24;

/// The model's sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Translation {
    /// Size of the source vocabulary. Tokens are 0 .. source_vocabulary.
    pub source_vocabulary: i64,
    /// Size of the target vocabulary. Tokens are 0 .. target_vocabulary.
    pub target_vocabulary: i64,
    /// The padding token, in both vocabularies.
    pub pad: i64,
    /// Model width (D), even. 1024 in the paper.
    pub features: i64,
    /// Number of attention heads (A).
    pub heads: i64,
    /// Size of a head. The attention's width is `heads * head_size`, which may differ from the
    /// model's. 64 in the paper.
    pub head_size: i64,
    /// Width of the feed-forward layers (H).
    pub hidden: i64,
    /// Number of encoder layers (L).
    pub encoder_layers: usize,
    /// Number of decoder layers. Also L in the paper.
    pub decoder_layers: usize,
    /// Dropout of embeddings and of each branch's output.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Bound on the magnitude of logits, beyond which they have no gradient. 0 disables clipping.
    pub logit_clip: f64,
    /// Whether the output projection shares the target embedding's weight (Press & Wolf 2017), as
    /// in the paper.
    pub tied: bool,
    /// Whether the source embedding shares the target embedding's weight, which requires equal
    /// vocabularies. Not so in the paper.
    pub shared: bool,
    /// Whether attention and feed-forward are separate layers for the partitioner instead of one.
    pub split_blocks: bool,
}

/// A translation model's sizes are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("translation: {0}")]
pub struct TranslationError(String);

impl Translation {
    /// Builds the layers.
    ///
    /// # Errors
    /// Fails if a size is below 1 or far too large, if the number of features is odd, if `pad` is
    /// not a token, if shared vocabularies differ in size, if a dropout is not a probability, or if
    /// the clip is below 0.
    pub fn build(&self) -> Result<Sequence, TranslationError> {
        self.check()?;
        let table = (self.tied || self.shared).then(|| "target tokens".to_owned());
        let source = self.tokens(self.source_vocabulary, table.clone().filter(|_| self.shared));
        let target = self.tokens(self.target_vocabulary, table.clone());
        let mut sequence = Sequence::new()
            .push("source_embedding", SourceEmbedding { tokens: source, pad: self.pad });
        for layer in 0..self.encoder_layers {
            let (attention, mlp) = self.branches(false, 2 * self.encoder_layers);
            let name = |part: &str| format!("encoder.{layer}.{part}");
            sequence = match self.split_blocks {
                true => sequence.push(name("attention"), attention).push(name("mlp"), mlp),
                false => sequence.push(name("block"), Block { attention, mlp }),
            };
        }
        sequence = sequence.push("target_embedding", TargetEmbedding { tokens: target });
        for layer in 0..self.decoder_layers {
            let (self_attention, mlp) = self.branches(true, 3 * self.decoder_layers);
            let cross_attention = attending_memory(self_attention);
            let name = |part: &str| format!("decoder.{layer}.{part}");
            sequence = match self.split_blocks {
                true => sequence
                    .push(name("self_attention"), self_attention)
                    .push(name("cross_attention"), cross_attention)
                    .push(name("mlp"), mlp),
                false => {
                    let block = DecoderBlock { self_attention, cross_attention, mlp };
                    sequence.push(name("block"), block)
                }
            };
        }
        let head = Head {
            features: self.features,
            vocabulary: self.target_vocabulary,
            std: size(self.features).powf(-0.5),
            logit_clip: self.logit_clip,
            tie: table.filter(|_| self.tied),
        };
        Ok(sequence.push("softmax", head))
    }

    fn tokens(&self, vocabulary: i64, tie: Option<String>) -> TokenEmbedding {
        TokenEmbedding { vocabulary, features: self.features, dropout: self.dropout, tie }
    }

    /// Self-attention and feed-forward for a stack with `branches` residual branches. A weight's
    /// initial variance is one over the number of its inputs, which preserves the variance of
    /// activations.
    fn branches(&self, causal: bool, branches: usize) -> (Attention, Mlp) {
        let output_std = |inputs: i64| (size(inputs) * branches as f64).powf(-0.5);
        let (features, dropout) = (self.features, self.dropout);
        let std = size(features).powf(-0.5);
        let attention = Attention {
            features,
            heads: self.heads,
            head_size: self.head_size,
            causal,
            attention_dropout: self.attention_dropout,
            dropout,
            std,
            output_std: output_std(self.heads * self.head_size),
        };
        let output_std = output_std(self.hidden);
        let gelu = Gelu::Exact;
        (attention, Mlp { features, hidden: self.hidden, dropout, std, output_std, gelu })
    }

    fn check(&self) -> Result<(), TranslationError> {
        let refuse = |reason| Err(TranslationError(reason));
        let sizes = [
            ("source_vocabulary", self.source_vocabulary),
            ("target_vocabulary", self.target_vocabulary),
            ("features", self.features),
            ("heads", self.heads),
            ("head_size", self.head_size),
            ("hidden", self.hidden),
        ];
        if let Some((name, size)) = sizes.iter().find(|(_, size)| !(1..=SIZE_MAX).contains(size)) {
            return refuse(format!("{name} is {size}: use 1 to {SIZE_MAX}"));
        }
        let layers =
            [("encoder_layers", self.encoder_layers), ("decoder_layers", self.decoder_layers)];
        if let Some((name, count)) = layers.iter().find(|(_, n)| !(1..=LAYERS_MAX).contains(n)) {
            return refuse(format!("{name} is {count}: use 1 to {LAYERS_MAX}"));
        }
        let Self { features, heads, head_size, pad, source_vocabulary, target_vocabulary, .. } =
            *self;
        if heads * head_size > SIZE_MAX {
            return refuse(format!("{heads} heads of size {head_size}: use at most {SIZE_MAX}"));
        }
        if features % 2 != 0 {
            return refuse(format!("features is {features}: positions need an even number"));
        }
        if !(0..source_vocabulary.min(target_vocabulary)).contains(&pad) {
            return refuse(format!(
                "pad is {pad}: it must be a token of both vocabularies, of {source_vocabulary} \
                and {target_vocabulary}"
            ));
        }
        if self.shared && source_vocabulary != target_vocabulary {
            return refuse(format!(
                "vocabularies of {source_vocabulary} and {target_vocabulary} cannot share an \
                embedding: use one vocabulary, or shared = false"
            ));
        }
        let dropouts = [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)];
        if let Some((name, p)) = dropouts.iter().find(|(_, p)| !(0.0..=1.0).contains(p)) {
            return refuse(format!("{name} is {p}: it is a probability, from 0 to 1"));
        }
        let clip = self.logit_clip;
        if !(clip.is_finite() && clip >= 0.0) {
            return refuse(format!("logit_clip is {clip}: use a number above 0, or 0 for none"));
        }
        Ok(())
    }
}

/// Cross-attention with the sizes of `own`.
fn attending_memory(own: Attention) -> CrossAttention {
    let Attention { features, heads, head_size, attention_dropout, dropout, .. } = own;
    let Attention { std, output_std, .. } = own;
    CrossAttention { features, heads, head_size, attention_dropout, dropout, std, output_std }
}

fn size(size: i64) -> f64 {
    size as f64
}
