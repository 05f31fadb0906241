//! Parallel text: sentences in many languages with their English translations, from files to
//! mini-batches for one model of all languages.
//!
//! ```text
//!  files ──► ParallelCorpus ──► TranslationVocabulary ──► PairSet ──► TrainPairs / ValidationPairs
//!        [1]                [2]                       [3]         [4]
//! ```
//!
//! 1. [`ParallelCorpus`]: pairs of sentences from TSV files and aligned files. `lines` reads them,
//!    `folder` finds one file for each language, and `pairs` decides which two lines form a pair.
//!    `gather` removes duplicates, splits and orders. `report` says what was left out, and why.
//! 2. [`TranslationVocabulary`]: one byte-level vocabulary of all languages, with a tag for each.
//! 3. [`PairSet`]: the pairs as tokens, without those that are too long.
//! 4. [`TrainPairs`]: mini-batches ([`PairBatch`]) by number, from a mixture of the languages;
//!    [`ValidationPairs`]: each pair once.
//!
//! [`unigram()`] is the baseline for a translation model.
//!
//! As everywhere in this crate, everything is a pure function of (files, options, seed). There is
//! no language detection: the file's name or the caller says what the language is. Preparing
//! sentences from other formats is the task of `scripts/prepare`.
//!
//! ```no_run
//! use gpipe_data::parallel::{ParallelCorpus, ParallelOptions, Source};
//!
//! # fn main() -> gpipe_data::Result<()> {
//! let sources = [Source::Folder { folder: "data/translations".into() }];
//! let (corpus, report) = ParallelCorpus::read(&sources, &ParallelOptions::default())?;
//! println!("{report}"); // read 12 files: ...
//! assert!(corpus.languages.iter().all(|language| !language.train.is_empty()));
//! # Ok(())
//! # }
//! ```

mod batches;
mod corpus;
mod encode;
mod folder;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gather;
mod lines;
mod mixture;
mod pairs;
mod pools;
mod report;
mod unigram;
mod validation;
mod vocabulary;

pub use crate::error::{PairError, ParallelError};
pub use batches::{PairBatch, TrainPairs, TrainPairsOptions};
pub use corpus::{
    CODE_BYTES_MAX, Language, PAIRS_MAX, Pair, ParallelCorpus, ParallelOptions, Source,
};
pub use encode::{PAIR_TOKENS_MAX, PAIR_TOKENS_MIN, PairSet, Side};
pub use report::{LanguageReport, Reason, Report};
pub use unigram::{LanguageEntropy, Unigram, unigram};
pub use validation::ValidationPairs;
pub use vocabulary::{BEGIN, END, PAD, TranslationVocabulary, VocabularyOptions};
