//! One vocabulary for all languages.
//!
//! The vocabulary is byte-level, so it covers every script. It is learned from a mixture in which
//! small languages have more weight than their size (see `mixture`). The mixture consists of pairs,
//! so half of it is English, as is half of what a translation model reads and writes.
//!
//! ```text
//!   id 0 <|end|>   of language models, unused here
//!      1 <pad>     fills rows of a mini-batch
//!      2 <s>       what a decoder is given first
//!      3 </s>      ends a source and a target
//!      4 <cs> ...  the language of a source, its first token
//! ```

use std::collections::BTreeMap;

use super::mixture::Mixture;
use super::{Language, PairError, ParallelCorpus};
use crate::{Document, END_OF_DOCUMENT, Error, Result, TRAINING_BYTES_MAX, Tokenizer};

/// The special token for padding.
pub const PAD: &str = "<pad>";

/// The special token at the start of a decoder's input.
pub const BEGIN: &str = "<s>";

/// The special token at the end of a sentence.
pub const END: &str = "</s>";

/// Options of [`TranslationVocabulary::train`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VocabularyOptions {
    /// Maximum number of tokens, including special tokens.
    pub tokens: usize,
    /// Temperature T of the mixture of languages. 1 keeps the data's proportions; a higher value
    /// favours small languages.
    pub temperature: f64,
    /// Approximate number of bytes of text to learn from, at most [`TRAINING_BYTES_MAX`].
    pub text_bytes: u64,
    /// Determines which pairs are sampled, if not all are.
    pub seed: u64,
}

impl Default for VocabularyOptions {
    /// 16,000 tokens, temperature 5, [`TRAINING_BYTES_MAX`] bytes of text, seed 0.
    fn default() -> Self {
        Self { tokens: 16_000, temperature: 5.0, text_bytes: TRAINING_BYTES_MAX, seed: 0 }
    }
}

/// A tokenizer with the special tokens of translation.
#[derive(Debug, Clone)]
pub struct TranslationVocabulary {
    tokenizer: Tokenizer,
    pad: u32,
    begin: u32,
    end: u32,
    /// The tag of each language.
    tags: BTreeMap<String, u32>,
}

impl TranslationVocabulary {
    /// Learns a vocabulary from a corpus's training pairs. The result depends only on the corpus
    /// and the options.
    ///
    /// # Errors
    /// Fails if there are no pairs, if an option is out of range, or if two special tokens,
    /// language tags included, have the same name.
    pub fn train(corpus: &ParallelCorpus, options: &VocabularyOptions) -> Result<Self> {
        let tags = corpus.languages.iter().map(|language| tag(&language.code));
        let specials: Vec<String> =
            [PAD, BEGIN, END].map(String::from).into_iter().chain(tags).collect();
        let documents = sample(corpus, options)?;
        Self::from_tokenizer(Tokenizer::train_with(&documents, options.tokens, &specials)?)
    }

    /// The vocabulary of a tokenizer that [`TranslationVocabulary::train`] made.
    ///
    /// # Errors
    /// Fails if the tokenizer lacks a special token or has no language tag, as a language model's
    /// tokenizer does.
    pub fn from_tokenizer(tokenizer: Tokenizer) -> Result<Self> {
        let special = |text: &str| {
            let missing = || PairError::OfAnotherModel { missing: format!("`{text}`") };
            tokenizer.special(text).ok_or_else(missing)
        };
        let (pad, begin, end) = (special(PAD)?, special(BEGIN)?, special(END)?);
        let others = [END_OF_DOCUMENT, PAD, BEGIN, END];
        let tags: BTreeMap<String, u32> = tokenizer
            .specials()
            .filter(|special| !others.contains(special))
            .filter_map(|special| {
                Some((language(special)?.to_owned(), tokenizer.special(special)?))
            })
            .collect();
        if tags.is_empty() {
            let missing = "tag of a language (`<de>`)".to_owned();
            return Err(PairError::OfAnotherModel { missing }.into());
        }
        Ok(Self { tokenizer, pad, begin, end, tags })
    }

    /// The tokenizer, to save it or to count its tokens.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The padding token.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The token at the start of a decoder's input.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The token at the end of a sentence.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The languages of sources, sorted by code.
    pub fn languages(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tags.keys().map(String::as_str)
    }

    /// The tag of a language.
    ///
    /// # Errors
    /// Fails if the language is not in the vocabulary. The error names the known languages, most
    /// similar first.
    pub fn tag(&self, language: &str) -> Result<u32> {
        self.tags.get(language).copied().ok_or_else(|| {
            let mut known: Vec<String> = self.tags.keys().cloned().collect();
            let likeness = |code: &str| strsim::jaro_winkler(code, language);
            known.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
            PairError::UnknownLanguage { asked: language.to_owned(), known }.into()
        })
    }

    /// The encoder's input for a sentence: the language's tag, its tokens, the end.
    ///
    /// # Errors
    /// Fails if the language is not in the vocabulary, or as [`Tokenizer::encode`] does.
    pub fn encode_source(&self, language: &str, text: &str) -> Result<Vec<u32>> {
        let mut tokens = vec![self.tag(language)?];
        tokens.extend(self.encode_target(text)?);
        Ok(tokens)
    }

    /// The decoder's expected output for a sentence: its tokens, the end. The decoder's input is
    /// the same sequence shifted by one, after [`TranslationVocabulary::begin`].
    ///
    /// # Errors
    /// Fails as [`Tokenizer::encode`] does.
    pub fn encode_target(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = self.tokenizer.encode(text)?;
        tokens.push(self.end);
        Ok(tokens)
    }

    /// The text of tokens up to the first end, without special tokens. The tokens may be a source,
    /// a target or a decoder's output.
    ///
    /// # Errors
    /// Fails if a token is outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let sentence = tokens.split(|token| *token == self.end).next();
        self.tokenizer.decode_text(sentence.unwrap_or_default())
    }
}

/// The tag of a language, as text.
fn tag(language: &str) -> String {
    format!("<{language}>")
}

/// The language of a tag, as text.
fn language(tag: &str) -> Option<&str> {
    tag.strip_prefix('<')?.strip_suffix('>')
}

/// Samples about `text_bytes` bytes of pairs from the temperature's mixture, but no more pairs than
/// it takes to visit each once. Each language becomes two documents: its sentences and their
/// translations.
fn sample(corpus: &ParallelCorpus, options: &VocabularyOptions) -> Result<Vec<Document>> {
    let languages: Vec<(&str, usize)> = corpus
        .languages
        .iter()
        .map(|language| (language.code.as_str(), language.train.len()))
        .collect();
    if languages.iter().all(|(_, pairs)| *pairs == 0) {
        let no_pairs = PairError::NoPairs { purpose: "learn a vocabulary from", left_out: 0 };
        return Err(Error::from(no_pairs));
    }
    let mixture = Mixture::new(&languages, options.temperature, options.seed)?;
    let bytes_of_a_pair: f64 = mixture
        .shares()
        .zip(&corpus.languages)
        .map(|(share, language)| {
            let bytes: usize =
                language.train.iter().map(|pair| pair.source.len() + pair.target.len() + 2).sum();
            share * bytes as f64 / language.train.len().max(1) as f64
        })
        .sum();
    // Stay slightly below the limit, because a tokenizer halves a text that exceeds it.
    let bytes = options.text_bytes.min(TRAINING_BYTES_MAX - TRAINING_BYTES_MAX / 32);
    let once = mixture
        .shares()
        .zip(&languages)
        .map(|(share, (_, pairs))| *pairs as f64 / share.max(f64::MIN_POSITIVE));
    let drawn =
        (bytes as f64 / bytes_of_a_pair.max(1.0)).min(once.fold(0.0, f64::max)).ceil() as u128;

    let mut documents: Vec<Document> = corpus
        .languages
        .iter()
        .flat_map(|Language { code, .. }| [code.clone(), format!("{code} in English")])
        .map(|name| Document { name, text: String::new() })
        .collect();
    for (language, index) in mixture.draw(0..drawn) {
        let pair = corpus.languages.get(language).and_then(|language| language.train.get(index));
        let sides = pair.into_iter().flat_map(|pair| [&pair.source, &pair.target]);
        for (document, side) in documents.iter_mut().skip(2 * language).zip(sides) {
            document.text.push_str(side);
            document.text.push('\n');
        }
    }
    Ok(documents)
}
