//! Parallel text: sentences in many languages, each with its English translation.
//!
//! Programs speak a hundred languages. Their English messages, with what volunteers made of them, lie on most Linux
//! systems as gettext catalogues, and are the kind of corpus that research uses as "GNOME" or "KDE". Text of one's own comes
//! as TSV or as two aligned files.
//!
//! - `catalogue`: readers of `.mo` and `.po`, and the catalogues below a folder;
//! - `lines`: TSV files and aligned files, plain or gzip;
//! - `clean`: which pairs are worth learning from;
//! - `corpus`: sources, options and what comes out ([`ParallelCorpus::read`]);
//! - `gather`: duplicates, split and order;
//! - `report`: what was left out, and why.
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
//!
//! Absent: a guess at the language of a text. A catalogue's language is where it lies.

mod catalogue;
mod clean;
mod corpus;
mod error;
mod gather;
mod lines;
mod report;

pub use catalogue::{
    CATALOGUE_BYTES_MAX, Catalogue, CatalogueError, MESSAGE_BYTES_MAX, Message, Place,
};
pub use corpus::{
    CODE_BYTES_MAX, Language, PAIRS_MAX, Pair, ParallelCorpus, ParallelOptions, Source,
};
pub use error::ParallelError;
pub use report::{CATALOGUE_ERRORS_MAX, FileError, LanguageReport, Reason, Report};
