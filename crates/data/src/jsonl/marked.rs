//! A text with its loss mask, and its tokens.

use std::ops::Range;

use crate::{Result, Tokenizer};

/// A text with its loss mask, as ranges of bytes. The ranges ascend and do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// The text.
    pub text: String,
    /// Byte ranges of the text that are in the loss.
    pub learned: Vec<Range<usize>>,
}

/// The tokens of a sample with their loss mask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The loss mask, one value per token: whether the token is a target.
    pub learned: Vec<bool>,
}

impl Marked {
    /// A text, all of which is in the loss.
    #[must_use]
    pub fn all(text: String) -> Self {
        let learned = std::iter::once(0..text.len()).collect();
        Self { text, learned }
    }

    /// A prompt followed by a completion. Only the completion is in the loss.
    #[must_use]
    pub fn completion(prompt: &str, completion: &str) -> Self {
        let text = prompt.to_owned() + completion;
        let learned = std::iter::once(prompt.len()..text.len()).collect();
        Self { text, learned }
    }

    /// Encodes the text. A token is in the loss if its first byte is.
    ///
    /// `adds`: whether the tokenizer's post-processor adds tokens. Use `false` for a text rendered
    /// by a chat template, which has written them already. A token added at the end is in the loss
    /// if the end of the text is. Tokens added elsewhere are not.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn tokens(&self, tokenizer: &Tokenizer, adds: bool) -> Result<Sample> {
        let ends_learned = self.learned.last().is_some_and(|last| last.end == self.text.len());
        let mut sample = Sample::default();
        let mut seen = false;
        for (token, bytes) in tokenizer.encode_with_offsets(&self.text, adds)? {
            let is_learned = match bytes {
                Some(bytes) => {
                    seen = true;
                    let at = self.learned.partition_point(|range| range.end <= bytes.start);
                    let is_in = self.learned.get(at).is_some_and(|own| own.start <= bytes.start);
                    is_in || ends_learned && bytes.start == self.text.len()
                }
                None => seen && ends_learned,
            };
            sample.tokens.push(token);
            sample.learned.push(is_learned);
        }
        Ok(sample)
    }
}
