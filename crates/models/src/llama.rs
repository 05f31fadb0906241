//! Llama and the models built like it: Mistral, Qwen 2.5, Qwen 3, SmolLM, Mixtral, Qwen3-MoE.
//!
//! Layers and parameters have the names of Hugging Face's transformers.

use gpipe::{
    Sequence,
    layers::{
        ExpertMlp, ExpertNames, FeedForward, GatedMlp, GroupedAttention, LlamaBlock, RmsNorm,
        Rotary, TokenLogits, TokenTable,
    },
};

/// Maximum number of blocks.
pub const BLOCKS_MAX: usize = 4096;
/// Maximum number of experts in all blocks together.
const EXPERTS_MAX: i64 = 1 << 17;
/// Maximum size. Products of two sizes stay far from overflow.
const SIZE_MAX: i64 = 1 << 24;

/// The model's sizes. Inputs are int64 tokens [samples, positions]. Outputs are logits [samples,
/// positions, vocabulary].
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// Size of the vocabulary. Tokens are 0 .. vocabulary.
    pub vocabulary: i64,
    /// Model width.
    pub features: i64,
    /// Width of the feed-forward layer.
    pub hidden: i64,
    /// For each block, the number of positions that a position sees; `None`: all earlier ones.
    pub windows: Vec<Option<i64>>,
    /// Number of heads of queries.
    pub heads: i64,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub groups: i64,
    /// Size of a head.
    pub head_size: i64,
    /// Rotary positions.
    pub rotary: Rotary,
    /// The `eps` of all norms.
    pub eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward layer has biases.
    pub mlp_bias: bool,
    /// Whether each head of queries and keys has an RMSNorm (Qwen 3).
    pub head_norms: bool,
    /// A mixture of experts in some blocks.
    pub experts: Option<Experts>,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Whether the logits share the token table (Press & Wolf 2017).
    pub tied: bool,
    /// A token whose vector gets no gradient from its lookups, such as one of padding.
    pub padding: Option<i64>,
    /// Standard deviation of the initial weights.
    pub std: f64,
}

/// A mixture of experts (Mixtral, Qwen3-MoE).
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub experts: i64,
    /// Number of experts that a token goes through.
    pub top_k: i64,
    /// Width of an expert.
    pub hidden: i64,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalise: bool,
    /// Weight of [`BalancedExperts`](gpipe::BalancedExperts). 0: the model has no second output.
    pub balance: f64,
    /// Names of the parameters.
    pub names: ExpertNames,
    /// For each block, whether it has them.
    pub blocks: Vec<bool>,
}

/// A model's sizes are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("llama: {0}")]
pub struct LlamaError(String);

impl Llama {
    /// Builds the layers: `model.embed_tokens`; `model.layers.0`, ...; `model.norm`; `lm_head`.
    ///
    /// # Errors
    /// A size is below 1 or too large. What a layer refuses, it refuses when a pipeline is built.
    pub fn build(&self) -> Result<Sequence, LlamaError> {
        self.check()?;
        let tie = self.tied.then(|| "tokens".to_owned());
        let (vocabulary, features, std, eps) = (self.vocabulary, self.features, self.std, self.eps);
        let table =
            TokenTable { vocabulary, features, std, tie: tie.clone(), padding: self.padding };
        let mut sequence = Sequence::new().push("model.embed_tokens", table);
        let dense = GatedMlp { features, hidden: self.hidden, bias: self.mlp_bias, std };
        for (number, &window) in self.windows.iter().enumerate() {
            let attention = GroupedAttention {
                features,
                heads: self.heads,
                groups: self.groups,
                head_size: self.head_size,
                qkv_bias: self.qkv_bias,
                output_bias: self.output_bias,
                norm: self.head_norms.then_some(eps),
                window,
                rotary: self.rotary,
                dropout: self.attention_dropout,
                std,
            };
            let own = self.experts.as_ref();
            let own = own.filter(|own| own.blocks.get(number).copied().unwrap_or(false));
            let mlp = match own {
                None => FeedForward::Dense(dense),
                Some(own) => FeedForward::Experts(ExpertMlp {
                    features,
                    hidden: own.hidden,
                    experts: own.experts,
                    top_k: own.top_k,
                    normalise: own.normalise,
                    balance: own.balance > 0.0,
                    names: own.names,
                    std,
                }),
            };
            let block = LlamaBlock { attention, mlp, eps };
            sequence = sequence.push(format!("model.layers.{number}"), block);
        }
        let logits = TokenLogits { vocabulary, features, std, tie };
        Ok(sequence.push("model.norm", RmsNorm { features, eps }).push("lm_head", logits))
    }

    fn check(&self) -> Result<(), LlamaError> {
        let refuse = |reason| Err(LlamaError(reason));
        let sizes = [
            ("vocabulary", self.vocabulary),
            ("features", self.features),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("groups", self.groups),
            ("head_size", self.head_size),
        ];
        let experts = self
            .experts
            .as_ref()
            .map(|own| [("experts", own.experts), ("hidden of experts", own.hidden)]);
        let sizes: Vec<_> = sizes.into_iter().chain(experts.into_iter().flatten()).collect();
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size < 1) {
            return refuse(format!("{name} = {size}: use at least 1"));
        }
        if let Some(own) = &self.experts
            && own.blocks.len() != self.windows.len()
        {
            let (blocks, all) = (own.blocks.len(), self.windows.len());
            return refuse(format!("experts are said of {blocks} blocks, and there are {all}"));
        }
        if let Some(own) = &self.experts {
            let blocks = own.blocks.iter().filter(|is_sparse| **is_sparse).count() as i64;
            if own.experts.saturating_mul(blocks) > EXPERTS_MAX {
                return refuse(format!(
                    "{} experts in {blocks} blocks: use at most {EXPERTS_MAX} in all",
                    own.experts
                ));
            }
        }
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size > SIZE_MAX) {
            return refuse(format!("{name} = {size}: use at most {SIZE_MAX}"));
        }
        match self.windows.len() {
            0 => refuse("no blocks: use at least 1".into()),
            blocks if blocks > BLOCKS_MAX => {
                refuse(format!("{blocks} blocks: use at most {BLOCKS_MAX}"))
            }
            _ => Ok(()),
        }
    }
}
