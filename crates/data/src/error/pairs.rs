//! What can go wrong between pairs of sentences and mini-batches, and what to do about it.

use crate::bounds::{BATCH_TOKENS_MAX, PAIR_TOKENS_MAX};

/// No error names more languages than this.
const NAMES_MAX: usize = 8;

/// Why pairs of sentences could not be encoded or put into mini-batches. Every message ends in a
/// remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// A tokenizer that was not made for translation.
    #[error(
        "this tokenizer has no {missing}: it is of another model; name the one of a translation \
        model"
    )]
    OfAnotherModel {
        /// What it lacks.
        missing: String,
    },

    /// A language that the vocabulary has no tag for.
    #[error("`{asked}` is none of the model's languages; name one of them, such as {}", list(.known))]
    UnknownLanguage {
        /// The language asked for.
        asked: String,
        /// The vocabulary's languages, the most alike first.
        known: Vec<String>,
    },

    /// A share that cannot be.
    #[error(
        "a temperature of {temperature} is out of range; use 1 (as the data are) or more (more \
        alike)"
    )]
    Temperature {
        /// The temperature asked for.
        temperature: f64,
    },

    /// A limit that lets no pair through, or too much.
    #[error(
        "a limit of {tokens_max} tokens for a sentence is out of range; use 3 to {PAIR_TOKENS_MAX}"
    )]
    TokensMax {
        /// The limit.
        tokens_max: usize,
    },

    /// A set without pairs.
    #[error(
        "there are no pairs to {purpose}, and {left_out} were left out as too long; name a corpus \
        that has some, or \
         raise the limit on tokens"
    )]
    NoPairs {
        /// What they are for: "train on", "validate on".
        purpose: &'static str,
        /// Pairs that were too long.
        left_out: usize,
    },

    /// Mini-batches of too few target tokens.
    #[error(
        "mini-batches of {target_tokens} target tokens are too small: a target has {mean:.1} on \
        average, and a \
         mini-batch needs two; use at least {least}"
    )]
    FewTargetTokens {
        /// Target tokens of a mini-batch.
        target_tokens: usize,
        /// Those of a mean target of the mixture.
        mean: f64,
        /// The fewest.
        least: usize,
    },

    /// Mini-batches that would not fit in memory beside everything else.
    #[error(
        "a mini-batch of {rows} pairs of {source_length} and {target_length} tokens is out of \
        range; use fewer target \
         tokens, or a lower limit for a sentence, so that it has 1 to {BATCH_TOKENS_MAX} tokens \
         in all"
    )]
    BatchShape {
        /// Pairs.
        rows: usize,
        /// Tokens of the longest source.
        source_length: usize,
        /// Tokens of the longest target.
        target_length: usize,
    },

    /// A language's number that the set does not have.
    #[error(
        "there is no language {language} in a set of {languages} languages; ask for one from 0"
    )]
    NoSuchLanguage {
        /// The number.
        language: usize,
        /// How many there are.
        languages: usize,
    },

    /// Two sets of different vocabularies.
    #[error(
        "one set has a vocabulary of {first} tokens and the other one of {second}; encode both \
        with the same"
    )]
    Vocabularies {
        /// Tokens of the first set's.
        first: usize,
        /// Tokens of the second set's.
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
