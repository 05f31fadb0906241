//! Documents from disk, split into training and validation.
//!
//! - `lock`: which crates a Cargo.lock names;
//! - `cargo`: their sources as documents ([`Corpus::from_cargo_sources`]);
//! - `generated`: which of those sources nobody wrote;
//! - `paths`: files and folders of the user as documents ([`Corpus::from_paths`]);
//! - `read`: walking folders, reading text;
//! - `report`: what was read, and what was left out;
//! - `split`: which side a name is on, and where a text is cut.

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

pub use read::FILE_BYTES_MAX;
pub use report::{Cut, TextReport};

/// A named text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Where it is from, with `/` between folders on every system: `serde-1.0.0/src/lib.rs`,
    /// `notes/monday.txt`.
    pub name: String,
    /// The text, as it is in the file.
    pub text: String,
}

/// Whole texts, unsplit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The texts, by name.
    pub documents: Vec<Document>,
    /// What was read and what was left out.
    pub report: TextReport,
}

impl Texts {
    /// The texts of files and folders, whole and unsplit, by name: to measure on all of a text.
    /// What is read and what is left out is as for [`Corpus::from_paths`].
    ///
    /// # Errors
    /// A path is missing; a file is refused ([`JsonFiles::Refuse`]), is not UTF-8 or is larger than
    /// [`FILE_BYTES_MAX`]; there is no text; a file cannot be read.
    pub fn from_paths(paths: &[PathBuf], json: JsonFiles) -> Result<Texts> {
        paths::texts(paths, json)
    }
}

/// What is done with files of JSON (`.json`, `.jsonl`, `.ndjson`, `.geojson`, `.ipynb`). They hold
/// records, of which only some fields are text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JsonFiles {
    /// They are an error.
    #[default]
    Refuse,
    /// They are read as plain text: braces, names of fields and all.
    AsText,
    /// Those in folders are left out. One that is named directly is an error.
    LeaveOut,
}

/// Texts to train on and texts to validate on. No document is on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// Documents to learn from, by name.
    pub train: Vec<Document>,
    /// Documents to measure on, by name.
    pub validation: Vec<Document>,
    /// What was read, what was left out, and what limits cut.
    pub report: TextReport,
}

/// How much text to take at most, in bytes of UTF-8; none: all of it, which is the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Of training text.
    pub train_bytes: Option<u64>,
    /// Of validation text.
    pub validation_bytes: Option<u64>,
    /// Of one crate, all its versions together, so that giants do not dominate.
    /// [`Corpus::from_paths`] has no crates and does not use it.
    pub per_crate_bytes: Option<u64>,
}

impl Limits {
    fn check(&self) -> Result<()> {
        let limits = [
            ("train_bytes", self.train_bytes),
            ("validation_bytes", self.validation_bytes),
            ("per_crate_bytes", self.per_crate_bytes),
        ];
        match limits.into_iter().find(|(_, bytes)| *bytes == Some(0)) {
            Some((limit, _)) => Err(Error::ZeroLimit { limit }),
            None => Ok(()),
        }
    }
}

impl Corpus {
    /// Real text without a download: the Rust sources of the crates that a lock file takes from a
    /// registry.
    ///
    /// `registry_src` is the folder in which Cargo unpacks crates (`registry/src` in Cargo's home):
    /// crates lie in `<registry_src>/<index>/<name>-<version>/`, with one folder per index.
    ///
    /// - Bindings, tables and other generated files are left out, as are files over 200 KiB and
    ///   files that are not UTF-8: nobody here can repair a third party's file. Symbolic links are
    ///   not followed.
    /// - A crate that is not on disk (another platform's, say) is left out, too.
    /// - [`TextReport`] counts all of these.
    /// - The split is by a stable hash of the crate's name, about 1 in 12 to validation. Two
    ///   versions of a crate are thus on the same side: their texts are nearly the same.
    /// - Where `limits` cut, crates (and files within a crate) are taken in the order of their
    ///   hashes: the order of the alphabet would favour its beginning. The result is ordered by
    ///   crate and file all the same.
    ///
    /// # Errors
    /// The lock file is missing or malformed; fewer than two crates have sources; a limit is 0, or
    /// less than a line; a file cannot be read.
    pub fn from_cargo_sources(
        cargo_lock: &Path,
        registry_src: &Path,
        limits: &Limits,
    ) -> Result<Corpus> {
        limits.check()?;
        cargo::corpus(cargo_lock, registry_src, limits)
    }

    /// The text of files and folders.
    ///
    /// - Folders are read recursively. In them, hidden entries, symbolic links and binary files (a
    ///   NUL byte in the first 8 KiB) are left out. A file that is named directly is always read. A
    ///   file that is reached twice counts once. [`TextReport`] counts what was left out.
    /// - Files of JSON are what `json` says.
    /// - With 10 documents or more, the split is by a stable hash of the document's name, about 1
    ///   in 10 to validation. With fewer, the last tenth of every document, cut at a line where
    ///   there is one, is validation text.
    /// - Where `limits` cut, documents are taken in the order of their names' hashes, and the last
    ///   one is cut at a line.
    ///
    /// # Errors
    /// A path is missing; a file is refused ([`JsonFiles::Refuse`]), is not UTF-8 (with the offset)
    /// or is larger than [`FILE_BYTES_MAX`]; one side has no text; a limit is 0; a file cannot be
    /// read.
    pub fn from_paths(paths: &[PathBuf], limits: &Limits, json: JsonFiles) -> Result<Corpus> {
        limits.check()?;
        paths::corpus(paths, limits, json)
    }

    /// The corpus, if there is text on both sides.
    fn checked(self) -> Result<Corpus> {
        let bytes = |side: &[Document]| side.iter().map(|d| d.text.len() as u64).sum();
        let (train_bytes, validation_bytes) = (bytes(&self.train), bytes(&self.validation));
        if train_bytes == 0 || validation_bytes == 0 {
            return Err(Error::NoText { train_bytes, validation_bytes });
        }
        Ok(self)
    }

    /// A stable hash of names, texts and split: 16 hexadecimal digits, the same on every machine. A
    /// key for caches of what was derived from the corpus; not a defence against tampering.
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
