//! Documents as one sequence of tokens.

use std::f64::consts::LN_2;

use crate::{Document, Result, Tokenizer};

/// Documents encoded and joined, each followed by the end-of-document token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet {
    /// All tokens in the order of the documents.
    pub tokens: Vec<u32>,
    /// Bytes of UTF-8 that the tokens stand for. Ends of documents stand for none.
    pub bytes: u64,
}

impl TokenSet {
    /// Encodes documents in their order.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode(tokenizer: &Tokenizer, documents: &[Document]) -> Result<TokenSet> {
        let mut set = TokenSet { tokens: Vec::new(), bytes: 0 };
        for document in documents {
            set.tokens.extend(tokenizer.encode(&document.text)?);
            set.tokens.push(tokenizer.end_of_document());
            set.bytes += document.text.len() as u64;
        }
        Ok(set)
    }

    /// A loss in nats per token as bits per byte of text, which compares models with different tokenizers:
    /// `nats_per_token * tokens / (ln 2 * bytes)`.
    ///
    /// With the mean over all targets of [`ValidationBatches`](crate::ValidationBatches) this is the loss of the whole
    /// set, up to its first token, which nothing predicts. With the mean over a part it is an estimate: the part's
    /// tokens may be longer or shorter than the set's.
    ///
    /// Not a number where the set has no bytes.
    pub fn bits_per_byte(&self, nats_per_token: f64) -> f64 {
        nats_per_token * self.tokens.len() as f64 / (LN_2 * self.bytes as f64)
    }
}
