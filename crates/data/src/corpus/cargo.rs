//! The Rust sources of a lock file's crates as documents.
//!
//! Only the crates that the lock file names are read, not the whole registry of several gigabytes.
//! Crates are read whole even where a limit keeps only a part, so that the report can state the
//! total.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::generated::{self, SOURCE_BYTES_MAX};
use super::lock::{self, Package};
use super::{Corpus, Document, Limits, TextReport, read, split};
use crate::hash::StableHasher;
use crate::{Error, Omissions, Result};

/// One crate in this many becomes validation text.
const VALIDATION_ONE_IN: u64 = 12;

/// Reasons for leaving out sources.
const BINDINGS: (&str, &str) = ("crate of bindings or tables", "crates of bindings and tables");
const ABSENT: (&str, &str) = ("crate that is not on disk", "crates that are not on disk");
const LARGE: (&str, &str) = ("Rust file over 200 KiB", "Rust files over 200 KiB");
const GENERATED: (&str, &str) = ("generated Rust file", "generated Rust files");
const NOT_UTF8: (&str, &str) = ("Rust file that is not UTF-8", "Rust files that are not UTF-8");
const EMPTY: (&str, &str) = ("empty Rust file", "empty Rust files");

/// All versions of one crate on disk, as documents named `<crate>-<version>/<path within it>`.
struct Crate {
    name: String,
    documents: Vec<Document>,
}

pub(super) fn corpus(lock: &Path, registry: &Path, limits: &Limits) -> Result<Corpus> {
    let packages = lock::registry_packages(lock)?;
    let locked = packages.len();
    let mut report = TextReport::default();
    let crates = crates_on_disk(packages, registry, &mut report)?;
    if crates.len() < 2 {
        return Err(Error::NoSources {
            lock: lock.to_path_buf(),
            registry: registry.to_path_buf(),
            locked,
            usable: crates.len(),
        });
    }
    let documents = || crates.iter().flat_map(|of| &of.documents);
    documents().for_each(|document| report.read(document));
    report.fingerprint = Some(fingerprint(documents()));
    // Split by name, not by version, because two versions of a crate are nearly the same text.
    let (train, validation) = split::split(crates, VALIDATION_ONE_IN, |c| &c.name);
    let train = side(("training", train), ("train_bytes", limits.train_bytes), limits, &mut report);
    let most = ("validation_bytes", limits.validation_bytes);
    let validation = side(("validation", validation), most, limits, &mut report);
    Corpus { train, validation, report }.checked()
}

/// A stable hash of names and texts, in order.
fn fingerprint<'a>(documents: impl Iterator<Item = &'a Document>) -> String {
    let mut hasher = StableHasher::new();
    for Document { name, text } in documents {
        hasher.field(name.as_bytes());
        hasher.field(text.as_bytes());
    }
    format!("{:016x}", hasher.finish())
}

/// The documents of one side. Crates are taken in hash order up to the limit, then sorted.
fn side(
    (side, mut crates): (&'static str, Vec<Crate>),
    most: (&'static str, Option<u64>),
    limits: &Limits,
    report: &mut TextReport,
) -> Vec<Document> {
    let texts = crates.iter().flat_map(|of| &of.documents);
    let all: u64 = texts.map(|document| document.text.len() as u64).sum();
    split::shuffle(&mut crates, |c| &c.name);
    let (mut taken, mut bytes) = (Vec::new(), 0);
    let mut left = most.1.unwrap_or(u64::MAX);
    for mut of in crates {
        let share = left.min(limits.per_crate_bytes.unwrap_or(u64::MAX));
        split::shuffle(&mut of.documents, |document| &document.name);
        let filled = split::fill(of.documents, share);
        taken.extend(filled.documents);
        bytes += filled.bytes;
        if filled.is_full && share == left {
            break; // The side is full, not just the crate.
        }
        left -= filled.bytes; // `filled.bytes` is at most `share`.
    }
    report.cut(side, (bytes, all), &[most, ("crate_bytes", limits.per_crate_bytes)]);
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    taken
}

/// The crates on disk that have at least one usable file, by name.
fn crates_on_disk(
    packages: impl IntoIterator<Item = Package>,
    registry: &Path,
    report: &mut TextReport,
) -> Result<Vec<Crate>> {
    let indexes = index_folders(registry)?;
    let mut crates: BTreeMap<String, Vec<Document>> = BTreeMap::new();
    for package in packages {
        let folder = package.folder();
        if generated::is_generated_crate(&package.name) {
            report.left_out.add(BINDINGS, folder);
            continue;
        }
        // The same crate from two indexes counts once. The first index wins.
        let on_disk = indexes.iter().map(|index| index.join(&folder));
        match on_disk.into_iter().find(|path| path.is_dir()) {
            Some(path) => {
                let sources = sources(&path, &folder, &mut report.left_out)?;
                crates.entry(package.name).or_default().extend(sources);
            }
            None => report.left_out.add(ABSENT, folder),
        }
    }
    let crates = crates.into_iter().filter(|(_, documents)| !documents.is_empty());
    Ok(crates.map(|(name, documents)| Crate { name, documents }).collect())
}

/// The folders in the registry folder, one per index, sorted. A missing registry has no crates.
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

/// The handwritten Rust files of a crate.
fn sources(folder: &Path, name: &str, left_out: &mut Omissions) -> Result<Vec<Document>> {
    let mut sources = Vec::new();
    // Files other than Rust sources were not requested, so they are not reported.
    for entry in read::walk(folder, &mut Omissions::default())? {
        if !entry.relative.ends_with(".rs") {
            continue;
        }
        let name = format!("{name}/{}", entry.relative);
        match source(&entry.path)? {
            Ok(text) => sources.push(Document { name, text }),
            Err(reason) => left_out.add(reason, name),
        }
    }
    Ok(sources)
}

/// The text of a Rust file, or why it is left out. A file that is not UTF-8 is not an error here:
/// it belongs to a third party (parsers keep such files as tests), and the user cannot repair it.
fn source(path: &Path) -> Result<Result<String, (&'static str, &'static str)>> {
    if read::size_bytes(path)? > SOURCE_BYTES_MAX {
        return Ok(Err(LARGE));
    }
    let Ok(text) = String::from_utf8(read::bytes(path)?) else {
        return Ok(Err(NOT_UTF8));
    };
    if text.is_empty() {
        return Ok(Err(EMPTY));
    }
    Ok(if generated::is_generated_text(&text) { Err(GENERATED) } else { Ok(text) })
}
