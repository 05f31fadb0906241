//! Text of which parts are learned, and its tokens.

use std::ops::Range;

use crate::{Result, Tokenizer};

/// A text, and the parts of it that are learned, in bytes. The parts ascend and do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// The text.
    pub text: String,
    /// Bytes that are learned.
    pub learned: Vec<Range<usize>>,
}

/// Tokens of a sample, and whether each of them is learned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// For each token, whether predicting it counts in the loss.
    pub learned: Vec<bool>,
}

impl Marked {
    /// A text, all of which is learned.
    #[must_use]
    pub fn all(text: String) -> Self {
        let learned = std::iter::once(0..text.len()).collect();
        Self { text, learned }
    }

    /// A prompt that is read, and a completion that is learned.
    #[must_use]
    pub fn completion(prompt: &str, completion: &str) -> Self {
        let text = prompt.to_owned() + completion;
        let learned = std::iter::once(prompt.len()..text.len()).collect();
        Self { text, learned }
    }

    /// The tokens. A token is learned if its first byte is. What the tokenizer adds at the end is
    /// learned if the end of the text is; what it adds elsewhere is not.
    ///
    /// `adds`: whether the tokenizer adds what its post-processor adds. A chat template has written
    /// that already.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn tokens(&self, tokenizer: &Tokenizer, adds: bool) -> Result<Sample> {
        let is_in = |at: usize| self.learned.iter().any(|part| part.contains(&at));
        let ends_learned = self.learned.last().is_some_and(|last| last.end == self.text.len());
        let mut sample = Sample::default();
        let mut seen = false;
        for (token, bytes) in tokenizer.encode_with_offsets(&self.text, adds)? {
            let is_learned = match bytes.is_empty() {
                false => is_in(bytes.start),
                true => seen && ends_learned && bytes.start == 0,
            };
            seen |= !bytes.is_empty();
            sample.tokens.push(token);
            sample.learned.push(is_learned);
        }
        Ok(sample)
    }
}
