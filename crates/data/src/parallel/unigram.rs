//! The unigram baseline: a model that knows only the frequency of each token.

use super::{PairError, PairSet};
use crate::Result;

/// A unigram model's loss on the targets of held-out pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct Unigram {
    /// The loss of each language, by index.
    pub languages: Vec<LanguageEntropy>,
}

/// The loss on one language's targets.
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageEntropy {
    /// The language's code.
    pub code: String,
    /// Number of tokens in the language's targets, ends included.
    pub target_tokens: usize,
    /// Mean loss in nats per target token. `None` if there are no targets.
    pub nats: Option<f64>,
}

impl LanguageEntropy {
    /// The perplexity: the number of equally likely tokens that would be as hard to guess.
    pub fn perplexity(&self) -> Option<f64> {
        self.nats.map(f64::exp)
    }
}

/// Fits a unigram model to all training targets and measures it on validation targets.
///
/// One model serves all languages, because all targets are English. Ends of sentences count as
/// tokens, as they do for a decoder. Each token's count is increased by one, so that no token is
/// impossible. With `pairs_max`, the model is measured on the first `pairs_max` pairs of each
/// language, as in [`ValidationPairs`](super::ValidationPairs).
///
/// # Errors
/// Fails if a set has no pairs, or if the vocabularies have different sizes.
pub fn unigram(train: &PairSet, validation: &PairSet, pairs_max: Option<usize>) -> Result<Unigram> {
    let (first, second) = (train.vocabulary(), validation.vocabulary());
    if first != second {
        return Err(PairError::Vocabularies { first, second }.into());
    }
    if train.is_empty() {
        return Err(train.no_pairs("train on").into());
    }
    if validation.is_empty() {
        return Err(validation.no_pairs("validate on").into());
    }
    let mut counts = vec![1u64; first];
    for token in (0..train.languages().len()).flat_map(|language| train.targets(language)) {
        if let Some(count) = counts.get_mut(*token as usize) {
            *count += 1;
        }
    }
    let all = counts.iter().sum::<u64>() as f64;
    let nats = |token: &u32| {
        let count = counts.get(*token as usize).copied().unwrap_or(1);
        (all / count as f64).ln()
    };
    let entropy = |(language, code): (usize, &str)| {
        let pairs = validation.pairs(language).min(pairs_max.unwrap_or(usize::MAX));
        let targets = (0..pairs).flat_map(|pair| validation.target(language, pair));
        let (sum, count) =
            targets.fold((0.0, 0_usize), |(sum, count), token| (sum + nats(token), count + 1));
        let nats = (count > 0).then(|| sum / count as f64);
        LanguageEntropy { code: code.to_owned(), target_tokens: count, nats }
    };
    Ok(Unigram { languages: validation.languages().enumerate().map(entropy).collect() })
}
