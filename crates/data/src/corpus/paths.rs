//! Files and folders named by the user as documents.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Corpus, Document, Limits, read, split};
use crate::{Error, Result};

/// One part in this many is validation text.
const VALIDATION_ONE_IN: usize = 10;

/// With fewer documents than this, every document is cut: a split by document would be all or nothing.
const SPLIT_BY_DOCUMENT_MIN: usize = 10;

/// A NUL byte among this many first bytes marks a binary file, as it does for git and grep.
const BINARY_PROBE_BYTES: usize = 8 * 1024;

pub(super) fn corpus(paths: &[PathBuf], limits: &Limits) -> Result<Corpus> {
    let documents = documents(paths)?;
    let (train, validation) = split_documents(documents);
    Corpus {
        train: side(train, limits.train_bytes),
        validation: side(validation, limits.validation_bytes),
    }
    .checked()
}

fn split_documents(documents: Vec<Document>) -> (Vec<Document>, Vec<Document>) {
    if documents.len() >= SPLIT_BY_DOCUMENT_MIN {
        split::split(documents, VALIDATION_ONE_IN as u64, |d| &d.name)
    } else {
        documents.into_iter().map(|document| split::tail(document, VALIDATION_ONE_IN)).unzip()
    }
}

/// The documents of one side: in the order of their hashes until the limit, then sorted.
fn side(mut documents: Vec<Document>, limit_bytes: u64) -> Vec<Document> {
    split::shuffle(&mut documents, |document| &document.name);
    let documents = documents.into_iter().map(Ok::<_, std::convert::Infallible>);
    let Ok(filled) = split::fill(documents, limit_bytes);
    let mut taken = filled.documents;
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    taken
}

/// Every document that is not empty, sorted by name; at least one.
pub(super) fn documents(paths: &[PathBuf]) -> Result<Vec<Document>> {
    let mut seen = BTreeSet::new();
    let mut documents = Vec::new();
    for path in paths {
        let metadata = fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::MissingPath { path: path.clone() },
            _ => Error::io("read", path)(error),
        })?;
        if metadata.is_dir() {
            for entry in read::walk(path)? {
                let name = document_name(path, Some(&entry.relative));
                let text = unless_seen(&mut seen, &entry.path, text_in_folder)?;
                documents.extend(text.map(|text| Document { name, text }));
            }
        } else if metadata.is_file() {
            let name = document_name(path, None);
            let text = unless_seen(&mut seen, path, text_named_directly)?;
            documents.extend(text.map(|text| Document { name, text }));
        } else {
            return Err(Error::NotAFile { path: path.clone() });
        }
    }
    documents.retain(|document| !document.text.is_empty());
    if documents.is_empty() {
        return Err(Error::Empty { paths: paths.to_vec() });
    }
    documents.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(documents)
}

/// The last part of the path as it was named, and the path from there. Not the absolute path: the split and the
/// fingerprint must not depend on where the folder lies.
fn document_name(named: &Path, relative: Option<&str>) -> String {
    let base = named.file_name().map(|name| name.to_string_lossy());
    match (base, relative) {
        (Some(base), Some(relative)) => format!("{base}/{relative}"),
        (Some(base), None) => base.into_owned(),
        (None, relative) => relative.unwrap_or_default().to_owned(),
    }
}

/// Reads a file unless it was read before, under this or another name: a text that counts twice may be split onto both
/// sides, and validation would then measure memory.
fn unless_seen(
    seen: &mut BTreeSet<PathBuf>,
    path: &Path,
    text: impl FnOnce(&Path) -> Result<Option<String>>,
) -> Result<Option<String>> {
    let real = fs::canonicalize(path).map_err(Error::io("read", path))?;
    if seen.insert(real) { text(path) } else { Ok(None) }
}

fn text_named_directly(path: &Path) -> Result<Option<String>> {
    read::text(path, read::bytes(path)?).map(Some)
}

fn text_in_folder(path: &Path) -> Result<Option<String>> {
    let bytes = read::bytes(path)?;
    if bytes.iter().take(BINARY_PROBE_BYTES).any(|&byte| byte == 0) {
        return Ok(None);
    }
    read::text(path, bytes).map(Some)
}
