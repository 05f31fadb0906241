//! Documents as one sequence of tokens.

use std::f64::consts::LN_2;

use gpipe_core::splitmix::{self, Stream};
use serde::{Deserialize, Serialize};

use crate::{Document, Result, Tokenizer};

/// Stream number that separates the order of documents from other uses of the seed.
const DOCUMENTS_STREAM: u64 = 3;

/// Brings documents into an order that depends on the seed. Sorting by name puts documents of one
/// folder side by side. Shuffling keeps them from sharing most of their windows.
///
/// The order is the same in all epochs, and uniform (a Fisher-Yates shuffle).
pub fn shuffle(documents: &mut [&Document], seed: u64) {
    let mut stream = Stream::new(splitmix::key(&[seed, DOCUMENTS_STREAM]));
    for last in (1..documents.len()).rev() {
        documents.swap(last, stream.below(last + 1));
    }
}

/// Documents encoded and joined, each followed by the end-of-document token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSet {
    /// All tokens in the order of the documents.
    pub tokens: Vec<u32>,
    /// Bytes of UTF-8 that the tokens stand for. Ends of documents count as 0 bytes.
    pub bytes: u64,
}

impl TokenSet {
    /// Encodes documents in their order.
    ///
    /// # Errors
    /// Fails as [`Tokenizer::encode`] does.
    pub fn encode(tokenizer: &Tokenizer, documents: &[Document]) -> Result<TokenSet> {
        Self::encode_each(tokenizer, &documents.iter().collect::<Vec<_>>(), |_| ())
    }

    /// Encodes documents in their order. After each, `told` gets the number of bytes so far.
    ///
    /// # Errors
    /// Fails as [`Tokenizer::encode`] does.
    pub fn encode_each(
        tokenizer: &Tokenizer,
        documents: &[&Document],
        mut told: impl FnMut(u64),
    ) -> Result<TokenSet> {
        let mut set = TokenSet { tokens: Vec::new(), bytes: 0 };
        for document in documents {
            set.tokens.extend(tokenizer.encode(&document.text)?);
            // The post-processor of another program's tokenizer may have added it.
            if set.tokens.last() != Some(&tokenizer.end_of_document()) || document.text.is_empty() {
                set.tokens.push(tokenizer.end_of_document());
            }
            set.bytes += document.text.len() as u64;
            told(set.bytes);
        }
        Ok(set)
    }

    /// Converts a loss in nats per token to bits per byte of text, which compares models with
    /// different tokenizers: `nats_per_token * tokens / (ln 2 * bytes)`.
    ///
    /// With the mean over all targets of [`ValidationBatches`](crate::ValidationBatches), the
    /// result is the loss of the whole set, except for its first token, which nothing predicts.
    /// With the mean over a part, it is an estimate, because the part's tokens may be longer or
    /// shorter than the set's.
    ///
    /// Returns NaN or infinity if the set has no bytes.
    pub fn bits_per_byte(&self, nats_per_token: f64) -> f64 {
        nats_per_token * self.tokens.len() as f64 / (LN_2 * self.bytes as f64)
    }
}
