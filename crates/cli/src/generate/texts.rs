//! Texts while they are continued.

use gpipe_data::{TextStream, Tokenizer};

use super::{
    sampling::{self, Sampling},
    settings::Settings,
    stops::Stops,
};
use crate::CliError;

/// Why a text has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// At a token that ends texts.
    Token,
    /// Before a string that ends it.
    String,
    /// After the number of tokens that was asked for.
    Length,
}

/// A text: its prompt and what was made of it.
pub(super) struct Text<'t> {
    pub prompt: String,
    /// Tokens of the prompt, then new ones.
    pub tokens: Vec<u32>,
    /// The new text, without what is held back.
    pub made: String,
    pub end: Option<End>,
    /// The text's number among those of the command.
    number: u64,
    prompt_tokens: usize,
    stream: TextStream<'t>,
    stops: Stops,
}

impl<'t> Text<'t> {
    pub fn new(
        number: usize,
        prompt: String,
        tokenizer: &'t Tokenizer,
        settings: &Settings,
    ) -> Result<Self, CliError> {
        let mut tokens = tokenizer.encode(&prompt)?;
        if tokens.is_empty() {
            tokens.push(tokenizer.end_of_document()); // a document begins after the end of another
        }
        Ok(Self::after(tokens, (number, prompt), tokenizer, settings))
    }

    /// The answer to a `conversation`, rendered by a chat template. The tokenizer adds no tokens.
    pub fn answer(
        number: usize,
        conversation: String,
        tokenizer: &'t Tokenizer,
        settings: &Settings,
    ) -> Result<Self, CliError> {
        let tokens = tokenizer.encode_with_offsets(&conversation, false)?;
        let tokens = tokens.into_iter().map(|(token, _)| token).collect();
        Ok(Self::after(tokens, (number, conversation), tokenizer, settings))
    }

    fn after(
        tokens: Vec<u32>,
        (number, prompt): (usize, String),
        tokenizer: &'t Tokenizer,
        settings: &Settings,
    ) -> Self {
        Self {
            number: number as u64,
            prompt_tokens: tokens.len(),
            stream: tokenizer.stream().after(&tokens),
            stops: Stops::new(&settings.stops),
            made: String::new(),
            end: None,
            prompt,
            tokens,
        }
    }

    /// The tokens that were added.
    pub fn new_tokens(&self) -> &[u32] {
        self.tokens.get(self.prompt_tokens..).unwrap_or_default()
    }

    /// Chooses the next token. Returns the text that is whole now.
    pub fn go_on(
        &mut self,
        logits: &mut [f32],
        settings: &Settings,
        seed: u64,
    ) -> Result<String, CliError> {
        let Settings { sampling, tokens, ends, .. } = settings;
        let token = self.choose(logits, sampling, seed)?;
        if ends.contains(&token) {
            return self.finish(End::Token);
        }
        self.tokens.push(token);
        let piece = self.stream.push(token)?;
        let (piece, is_stopped) = self.stops.push(&piece);
        self.made.push_str(&piece);
        if is_stopped {
            self.end = Some(End::String);
            return Ok(piece);
        }
        match self.new_tokens().len() >= *tokens {
            false => Ok(piece),
            true => Ok(piece + &self.finish(End::Length)?),
        }
    }

    fn choose(&self, logits: &mut [f32], sampling: &Sampling, seed: u64) -> Result<u32, CliError> {
        sampling.penalise(logits, &self.tokens);
        let position = self.tokens.len() as u64;
        let uniform = sampling::uniform(seed, self.number, position);
        Ok(u32::try_from(sampling.sample(logits, uniform)?).unwrap_or(u32::MAX))
    }

    /// Ends the text. Returns what was held back.
    fn finish(&mut self, end: End) -> Result<String, CliError> {
        self.end = Some(end);
        let rest = self.stream.rest()?;
        let (mut piece, is_stopped) = self.stops.push(&rest);
        match is_stopped {
            true => self.end = Some(End::String),
            false => piece.push_str(&std::mem::take(&mut self.stops).finish()),
        }
        self.made.push_str(&piece);
        Ok(piece)
    }
}
