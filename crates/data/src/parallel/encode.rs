//! Pairs of sentences as tokens.

use serde::{Deserialize, Serialize};

use super::{Language, Pair, PairError, ParallelCorpus, TranslationVocabulary};
use crate::Result;
pub use crate::bounds::PAIR_TOKENS_MAX;
use crate::permutation::Permutation;
use gpipe_core::splitmix;

/// Minimum number of tokens in a source: tag, one token, end.
pub const PAIR_TOKENS_MIN: usize = 3;

/// Stream number that separates shuffled sources from other uses of the seed.
const SOURCES_STREAM: u64 = 5;

/// A side of a corpus's split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Training pairs.
    Train,
    /// Validation pairs.
    Validation,
}

impl Side {
    fn pairs(self, language: &Language) -> &[Pair] {
        match self {
            Self::Train => &language.train,
            Self::Validation => &language.validation,
        }
    }
}

/// Pairs of all languages as tokens. Languages are indexed in the order of the corpus, and so are
/// the pairs of each language.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairSet {
    languages: Vec<Encoded>,
    vocabulary: usize,
    pad: u32,
    begin: u32,
}

/// The encoded pairs of one language.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Encoded {
    code: String,
    sources: Sentences,
    targets: Sentences,
    left_out: usize,
}

/// Concatenated sentences.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Sentences {
    tokens: Vec<u32>,
    /// Where each sentence ends.
    ends: Vec<usize>,
}

impl PairSet {
    /// Encodes one side of a corpus. A source is its language's tag, its tokens and the end. A
    /// target is its tokens and the end. Pairs whose source or target is longer than `tokens_max`
    /// are left out and counted.
    ///
    /// # Errors
    /// Fails if a language is not in the vocabulary, if `tokens_max` is not 3 to
    /// [`PAIR_TOKENS_MAX`], or as [`Tokenizer::encode`](crate::Tokenizer::encode) does.
    pub fn encode(
        vocabulary: &TranslationVocabulary,
        corpus: &ParallelCorpus,
        side: Side,
        tokens_max: usize,
    ) -> Result<PairSet> {
        if !(PAIR_TOKENS_MIN..=PAIR_TOKENS_MAX).contains(&tokens_max) {
            return Err(PairError::TokensMax { tokens_max }.into());
        }
        let encode = |language: &Language| -> Result<Encoded> {
            vocabulary.tag(&language.code)?;
            let mut encoded = Encoded::new(&language.code);
            for pair in side.pairs(language) {
                let source = vocabulary.encode_source(&language.code, &pair.source)?;
                let target = vocabulary.encode_target(&pair.target)?;
                if source.len().max(target.len()) <= tokens_max {
                    encoded.sources.push(&source);
                    encoded.targets.push(&target);
                } else {
                    encoded.left_out += 1;
                }
            }
            Ok(encoded)
        };
        let languages = corpus.languages.iter().map(encode).collect::<Result<_>>()?;
        let (pad, begin) = (vocabulary.pad(), vocabulary.begin());
        Ok(Self { languages, vocabulary: vocabulary.tokenizer().vocabulary(), pad, begin })
    }

    /// Returns the same set with the sources shuffled: each target gets the source of another pair
    /// of its language. A model's loss on this set shows whether the model reads the source. A
    /// language's only pair stays as it is.
    ///
    /// The pairs of a language form a circle in an order that depends on the seed. Each pair takes
    /// its neighbour's source, so none keeps its original source.
    #[must_use]
    pub fn with_shuffled_sources(&self, seed: u64) -> PairSet {
        let mut shuffled = self.clone();
        for (language, encoded) in shuffled.languages.iter_mut().enumerate() {
            let pairs = encoded.targets.len();
            let key = splitmix::key(&[seed, SOURCES_STREAM, language as u64]);
            let circle = Permutation::new(pairs as u64, key);
            let at = |place: usize| circle.at(place as u64) as usize;
            let mut neighbours = vec![0; pairs];
            for place in 0..pairs {
                if let Some(neighbour) = neighbours.get_mut(at(place)) {
                    *neighbour = at((place + 1) % pairs);
                }
            }
            let mut sources = Sentences::default();
            neighbours.into_iter().for_each(|of| sources.push(self.source(language, of)));
            encoded.sources = sources;
        }
        shuffled
    }

    /// The language codes, by index.
    pub fn languages(&self) -> impl ExactSizeIterator<Item = &str> {
        self.languages.iter().map(|language| language.code.as_str())
    }

    /// Number of pairs of a language. 0 if the language does not exist.
    pub fn pairs(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.targets.len())
    }

    /// Number of pairs of all languages.
    pub fn len(&self) -> usize {
        self.languages.iter().map(|language| language.targets.len()).sum()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of pairs of a language that were too long.
    pub fn left_out(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.left_out)
    }

    /// Number of tokens in the sources of a language.
    pub fn source_tokens(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.sources.tokens.len())
    }

    /// Number of tokens in the targets of a language, over which its mean loss is taken.
    pub fn target_tokens(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.targets.tokens.len())
    }

    /// The source of a pair: tag, tokens, end. Empty if the pair does not exist.
    pub fn source(&self, language: usize, pair: usize) -> &[u32] {
        self.languages.get(language).map_or(&[], |language| language.sources.get(pair))
    }

    /// The target of a pair: tokens, end. Empty if the pair does not exist.
    pub fn target(&self, language: usize, pair: usize) -> &[u32] {
        self.languages.get(language).map_or(&[], |language| language.targets.get(pair))
    }

    /// Size of the vocabulary. All tokens are smaller.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The padding token.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The first input token of a decoder.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The error for a set without pairs.
    pub(super) fn no_pairs(&self, purpose: &'static str) -> PairError {
        let left_out = self.languages.iter().map(|language| language.left_out).sum();
        PairError::NoPairs { purpose, left_out }
    }

    /// All targets of a language, concatenated.
    pub(super) fn targets(&self, language: usize) -> &[u32] {
        self.languages.get(language).map_or(&[], |language| &language.targets.tokens)
    }
}

impl Encoded {
    fn new(code: &str) -> Self {
        let (sources, targets) = (Sentences::default(), Sentences::default());
        Self { code: code.to_owned(), sources, targets, left_out: 0 }
    }
}

impl Sentences {
    fn push(&mut self, sentence: &[u32]) {
        self.tokens.extend_from_slice(sentence);
        self.ends.push(self.tokens.len());
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, sentence: usize) -> &[u32] {
        let end = self.ends.get(sentence).copied().unwrap_or_default();
        let before = sentence.checked_sub(1).and_then(|before| self.ends.get(before));
        self.tokens.get(before.copied().unwrap_or_default()..end).unwrap_or_default()
    }
}
