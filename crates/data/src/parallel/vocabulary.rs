//! One vocabulary for all languages.
//!
//! Byte-level, so that no script is left out; learned from a mixture in which the small languages
//! count for more than their size (see `mixture`). The mixture is of pairs: half of it is English,
//! as half of what a model of translations reads and writes is.
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

/// The special token that fills rows.
pub const PAD: &str = "<pad>";

/// The special token that a decoder is given before a sentence.
pub const BEGIN: &str = "<s>";

/// The special token behind a sentence.
pub const END: &str = "</s>";

/// How [`TranslationVocabulary::train`] learns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VocabularyOptions {
    /// Tokens at most, special ones included.
    pub tokens: usize,
    /// T of the mixture of languages: 1 takes them as they are, more helps the small ones.
    pub temperature: f64,
    /// About how many bytes of text to learn from, at most [`TRAINING_BYTES_MAX`].
    pub text_bytes: u64,
    /// Chooses the pairs, where not all are taken.
    pub seed: u64,
}

impl Default for VocabularyOptions {
    /// 16,000 tokens, temperature 5, as much text as a tokenizer learns from, seed 0.
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
    /// Learns a vocabulary from a corpus's training pairs: a function of the corpus and the
    /// options.
    ///
    /// # Errors
    /// There are no pairs; an option is out of range; two languages, or one and another special
    /// token, have one name.
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
    /// It lacks a special token, or has no tag of a language: it is a language model's, say.
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

    /// The token that fills rows.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The token that a decoder is given before a sentence.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The token behind a sentence.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The languages that sources may be in, sorted by code.
    pub fn languages(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tags.keys().map(String::as_str)
    }

    /// The tag of a language.
    ///
    /// # Errors
    /// The language is none of the vocabulary's; the error names those, the most alike first.
    pub fn tag(&self, language: &str) -> Result<u32> {
        self.tags.get(language).copied().ok_or_else(|| {
            let mut known: Vec<String> = self.tags.keys().cloned().collect();
            let likeness = |code: &str| strsim::jaro_winkler(code, language);
            known.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
            PairError::UnknownLanguage { asked: language.to_owned(), known }.into()
        })
    }

    /// What an encoder reads of a sentence: the language's tag, its tokens, the end.
    ///
    /// # Errors
    /// The language is none of the vocabulary's, or as [`Tokenizer::encode`].
    pub fn encode_source(&self, language: &str, text: &str) -> Result<Vec<u32>> {
        let mut tokens = vec![self.tag(language)?];
        tokens.extend(self.encode_target(text)?);
        Ok(tokens)
    }

    /// What a decoder is to write of a sentence: its tokens, the end. It reads the same one token
    /// later, behind [`TranslationVocabulary::begin`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_target(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = self.tokenizer.encode(text)?;
        tokens.push(self.end);
        Ok(tokens)
    }

    /// The text of tokens up to the first end, without special tokens: of a source, a target or
    /// what a decoder wrote.
    ///
    /// # Errors
    /// A token is outside of the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let sentence = tokens.split(|token| *token == self.end).next();
        self.tokenizer.decode_text(sentence.unwrap_or_default())
    }
}

/// The special token of a language.
fn tag(language: &str) -> String {
    format!("<{language}>")
}

/// The language of a special token.
fn language(tag: &str) -> Option<&str> {
    tag.strip_prefix('<')?.strip_suffix('>')
}

/// Pairs of the temperature's mixture, about `text_bytes` of them, and no more than it takes to
/// read each once: two documents for each language, its sentences and their translations.
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
    // A little less than the limit, for a tokenizer halves what is above it.
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
