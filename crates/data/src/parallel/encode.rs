//! Pairs of sentences as tokens.

use super::{Language, Pair, PairError, ParallelCorpus, TranslationVocabulary};
use crate::Result;
pub use crate::bounds::PAIR_TOKENS_MAX;
use crate::permutation::Permutation;
use gpipe_core::splitmix;

/// The fewest tokens of a source: tag, one token, end.
const PAIR_TOKENS_MIN: usize = 3;

/// What the seed's use for shuffled sources is told apart by.
const SOURCES_STREAM: u64 = 5;

/// A side of a corpus's split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// To learn from.
    Train,
    /// Held out.
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

/// Pairs of all languages as tokens. Languages have numbers, in the order of the corpus; their
/// pairs, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairSet {
    languages: Vec<Encoded>,
    vocabulary: usize,
    pad: u32,
    begin: u32,
}

/// The pairs of a language.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Encoded {
    code: String,
    sources: Sentences,
    targets: Sentences,
    left_out: usize,
}

/// Sentences behind each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Sentences {
    tokens: Vec<u32>,
    /// Where each sentence ends.
    ends: Vec<usize>,
}

impl PairSet {
    /// Encodes one side of a corpus. A source is its language's tag, its tokens and the end; a
    /// target its tokens and the end. Pairs with more than `tokens_max` of these in a source or
    /// target are left out and counted.
    ///
    /// # Errors
    /// A language is none of the vocabulary's; `tokens_max` is not 3 to [`PAIR_TOKENS_MAX`]; as
    /// [`Tokenizer::encode`](crate::Tokenizer::encode).
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

    /// The same set, where each target has the source of another pair of its language: what a model
    /// makes of it shows whether it reads the source. A language's only pair stays as it is.
    ///
    /// The pairs of a language are put in a circle, in an order of the seed, and each takes its
    /// neighbour's source: so none keeps its own.
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

    /// The languages' codes, by number.
    pub fn languages(&self) -> impl ExactSizeIterator<Item = &str> {
        self.languages.iter().map(|language| language.code.as_str())
    }

    /// How many pairs a language has; 0 for a number without a language.
    pub fn pairs(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.targets.len())
    }

    /// How many pairs there are.
    pub fn len(&self) -> usize {
        self.languages.iter().map(|language| language.targets.len()).sum()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many pairs of a language were too long.
    pub fn left_out(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.left_out)
    }

    /// How many tokens the sources of a language have.
    pub fn source_tokens(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.sources.tokens.len())
    }

    /// How many tokens the targets of a language have: what its loss is a mean over.
    pub fn target_tokens(&self, language: usize) -> usize {
        self.languages.get(language).map_or(0, |language| language.targets.tokens.len())
    }

    /// The source of a pair: tag, tokens, end. Nothing where there is no such pair.
    pub fn source(&self, language: usize, pair: usize) -> &[u32] {
        self.languages.get(language).map_or(&[], |language| language.sources.get(pair))
    }

    /// The target of a pair: tokens, end. Nothing where there is no such pair.
    pub fn target(&self, language: usize, pair: usize) -> &[u32] {
        self.languages.get(language).map_or(&[], |language| language.targets.get(pair))
    }

    /// Size of the vocabulary: all tokens are less.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The token that fills rows.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The token that a decoder is given first.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The error of a set without pairs for a purpose.
    pub(super) fn no_pairs(&self, purpose: &'static str) -> PairError {
        let left_out = self.languages.iter().map(|language| language.left_out).sum();
        PairError::NoPairs { purpose, left_out }
    }

    /// All targets of a language, behind each other.
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
