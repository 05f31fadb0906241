//! Text to tokens and back.
//!
//! A tokenizer that is learned here is byte-level BPE, and lossless. One of another program is what
//! its file says.
//!
//! - `alphabet`: the characters that stand for bytes;
//! - `words`: the pieces that merges never cross, with their counts;
//! - `specials`: tokens that stand for no text;
//! - `pieces`: long texts cut for encoding;
//! - `file`: reading a saved tokenizer;
//! - `general`: tokenizers of other programs;
//! - `stream`, `utf8`: text of tokens that arrive one by one.
//!
//! The `tokenizers` crate does the learning, encoding and decoding. What it learns depends only on
//! the words: 100 runs with one to eight threads produced the same bytes, even for words in which
//! most pairs are equally frequent. Here it starts no threads, because a system may refuse them.

mod alphabet;
mod file;
mod general;
mod pieces;
mod specials;
mod stream;
#[cfg(test)]
mod tests;
mod utf8;
mod words;

pub use crate::bounds::VOCABULARY_MAX;
use std::ops::Range;
use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainerBuilder, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::utils::parallelism::set_parallelism;
use tokenizers::{AddedToken, Model, NormalizerWrapper, TokenizerImpl};

use crate::corpus::read;
use crate::{Document, Error, Result};
use general::General;
pub use general::end_in_config;
pub use stream::TextStream;
pub use words::TRAINING_BYTES_MAX;

/// The text of the token that follows each document. It is only a name: the same characters in a
/// document are encoded as ordinary text.
pub const END_OF_DOCUMENT: &str = "<|end|>";

/// A token, and the bytes of the text that it encodes. `None`: a post-processor added it.
pub type PlacedToken = (u32, Option<Range<usize>>);

/// Minimum count of a pair to merge. A merge of a pair seen once would only memorize one place.
const PAIR_COUNT_MIN: u64 = 2;

/// Minimum vocabulary size: 256 bytes and the end of a document. Each further special token adds
/// one.
pub const VOCABULARY_MIN: usize = 257;

/// Maximum size of a tokenizer file. The largest vocabulary takes about a hundred bytes per token.
const JSON_BYTES_MAX: u64 = 256 << 20;
/// The file beside another program's tokenizer.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Its maximum size. It may contain a template for chats.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

type Inner = TokenizerImpl<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>;

/// A tokenizer.
///
/// One that is learned here is byte-level BPE. It encodes and decodes any UTF-8 text without loss,
/// whether or not the text occurred in training. One of another program, such as that of a Llama,
/// encodes as the `tokenizers` library does: it may add a token that begins a text, and what it
/// encodes may not decode to the same text.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    engine: Engine,
    vocabulary: usize,
    end_of_document: u32,
    /// Special tokens with their ids, sorted by id.
    specials: Vec<(String, u32)>,
}

/// What encodes and decodes.
#[derive(Debug, Clone)]
enum Engine {
    /// Learned here.
    Lossless(Box<Inner>),
    /// Of another program.
    General(Box<General>),
}

/// Which token of another program's tokenizer ends a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndToken<'a> {
    /// By its text.
    Text(&'a str),
    /// By its id.
    Id(u32),
}

impl Tokenizer {
    /// Learns a tokenizer of up to `vocabulary` tokens from documents. The same documents give the
    /// same tokenizer, byte for byte, on any machine.
    ///
    /// A corpus with few repeated pairs gives fewer tokens: see [`Tokenizer::vocabulary`]. From a
    /// corpus larger than [`TRAINING_BYTES_MAX`], an even sample of lines is used.
    ///
    /// # Errors
    /// Fails if `vocabulary` is not in [`VOCABULARY_MIN`]`..=`[`VOCABULARY_MAX`].
    pub fn train(documents: &[Document], vocabulary: usize) -> Result<Tokenizer> {
        Self::train_with(documents, vocabulary, &[])
    }

    /// As [`Tokenizer::train`], with further special tokens, which stand for no text, such as
    /// `<pad>`. They count towards `vocabulary` and take the ids from 1, after the end of a
    /// document. No text is ever encoded as one of them.
    ///
    /// # Errors
    /// Fails if a special token is not ASCII between `<` and `>` with a letter or digit, has more
    /// than 64 bytes, or occurs twice. Fails if `vocabulary` is too small for [`VOCABULARY_MIN`]
    /// and the special tokens, or more than [`VOCABULARY_MAX`].
    pub fn train_with(
        documents: &[Document],
        vocabulary: usize,
        specials: &[String],
    ) -> Result<Tokenizer> {
        let least = VOCABULARY_MIN.saturating_add(specials.len());
        if !(least..=VOCABULARY_MAX).contains(&vocabulary) {
            return Err(Error::Vocabulary { asked: vocabulary, least });
        }
        let end = std::iter::once(END_OF_DOCUMENT.to_owned());
        let specials: Vec<String> = end.chain(specials.iter().cloned()).collect();
        specials::check(&specials)
            .map_err(|(special, reason)| Error::SpecialToken { special, reason })?;
        let words = words::count(documents)?;
        Self::around(learned(&words, vocabulary, &specials)?, specials)
    }

    /// The sampling interval: [`Tokenizer::train`] learns from one in this many parts of the text.
    /// 1 means all of it.
    pub fn sampled_one_in(documents: &[Document]) -> usize {
        words::one_in(documents, TRAINING_BYTES_MAX)
    }

    /// Builds the `tokenizers` crate's tokenizer around a model whose vocabulary contains the
    /// special tokens.
    fn around(model: BPE, specials: Vec<String>) -> Result<Tokenizer> {
        let vocabulary = model.get_vocab_size();
        let end_of_document = model.token_to_id(END_OF_DOCUMENT).unwrap_or_default();
        let id = |text: String| model.token_to_id(&text).map(|id| (text, id));
        let mut specials: Vec<(String, u32)> = specials.into_iter().filter_map(id).collect();
        specials.sort_unstable_by_key(|(_, id)| *id);

        let bytes = ByteLevel::new(false, false, true); // No prefix space, no trimming, regex.
        let mut inner = Inner::new(model);
        inner.with_pre_tokenizer(Some(bytes));
        inner.with_decoder(Some(bytes));
        inner
            .add_special_tokens(specials.iter().map(|(text, _)| AddedToken::from(text, true)))
            .map_err(Error::tokenizer("add the special tokens"))?;
        // A document about tokenizers may contain "<|end|>", which is text there, not the end of
        // the document.
        inner.set_encode_special_tokens(true);
        let engine = Engine::Lossless(Box::new(inner));
        Ok(Tokenizer { engine, vocabulary, end_of_document, specials })
    }

    /// Reads a tokenizer that [`Tokenizer::save`] wrote, or a `tokenizer.json` of another program.
    /// For the latter, a `tokenizer_config.json` beside it may say which token ends a text.
    ///
    /// # Errors
    /// Fails if the file is missing or damaged, or if it does not say which token ends a document.
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let json = read::text_of_at_most(path, JSON_BYTES_MAX)?;
        let beside = path.with_file_name(TOKENIZER_CONFIG);
        let config = match beside.is_file() {
            true => Some(read::text_of_at_most(&beside, CONFIG_BYTES_MAX)?),
            false => None,
        };
        let refused = |reason| Error::TokenizerFile { path: path.to_path_buf(), reason };
        let end = config.as_deref().map(general::end_in_config).transpose().map_err(refused)?;
        let end = end.flatten();
        Self::from_json_with(&json, path, end.as_deref().map(EndToken::Text))
    }

    /// As [`Tokenizer::load`], from the JSON text that [`Tokenizer::to_json`] returns. `origin`
    /// names the source in errors.
    ///
    /// # Errors
    /// As for [`Tokenizer::load`].
    pub fn from_json(json: &str, origin: &Path) -> Result<Tokenizer> {
        Self::from_json_with(json, origin, None)
    }

    /// As [`Tokenizer::from_json`]. `end` is the token that ends a document, for a tokenizer of
    /// another program. Without it, a special token with a usual name does, such as `</s>`.
    ///
    /// # Errors
    /// As for [`Tokenizer::load`]; and if there is no such token.
    pub fn from_json_with(
        json: &str,
        origin: &Path,
        end: Option<EndToken<'_>>,
    ) -> Result<Tokenizer> {
        let refused = |reason| Error::TokenizerFile { path: origin.to_path_buf(), reason };
        let Some(saved) = file::parse(json).map_err(refused)? else {
            return Self::general(json, end).map_err(refused);
        };
        let file::Saved { tokens, merges, specials } = saved;
        let text = |id: u32| tokens.get(id as usize).cloned().unwrap_or_default();
        let merges = merges.iter().map(|&(a, b)| (text(a), text(b))).collect();
        let ids: Vocab = tokens.iter().cloned().zip(0..).collect();
        let model = BPE::builder()
            .vocab_and_merges(ids, merges)
            .build()
            .map_err(Error::tokenizer("build the tokenizer"))?;
        Self::around(model, specials)
    }

    fn general(json: &str, end: Option<EndToken<'_>>) -> std::result::Result<Tokenizer, String> {
        let (general, general::Facts { vocabulary, specials, end: usual }) = General::parse(json)?;
        let end_of_document = match end {
            Some(EndToken::Text(text)) => general
                .id(text)
                .ok_or_else(|| format!("it has no token {text}, which is said to end a text"))?,
            Some(EndToken::Id(id)) if (id as usize) < vocabulary => id,
            Some(EndToken::Id(id)) => {
                return Err(format!(
                    "token {id} is said to end a text, and it has {vocabulary} tokens"
                ));
            }
            None => usual.ok_or_else(|| {
                format!(
                    "it does not say which token ends a document: put a {TOKENIZER_CONFIG} beside \
                    it, with \"eos_token\""
                )
            })?,
        };
        let engine = Engine::General(Box::new(general));
        Ok(Tokenizer { engine, vocabulary, end_of_document, specials })
    }

    /// Writes the tokenizer as JSON in the format of the `tokenizers` library. The write is atomic:
    /// a temporary file is written next to the target and renamed.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let json = self.to_json()?;
        gpipe_files::write(path, json.as_bytes()).map_err(Error::io("write", path))
    }

    /// The tokenizer as JSON in the format of the `tokenizers` library. That of another program is
    /// the text that it was read from.
    ///
    /// # Errors
    /// Fails if the `tokenizers` library fails. No tokenizer is known to cause this.
    pub fn to_json(&self) -> Result<String> {
        match &self.engine {
            Engine::Lossless(inner) => {
                inner.to_string(false).map_err(Error::tokenizer("write the tokenizer as JSON"))
            }
            Engine::General(general) => Ok(general.json.clone()),
        }
    }

    /// Whether this is the tokenizer of another program.
    pub fn is_general(&self) -> bool {
        matches!(self.engine, Engine::General(_))
    }

    /// Encodes a text as tokens, without an end-of-document token. A tokenizer of another program
    /// adds what its post-processor adds.
    ///
    /// # Errors
    /// Fails if the `tokenizers` library fails. No text is known to cause this.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_pieces(text, pieces::PIECE_BYTES)
    }

    fn encode_pieces(&self, text: &str, piece_bytes: usize) -> Result<Vec<u32>> {
        let inner = match &self.engine {
            Engine::Lossless(inner) => inner,
            Engine::General(general) => return general.encode(text),
        };
        let mut tokens = Vec::new();
        for piece in pieces::pieces(text, piece_bytes) {
            let encoding =
                inner.encode_fast(piece, false).map_err(Error::tokenizer("encode a text"))?;
            tokens.extend_from_slice(encoding.get_ids());
        }
        Ok(tokens)
    }

    /// Encodes a text as tokens, each with the bytes of the text that it encodes.
    ///
    /// `adds`: whether the post-processor of a loaded tokenizer adds tokens.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_with_offsets(&self, text: &str, adds: bool) -> Result<Vec<PlacedToken>> {
        let inner = match &self.engine {
            Engine::Lossless(inner) => inner,
            Engine::General(general) => return general.encode_with_offsets(text, adds),
        };
        let (mut all, mut from) = (Vec::new(), 0);
        for piece in pieces::pieces(text, pieces::PIECE_BYTES) {
            let encoding = inner.encode(piece, false).map_err(Error::tokenizer("encode a text"))?;
            let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
            all.extend(
                tokens.map(|(token, (start, end))| (*token, Some(from + start..from + end))),
            );
            from += piece.len();
        }
        Ok(all)
    }

    /// Decodes tokens as text. Special tokens decode to their text, such as [`END_OF_DOCUMENT`].
    /// For a tokenizer learned here, the output of [`Tokenizer::encode`] decodes to the original
    /// text. Tokens cut within a
    /// character decode to U+FFFD there.
    ///
    /// # Errors
    /// Fails if a token is outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.decode_with(tokens, false)
    }

    /// As [`Tokenizer::decode`], but special tokens decode to nothing.
    ///
    /// # Errors
    /// Fails if a token is outside the vocabulary.
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        self.decode_with(tokens, true)
    }

    fn decode_with(&self, tokens: &[u32], leave_out_specials: bool) -> Result<String> {
        // The `tokenizers` crate silently skips unknown tokens.
        let unknown = |token: &&u32| **token as usize >= self.vocabulary;
        if let Some(&token) = tokens.iter().find(unknown) {
            return Err(Error::UnknownToken { token, vocabulary: self.vocabulary });
        }
        match &self.engine {
            Engine::Lossless(inner) => {
                inner.decode(tokens, leave_out_specials).map_err(Error::tokenizer("decode tokens"))
            }
            Engine::General(general) => general.decode(tokens, leave_out_specials),
        }
    }

    /// Begins a text whose tokens arrive one by one.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// The text of a token in the vocabulary.
    fn token_text(&self, token: u32) -> Result<String> {
        let unknown = Error::UnknownToken { token, vocabulary: self.vocabulary };
        let text = match &self.engine {
            Engine::Lossless(inner) => inner.id_to_token(token),
            Engine::General(general) => general.text(token),
        };
        text.ok_or(unknown)
    }

    /// The token that follows each document in a [`TokenSet`](crate::TokenSet).
    pub fn end_of_document(&self) -> u32 {
        self.end_of_document
    }

    /// The id of a special token, or `None` if this tokenizer has no such special token.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.iter().find_map(|(special, id)| (special == text).then_some(*id))
    }

    /// The special tokens by id: [`END_OF_DOCUMENT`] and those given to [`Tokenizer::train_with`],
    /// or those of another program's file.
    pub fn specials(&self) -> impl ExactSizeIterator<Item = &str> {
        self.specials.iter().map(|(special, _)| special.as_str())
    }

    /// Number of tokens, which is at most the number requested in training. All ids are smaller.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }
}

/// Learns up to `vocabulary` tokens from counted words, or fewer if the words run out of repeated
/// pairs. The first tokens are `specials`, which no word contains. The bytes follow, by character,
/// then the merges, by rank (Sennrich, Haddow, Birch: "Neural machine translation of rare words
/// with subword units", 2016, algorithm 1).
fn learned(words: &[(&str, u64)], vocabulary: usize, specials: &[String]) -> Result<BPE> {
    set_parallelism(false);
    let alphabet = alphabet::byte_chars();
    let spelt = |text: &str| -> String {
        text.bytes().filter_map(|byte| alphabet.get(usize::from(byte))).collect()
    };
    let counts = words.iter().map(|&(text, count)| (spelt(text).into(), count)).collect();
    let trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(vocabulary)
        .min_frequency(PAIR_COUNT_MIN)
        .special_tokens(specials.iter().map(|text| AddedToken::from(text, true)).collect())
        .initial_alphabet(alphabet.into_iter().collect())
        .build();
    let mut model = BPE::default();
    trainer.do_train(&counts, &mut model).map_err(Error::tokenizer("learn a vocabulary"))?;
    Ok(model)
}
