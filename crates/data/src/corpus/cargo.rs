//! The Rust sources of a lock file's crates as documents.
//!
//! Crates are read lazily, in the order in which a limit is filled: a registry's folder holds gigabytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::generated::{self, SOURCE_BYTES_MAX};
use super::lock::{self, Package};
use super::{Corpus, Document, Limits, read, split};
use crate::{Error, Result};

/// One crate in this many is validation text.
const VALIDATION_ONE_IN: u64 = 12;

/// A crate with all its versions on disk.
struct Crate {
    name: String,
    files: Vec<Source>,
}

/// A file of a crate that is small enough to be written by hand; it has not been read.
struct Source {
    path: PathBuf,
    /// `<crate>-<version>/<path in it>`
    name: String,
}

pub(super) fn corpus(lock: &Path, registry: &Path, limits: &Limits) -> Result<Corpus> {
    let packages = lock::registry_packages(lock)?;
    let locked = packages.len();
    let crates = crates_on_disk(packages, registry)?;
    if crates.len() < 2 {
        return Err(Error::NoSources {
            lock: lock.to_path_buf(),
            registry: registry.to_path_buf(),
            locked,
            usable: crates.len(),
        });
    }
    // By name, not by version: two versions of a crate are nearly the same text.
    let (train, validation) = split::split(crates, VALIDATION_ONE_IN, |c| &c.name);
    Corpus {
        train: side(train, limits.train_bytes, limits)?,
        validation: side(validation, limits.validation_bytes, limits)?,
    }
    .checked()
}

/// The documents of one side: crates in the order of their hashes until the limit, then sorted.
fn side(mut crates: Vec<Crate>, limit_bytes: u64, limits: &Limits) -> Result<Vec<Document>> {
    split::shuffle(&mut crates, |c| &c.name);
    let mut taken = Vec::new();
    let mut left = limit_bytes;
    for mut of in crates {
        let share = left.min(limits.per_crate_bytes);
        split::shuffle(&mut of.files, |file| &file.name);
        let documents = of.files.iter().filter_map(|file| file.read().transpose());
        let filled = split::fill(documents, share)?;
        taken.extend(filled.documents);
        if filled.is_full && share == left {
            break; // The side is full, not just the crate.
        }
        left -= filled.bytes; // At most `share`.
    }
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(taken)
}

/// The crates, by name, that are on disk with at least one usable file.
fn crates_on_disk(
    packages: impl IntoIterator<Item = Package>,
    registry: &Path,
) -> Result<Vec<Crate>> {
    let indexes = index_folders(registry)?;
    let mut crates: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    for package in packages {
        if generated::is_generated_crate(&package.name) {
            continue;
        }
        let folder = package.folder();
        // The same crate from two indexes is the same crate: the first one counts.
        let on_disk = indexes.iter().map(|index| index.join(&folder));
        if let Some(path) = on_disk.into_iter().find(|path| path.is_dir()) {
            let files = crates.entry(package.name).or_default();
            files.extend(sources(&path, &folder)?);
        }
    }
    let mut usable = Vec::new();
    for (name, files) in crates {
        let of = Crate { name, files };
        if of.is_usable()? {
            usable.push(of);
        }
    }
    Ok(usable)
}

/// The folders in the registry's folder, one per index, sorted. A registry that is not there holds no crates.
fn index_folders(registry: &Path) -> Result<Vec<PathBuf>> {
    if !registry.is_dir() {
        return Ok(Vec::new());
    }
    let mut folders = Vec::new();
    for entry in fs::read_dir(registry).map_err(Error::io("list", registry))? {
        let path = entry.map_err(Error::io("list", registry))?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

/// The Rust files of a crate that are not too large.
fn sources(folder: &Path, name: &str) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for entry in read::walk(folder)? {
        if entry.relative.ends_with(".rs") && read::size_bytes(&entry.path)? <= SOURCE_BYTES_MAX {
            sources.push(Source { name: format!("{name}/{}", entry.relative), path: entry.path });
        }
    }
    Ok(sources)
}

impl Crate {
    /// Whether there is text in it. Usually the first file answers.
    fn is_usable(&self) -> Result<bool> {
        for file in &self.files {
            if file.read()?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Source {
    /// The file as a document; none where it is empty, generated or not UTF-8. The last is no error here: the file is
    /// a third party's (parsers keep such files as tests), and the user cannot repair it.
    fn read(&self) -> Result<Option<Document>> {
        let Ok(text) = String::from_utf8(read::bytes(&self.path)?) else {
            return Ok(None);
        };
        if text.is_empty() || generated::is_generated_text(&text) {
            return Ok(None);
        }
        Ok(Some(Document { name: self.name.clone(), text }))
    }
}
