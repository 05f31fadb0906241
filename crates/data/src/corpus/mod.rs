//! Documents from disk, split into training and validation.
//!
//! - `lock`: the crates that a Cargo.lock names;
//! - `cargo`: their sources as documents ([`Corpus::from_cargo_sources`]);
//! - `generated`: detection of generated sources;
//! - `paths`: the user's files and folders as documents ([`Corpus::from_paths`]);
//! - `read`: walking folders and reading text;
//! - `report`: what was read, and what was left out;
//! - `split`: which side of the split a name is on, and where a text is cut.

mod cargo;
mod generated;
mod lock;
mod paths;
pub(crate) mod read;
mod report;
mod split;

use std::path::{Path, PathBuf};

use crate::hash::StableHasher;
use crate::{Error, Result};

pub use paths::is_json;
pub use read::FILE_BYTES_MAX;
pub use report::{Cut, TextReport};

/// A named text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Where the text came from, with `/` between folders on every system:
    /// `serde-1.0.0/src/lib.rs`, `notes/monday.txt`.
    pub name: String,
    /// The text exactly as in the file.
    pub text: String,
}

/// Whole texts that are not split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The texts, sorted by name.
    pub documents: Vec<Document>,
    /// What was read and what was left out.
    pub report: TextReport,
}

impl Texts {
    /// Reads files and folders as whole texts, sorted by name, to evaluate on all of a text. The
    /// rules for what is read and left out are those of [`Corpus::from_paths`].
    ///
    /// # Errors
    /// Fails if a path is missing or there is no text. Fails if a file is refused
    /// ([`JsonFiles::Refuse`]), is not UTF-8, is larger than [`FILE_BYTES_MAX`] or cannot be read.
    pub fn from_paths(paths: &[PathBuf], json: JsonFiles) -> Result<Texts> {
        paths::texts(paths, json)
    }
}

/// How to treat JSON files (`.json`, `.jsonl`, `.ndjson`, `.geojson`, `.ipynb`). They hold records,
/// of which only some fields are text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JsonFiles {
    /// JSON files are an error.
    #[default]
    Refuse,
    /// JSON files are read as plain text, including braces and field names.
    AsText,
    /// JSON files in folders are left out. A JSON file that is named directly is an error.
    LeaveOut,
}

/// Text to train on and text to validate on. No document is on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// Training documents, sorted by name.
    pub train: Vec<Document>,
    /// Validation documents, sorted by name.
    pub validation: Vec<Document>,
    /// What was read, what was left out, and what the limits cut.
    pub report: TextReport,
}

/// Maximum amount of text to take, in bytes of UTF-8. `None`, the default, takes all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Limit on training text.
    pub train_bytes: Option<u64>,
    /// Limit on validation text.
    pub validation_bytes: Option<u64>,
    /// Limit on one crate, all its versions together, so that giants do not dominate.
    /// [`Corpus::from_paths`] has no crates and ignores this limit.
    pub per_crate_bytes: Option<u64>,
}

impl Limits {
    fn check(&self) -> Result<()> {
        let limits = [
            ("train_bytes", self.train_bytes),
            ("validation_bytes", self.validation_bytes),
            ("crate_bytes", self.per_crate_bytes),
        ];
        match limits.into_iter().find(|(_, bytes)| *bytes == Some(0)) {
            Some((limit, _)) => Err(Error::ZeroLimit { limit }),
            None => Ok(()),
        }
    }
}

impl Corpus {
    /// Builds a corpus without a download, from the Rust sources of the crates that a lock file
    /// takes from a registry.
    ///
    /// `registry_src` is the folder in which Cargo unpacks crates (`registry/src` in Cargo's home).
    /// Crates lie in `<registry_src>/<index>/<name>-<version>/`, with one folder per index.
    ///
    /// - Bindings, tables and other generated files are left out, as are files over 200 KiB and
    ///   files that are not UTF-8, because users cannot repair a third party's file. Symbolic links
    ///   are not followed.
    /// - A crate that is not on disk (another platform's, say) is also left out.
    /// - [`TextReport`] counts everything that is left out.
    /// - A stable hash of the crate's name sends about 1 crate in 12 to validation. Two versions of
    ///   a crate are thus on the same side, because their texts are nearly the same.
    /// - Where `limits` cut, crates (and files within a crate) are taken in hash order, because
    ///   alphabetical order would favour the beginning of the alphabet. The result is still sorted
    ///   by crate and file.
    ///
    /// # Errors
    /// Fails if the lock file is missing or malformed, fewer than two crates have sources, a limit
    /// is 0 or less than a line, or a file cannot be read.
    pub fn from_cargo_sources(
        cargo_lock: &Path,
        registry_src: &Path,
        limits: &Limits,
    ) -> Result<Corpus> {
        limits.check()?;
        cargo::corpus(cargo_lock, registry_src, limits)
    }

    /// Builds a corpus from the text of files and folders.
    ///
    /// - Folders are read recursively. Hidden entries, symbolic links and binary files (a NUL byte
    ///   in the first 8 KiB) in folders are left out. A file that is named directly is always read.
    ///   A file that is reached twice counts once. [`TextReport`] counts what was left out.
    /// - `json` says how JSON files are treated.
    /// - With 10 documents or more, a stable hash of the document's name sends about 1 in 10 to
    ///   validation. With fewer, the last tenth of every document becomes validation text. The cut
    ///   falls at a line end where there is one.
    /// - Where `limits` cut, documents are taken in the order of their names' hashes, and the last
    ///   document taken is cut at a line end.
    ///
    /// # Errors
    /// Fails if a path is missing, one side has no text or a limit is 0. Fails if a file is refused
    /// ([`JsonFiles::Refuse`]), is not UTF-8 (the error names the offset), is larger than
    /// [`FILE_BYTES_MAX`] or cannot be read.
    pub fn from_paths(paths: &[PathBuf], limits: &Limits, json: JsonFiles) -> Result<Corpus> {
        limits.check()?;
        paths::corpus(paths, limits, json)
    }

    /// Returns the corpus if both sides have text.
    fn checked(self) -> Result<Corpus> {
        let bytes = |side: &[Document]| side.iter().map(|d| d.text.len() as u64).sum();
        let (train_bytes, validation_bytes) = (bytes(&self.train), bytes(&self.validation));
        if train_bytes == 0 || validation_bytes == 0 {
            return Err(Error::NoText { train_bytes, validation_bytes });
        }
        Ok(self)
    }

    /// A stable hash of names, texts and split: 16 hexadecimal digits, the same on every machine.
    /// It is a cache key for data derived from the corpus, not a defence against tampering.
    pub fn fingerprint(&self) -> String {
        let mut hasher = StableHasher::new();
        for side in [&self.train, &self.validation] {
            hasher.field(&(side.len() as u64).to_le_bytes());
            for document in side {
                hasher.field(document.name.as_bytes());
                hasher.field(document.text.as_bytes());
            }
        }
        format!("{:016x}", hasher.finish())
    }
}
