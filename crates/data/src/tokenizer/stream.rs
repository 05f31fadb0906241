//! Text of tokens that arrive one by one.

use super::{Engine, Tokenizer, alphabet, utf8::Utf8Stream};
use crate::Result;

/// Tokens that are held back at most, because they end inside a character.
const HELD_MAX: usize = 64;

/// Turns tokens into text as they arrive. It holds back what is not a whole character yet.
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    utf8: Utf8Stream,
    /// Tokens since the last flush. The first `shown` are already printed, and kept because how a
    /// token reads may depend on those before it.
    tokens: Vec<u32>,
    shown: usize,
}

impl<'t> TextStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, utf8: Utf8Stream::default(), tokens: Vec::new(), shown: 0 }
    }

    /// Begins after `tokens`, which are not part of the text.
    #[must_use]
    pub fn after(mut self, tokens: &[u32]) -> Self {
        if let Engine::General(_) = self.tokenizer.engine {
            let last = tokens.len().saturating_sub(HELD_MAX);
            self.tokens = tokens.get(last..).unwrap_or_default().to_vec();
            self.shown = self.tokens.len();
        }
        self
    }

    /// Adds a token, and returns the text that is whole now.
    ///
    /// # Errors
    /// The token is outside of the vocabulary. One beyond that of another program's tokenizer
    /// stands for no text.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if let Engine::Lossless(_) = self.tokenizer.engine {
            return Ok(self.utf8.push(&self.tokenizer.token_bytes(token)?));
        }
        // A model may have more rows than its tokenizer has tokens. They stand for no text.
        if token as usize >= self.tokenizer.vocabulary() {
            return Ok(String::new());
        }
        self.tokens.push(token);
        let (before, all) = self.texts()?;
        let is_whole = !all.ends_with(char::REPLACEMENT_CHARACTER);
        if !is_whole && self.tokens.len() - self.shown < HELD_MAX {
            return Ok(String::new());
        }
        let new = self.new_text(&before, &all)?;
        if !new.is_empty() {
            self.tokens.drain(..self.shown);
            self.shown = self.tokens.len();
        }
        Ok(new)
    }

    /// What `all` has beyond `before`.
    fn new_text(&self, before: &str, all: &str) -> Result<String> {
        match all.strip_prefix(before) {
            Some(new) => Ok(new.to_owned()),
            // An invalid byte changed how the tokens before it read: the new ones alone.
            None => {
                let new = self.tokens.get(self.shown..).unwrap_or_default();
                self.tokenizer.decode_text(new)
            }
        }
    }

    /// The text before the new tokens, and with them.
    fn texts(&self) -> Result<(String, String)> {
        let before = self.tokens.get(..self.shown).unwrap_or_default();
        Ok((self.tokenizer.decode_text(before)?, self.tokenizer.decode_text(&self.tokens)?))
    }

    /// The rest at the end of a text. An incomplete character is U+FFFD.
    ///
    /// # Errors
    /// As for [`TextStream::push`].
    pub fn rest(&mut self) -> Result<String> {
        if let Engine::Lossless(_) = self.tokenizer.engine {
            return Ok(std::mem::take(&mut self.utf8).finish());
        }
        let (before, all) = self.texts()?;
        let new = self.new_text(&before, &all)?;
        self.shown = self.tokens.len();
        Ok(new)
    }
}

impl Tokenizer {
    /// The bytes that a token stands for, which may be part of a character. The bytes of a special
    /// token are those of its name.
    ///
    /// # Errors
    /// Fails if the token is outside the vocabulary.
    pub fn token_bytes(&self, token: u32) -> Result<Vec<u8>> {
        let text = self.token_text(token)?;
        match self.engine {
            Engine::Lossless(_) => Ok(alphabet::bytes(&text)),
            Engine::General(_) => Ok(text.into_bytes()),
        }
    }
}
