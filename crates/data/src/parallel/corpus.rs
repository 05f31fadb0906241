//! A corpus of parallel text: what is in it, and what it is made of.

pub use crate::bounds::{CODE_BYTES_MAX, PAIRS_MAX};
use std::path::PathBuf;

use super::gather::Gathering;
use super::{ParallelError, Report};
use crate::Result;
use crate::hash::StableHasher;

/// A sentence and its translation into English.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    /// The foreign text.
    pub source: String,
    /// The English text.
    pub target: String,
}

/// The pairs of one language with English.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Language {
    /// As the file is called: `de`, `pt_BR`, `sr@latin`.
    pub code: String,
    /// Pairs to learn from.
    pub train: Vec<Pair>,
    /// Pairs to measure on. Their English sentences are in no language's `train`.
    pub validation: Vec<Pair>,
}

/// Text in several languages with its English.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelCorpus {
    /// Sorted by code.
    pub languages: Vec<Language>,
}

/// Where pairs are from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder with a file of lines `source<TAB>target` for each language, plain or gzip, called
    /// `LANGUAGE.tsv` or `LANGUAGE.tsv.gz`. Other files in it are passed over, and counted.
    Folder {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of lines `source<TAB>target`, plain or gzip.
    Tsv {
        /// The language of the sources.
        language: String,
        /// The file.
        path: PathBuf,
    },
    /// Two files whose lines correspond, plain or gzip.
    Lines {
        /// The language of the sources.
        language: String,
        /// The file of sources.
        source: PathBuf,
        /// The file of targets.
        target: PathBuf,
    },
}

/// What of the sources becomes a corpus.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelOptions {
    /// Codes of the languages to keep; none for all.
    pub languages: Vec<String>,
    /// About which share of the English sentences is to validate on.
    pub validation_share: f64,
    /// Most pairs of one language, both sides of the split together; 0 for all.
    pub most_pairs: usize,
    /// Most bytes of one side of a pair.
    pub bytes_max: usize,
    /// Most that one side of a pair may be longer than the other, after 10 characters are added to
    /// both. Characters of Chinese, Japanese and Korean count twice.
    pub ratio_max: f64,
    /// A language with fewer pairs is left out, and one without a pair to train on.
    pub min_pairs: usize,
}

impl Default for ParallelOptions {
    /// All languages with 500 pairs or more, sides of at most 400 bytes and a ratio of 2.5, 2% to
    /// validate on.
    fn default() -> Self {
        Self {
            languages: Vec::new(),
            validation_share: 0.02,
            most_pairs: 0,
            bytes_max: 400,
            ratio_max: 2.5,
            min_pairs: 500,
        }
    }
}

impl ParallelOptions {
    fn check(&self) -> Result<()> {
        let wrong = |option, value: String, allowed| {
            Err(ParallelError::Setting { option, value, allowed }.into())
        };
        if !(0.0..1.0).contains(&self.validation_share) {
            let value = self.validation_share.to_string();
            return wrong("validation_share", value, "0 to less than 1");
        }
        if self.ratio_max.is_nan() || self.ratio_max < 1.0 {
            return wrong("ratio_max", self.ratio_max.to_string(), "1 or more");
        }
        if self.bytes_max == 0 {
            return wrong("bytes_max", "0".into(), "1 or more");
        }
        self.languages.iter().try_for_each(|code| check_code(code))
    }
}

pub(super) fn check_code(code: &str) -> Result<()> {
    let is_code = (1..=CODE_BYTES_MAX).contains(&code.len())
        && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-@".contains(&byte));
    if is_code { Ok(()) } else { Err(ParallelError::Code { code: code.to_owned() }.into()) }
}

impl ParallelCorpus {
    /// Reads the sources into one corpus, and says what was left out and why.
    ///
    /// - Two lines become a pair, their ends trimmed. A pair is left out for the
    ///   [`Reason`](super::Reason)s.
    /// - A pair that a language has twice counts once.
    /// - The split is by a stable hash of the English sentence's letters and digits, in lower case
    ///   and without directives and tags. A sentence and its near-duplicates are thus on the same
    ///   side in all languages.
    /// - Pairs are in the order of their hashes, which is also the order in which `most_pairs` is
    ///   filled. What comes out depends on the pairs and the options, never on files' names or
    ///   their order.
    ///
    /// # Errors
    /// An option is out of range; a language was asked for that is unknown or has too few pairs; a
    /// folder has no files of pairs; a TSV file or an aligned pair of files is malformed (with the
    /// line); nothing is left; a file cannot be read.
    pub fn read(sources: &[Source], options: &ParallelOptions) -> Result<(ParallelCorpus, Report)> {
        options.check()?;
        let mut gathering = Gathering::new(options);
        for source in sources {
            gathering.read(source)?;
        }
        gathering.finish()
    }

    /// A stable hash of languages, pairs and split: 16 hexadecimal digits, the same on every
    /// machine. A key for caches of what was derived from the corpus; not a defence against
    /// tampering.
    pub fn fingerprint(&self) -> String {
        let mut hasher = StableHasher::new();
        for language in &self.languages {
            hasher.field(language.code.as_bytes());
            for side in [&language.train, &language.validation] {
                hasher.field(&(side.len() as u64).to_le_bytes());
                for pair in side {
                    hasher.field(pair.source.as_bytes());
                    hasher.field(pair.target.as_bytes());
                }
            }
        }
        format!("{:016x}", hasher.finish())
    }
}
