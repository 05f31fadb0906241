//! Parallel text: sentences in many languages with their English translations, from files to mini-batches for one model of all
//! languages.
//!
//! ```text
//!  files ──► ParallelCorpus ──► TranslationVocabulary ──► PairSet ──► TrainPairs / ValidationPairs ──► PairBatch
//!        [1]                [2]                       [3]         [4]
//! ```
//!
//! 1. [`ParallelCorpus`]: programs speak a hundred languages, and their English messages, with what volunteers made of them, lie on
//!    most Linux systems as gettext catalogues: the kind of corpus that research uses as "GNOME" or "KDE". Text of one's own
//!    comes as TSV or as two aligned files. `catalogue` reads `.mo` and `.po`, `lines` the others; `clean` says which pairs are
//!    worth learning from; `gather` takes duplicates out, splits and orders; `report` says what was left out, and why.
//! 2. [`TranslationVocabulary`]: one byte-level vocabulary of all languages, with a tag for each.
//! 3. [`PairSet`]: the pairs as tokens; those too long are left out.
//! 4. [`TrainPairs`]: mini-batches by number, from a mixture of the languages; [`ValidationPairs`]: each pair once.
//!
//! [`unigram()`] is what a model of translations has to beat.
//!
//! As everywhere in this crate, all is a pure function of (files, options, seed). Absent: a guess at the language of a text. A
//! catalogue's language is where it lies.
//!
//! ```no_run
//! use gpipe_data::parallel::{ParallelCorpus, ParallelOptions, Source};
//!
//! # fn main() -> gpipe_data::Result<()> {
//! let sources = [Source::Catalogues { folder: "/usr/share/locale".into() }];
//! let (corpus, report) = ParallelCorpus::read(&sources, &ParallelOptions::default())?;
//! println!("{report}"); // 3381779 pairs in 141 languages, ...
//! assert!(corpus.languages.iter().all(|language| !language.train.is_empty()));
//! # Ok(())
//! # }
//! ```

mod batches;
mod catalogue;
mod clean;
mod corpus;
mod encode;
mod error;
pub(crate) mod fuzzing;
mod gather;
mod lines;
mod mixture;
mod pair_error;
mod pools;
mod report;
mod unigram;
mod validation;
mod vocabulary;

pub use batches::{PairBatch, TrainPairs, TrainPairsOptions};
pub use catalogue::{
    CATALOGUE_BYTES_MAX, Catalogue, CatalogueError, MESSAGE_BYTES_MAX, Message, Place,
};
pub use corpus::{
    CODE_BYTES_MAX, Language, PAIRS_MAX, Pair, ParallelCorpus, ParallelOptions, Source,
};
pub use encode::{PAIR_TOKENS_MAX, PairSet, Side};
pub use error::ParallelError;
pub use pair_error::PairError;
pub use report::{CATALOGUE_ERRORS_MAX, FileError, LanguageReport, Reason, Report};
pub use unigram::{LanguageEntropy, Unigram, unigram};
pub use validation::ValidationPairs;
pub use vocabulary::{BEGIN, END, PAD, TranslationVocabulary, VocabularyOptions};
