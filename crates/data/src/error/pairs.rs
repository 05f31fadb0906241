//! Errors between pairs of sentences and mini-batches, with their remedies.

use crate::bounds::{BATCH_TOKENS_MAX, PAIR_TOKENS_MAX};

/// Maximum number of languages that an error names.
const NAMES_MAX: usize = 8;

/// Why pairs of sentences could not be encoded or put into mini-batches. Every message ends in a
/// remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// A tokenizer was not made for translation.
    #[error(
        "this tokenizer has no {missing}: it is of another model; name the one of a translation \
        model"
    )]
    OfAnotherModel {
        /// What the tokenizer lacks.
        missing: String,
    },

    /// The vocabulary has no tag for a language.
    #[error(
        "`{asked}` is none of the model's languages; name one of them, such as {}",
        list(.known)
    )]
    UnknownLanguage {
        /// The language requested.
        asked: String,
        /// The vocabulary's languages, most similar first.
        known: Vec<String>,
    },

    /// The sampling temperature is out of range.
    #[error("data.temperature = {temperature}: use 1 (as the data are) or more (more alike)")]
    Temperature {
        /// The temperature requested.
        temperature: f64,
    },

    /// The limit on a sentence's tokens is out of range.
    #[error("data.length = {tokens_max}: use 3 to {PAIR_TOKENS_MAX} tokens of a sentence")]
    TokensMax {
        /// The limit.
        tokens_max: usize,
    },

    /// A set has no pairs.
    #[error(
        "there are no pairs to {purpose}, and {left_out} were left out as too long; name more \
        text, or raise data.length"
    )]
    NoPairs {
        /// The purpose of the set: "train on" or "validate on".
        purpose: &'static str,
        /// Number of pairs that were too long.
        left_out: usize,
    },

    /// The mini-batches have too few target tokens.
    #[error(
        "data.batch_tokens = {target_tokens}: a target has {mean:.1} tokens on average, and a \
        mini-batch needs two; use at least {least}"
    )]
    FewTargetTokens {
        /// Target tokens per mini-batch.
        target_tokens: usize,
        /// Mean number of tokens per target of the mixture.
        mean: f64,
        /// The smallest allowed number of target tokens.
        least: usize,
    },

    /// A mini-batch is too large for memory.
    #[error(
        "a mini-batch of {rows} pairs of {source_length} and {target_length} tokens cannot be \
        made; lower data.batch_tokens or data.length, so that it has 1 to {BATCH_TOKENS_MAX} \
        tokens in all"
    )]
    BatchShape {
        /// Number of pairs.
        rows: usize,
        /// Tokens of the longest source.
        source_length: usize,
        /// Tokens of the longest target.
        target_length: usize,
    },

    /// A language's index is out of range.
    #[error(
        "there is no language {language} in a set of {languages} languages; ask for one from 0"
    )]
    NoSuchLanguage {
        /// The index.
        language: usize,
        /// Number of languages in the set.
        languages: usize,
    },

    /// Two sets have different vocabularies.
    #[error(
        "one set has a vocabulary of {first} tokens and the other one of {second}; encode both \
        with the same"
    )]
    Vocabularies {
        /// Vocabulary size of the first set.
        first: usize,
        /// Vocabulary size of the second set.
        second: usize,
    },
}

fn list(names: &[String]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_MAX).map(String::as_str).collect();
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} (and {more} more)", shown.join(", ")),
    }
}
