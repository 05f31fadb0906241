//! A corpus of parallel text, its sources and its options.

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

/// Pairs of sentences in one language and English.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Language {
    /// Language code, as in the file's name: `de`, `pt_BR`, `sr@latin`.
    pub code: String,
    /// Training pairs.
    pub train: Vec<Pair>,
    /// Validation pairs. Their English sentences are in no language's `train`.
    pub validation: Vec<Pair>,
}

/// Text in several languages with English translations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelCorpus {
    /// The languages, sorted by code.
    pub languages: Vec<Language>,
}

/// A source of pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder with one file of lines `source<TAB>target` per language, plain or gzip, named
    /// `LANGUAGE.tsv` or `LANGUAGE.tsv.gz`. Other files in the folder are skipped and counted.
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

impl Source {
    /// The files that the source reads, in their order.
    ///
    /// # Errors
    /// The folder cannot be listed, or has no file of pairs.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        Ok(match self {
            Self::Folder { folder } => {
                super::folder::find(folder)?.files.into_iter().map(|(_, path)| path).collect()
            }
            Self::Tsv { path, .. } => vec![path.clone()],
            Self::Lines { source, target, .. } => vec![source.clone(), target.clone()],
        })
    }
}

/// Which pairs of the sources become a corpus, and how they are split.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelOptions {
    /// Codes of the languages to keep. Empty to keep all.
    pub languages: Vec<String>,
    /// Approximate fraction of English sentences used for validation.
    pub validation_share: f64,
    /// Maximum number of pairs per language, both sides of the split together. 0 for no limit.
    pub most_pairs: usize,
    /// Maximum number of bytes on one side of a pair.
    pub bytes_max: usize,
    /// Maximum ratio of the lengths of a pair's sides, after 10 characters are added to both.
    /// Characters of Chinese, Japanese and Korean count twice.
    pub ratio_max: f64,
    /// Minimum number of pairs. A language with fewer pairs, or without training pairs, is left
    /// out.
    pub min_pairs: usize,
}

impl Default for ParallelOptions {
    /// All languages with at least 500 pairs, at most 400 bytes per side, a maximum ratio of 2.5,
    /// and 2% validation.
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
            return wrong("ratio", self.ratio_max.to_string(), "1 or more");
        }
        if self.bytes_max == 0 {
            return wrong("sentence_bytes", "0".into(), "1 or more");
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
    /// Reads the sources into one corpus, and reports what was left out and why.
    ///
    /// - Two lines become a pair after trimming. A pair is left out for any
    ///   [`Reason`](super::Reason).
    /// - A pair that occurs twice in a language counts once.
    /// - The split uses a stable hash of the English sentence's letters and digits, in lower case
    ///   and without directives and tags. A sentence and its near-duplicates are thus on the same
    ///   side in all languages.
    /// - Pairs are in hash order, which is also the order in which `most_pairs` is filled. The
    ///   result depends on the pairs and the options, never on the names or order of files.
    ///
    /// # Errors
    /// Fails if an option is out of range, or if a requested language is unknown or has too few
    /// pairs. Fails if a folder has no files of pairs, a TSV file or an aligned pair of files is
    /// malformed (the error names the line), nothing is left, or a file cannot be read.
    pub fn read(sources: &[Source], options: &ParallelOptions) -> Result<(ParallelCorpus, Report)> {
        options.check()?;
        let mut gathering = Gathering::new(options);
        for source in sources {
            gathering.read(source)?;
        }
        gathering.finish()
    }

    /// A stable hash of languages, pairs and split: 16 hexadecimal digits, the same on every
    /// machine. It is a cache key for data derived from the corpus, not a defence against
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
