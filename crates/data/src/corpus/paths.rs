//! Files and folders that the user names, as documents.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Corpus, Document, JsonFiles, Limits, TextReport, Texts, read, split};
use crate::{Error, Result, bounds::TEXT_BYTES_MAX};
use gpipe_core::Bytes;

/// One part in this many becomes validation text.
const VALIDATION_ONE_IN: usize = 10;

/// With fewer documents than this, every document is cut, because a split by document would be too
/// uneven.
const SPLIT_BY_DOCUMENT_MIN: usize = 10;

/// A NUL byte within this many leading bytes marks a binary file, as in git and grep.
const BINARY_PROBE_BYTES: usize = 8 * 1024;

/// Extensions of JSON files, in any case. Notebooks are JSON, too.
const JSON: [&str; 5] = ["json", "jsonl", "ndjson", "geojson", "ipynb"];

/// Reasons for leaving out files.
const BINARY: (&str, &str) = ("binary file", "binary files");
const EMPTY: (&str, &str) = ("empty file", "empty files");
const AGAIN: (&str, &str) = ("file that was read before", "files that were read before");
const JSON_FILE: (&str, &str) = ("JSON file", "JSON files");

pub(super) fn corpus(paths: &[PathBuf], limits: &Limits, json: JsonFiles) -> Result<Corpus> {
    let Texts { documents, mut report } = texts(paths, json)?;
    let (train, validation) = split_documents(documents);
    let train = side("training", train, ("train_bytes", limits.train_bytes), &mut report);
    let most = ("validation_bytes", limits.validation_bytes);
    let validation = side("validation", validation, most, &mut report);
    Corpus { train, validation, report }.checked()
}

fn split_documents(documents: Vec<Document>) -> (Vec<Document>, Vec<Document>) {
    if documents.len() >= SPLIT_BY_DOCUMENT_MIN {
        split::split(documents, VALIDATION_ONE_IN as u64, |d| &d.name)
    } else {
        documents.into_iter().map(|document| split::tail(document, VALIDATION_ONE_IN)).unzip()
    }
}

/// The documents of one side. They are taken in hash order up to the limit, then sorted.
fn side(
    side: &'static str,
    mut documents: Vec<Document>,
    most: (&'static str, Option<u64>),
    report: &mut TextReport,
) -> Vec<Document> {
    let all = documents.iter().map(|document| document.text.len() as u64).sum();
    split::shuffle(&mut documents, |document| &document.name);
    let filled = split::fill(documents, most.1.unwrap_or(u64::MAX));
    report.cut(side, (filled.bytes, all), &[most]);
    let mut taken = filled.documents;
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    taken
}

/// All documents that are not empty, sorted by name. There is at least one.
pub(super) fn texts(paths: &[PathBuf], json: JsonFiles) -> Result<Texts> {
    let mut reading = Reading { json, ..Reading::default() };
    for path in paths {
        let metadata = fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::MissingPath { path: path.clone() },
            _ => Error::io("read", path)(error),
        })?;
        if metadata.is_dir() {
            for entry in read::walk(path, &mut reading.report.left_out)? {
                let name = document_name(path, Some(&entry.relative));
                reading.file(&entry.path, name, FoundAs::InFolder)?;
            }
        } else if metadata.is_file() {
            reading.file(path, document_name(path, None), FoundAs::Named)?;
        } else {
            return Err(Error::NotAFile { path: path.clone() });
        }
    }
    let Reading { mut documents, mut report, .. } = reading;
    if documents.is_empty() {
        let left_out = report.left_out;
        return Err(Error::Empty { paths: paths.to_vec(), left_out });
    }
    documents.sort_by(|a, b| a.name.cmp(&b.name));
    documents.iter().for_each(|document| report.read(document));
    Ok(Texts { documents, report })
}

/// How a file was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FoundAs {
    Named,
    InFolder,
}

/// The documents read so far.
#[derive(Default)]
struct Reading {
    json: JsonFiles,
    /// Files already read. A text that counted twice could be split onto both sides, and validation
    /// would then measure memorization.
    seen: BTreeSet<PathBuf>,
    documents: Vec<Document>,
    /// Of all documents.
    bytes: u64,
    report: TextReport,
}

impl Reading {
    fn file(&mut self, path: &Path, name: String, place: FoundAs) -> Result<()> {
        let real = fs::canonicalize(path).map_err(Error::io("read", path))?;
        if !self.seen.insert(real) {
            self.report.left_out.add(AGAIN, name);
            return Ok(());
        }
        match (is_json(path), self.json, place) {
            (true, JsonFiles::LeaveOut, FoundAs::InFolder) => {
                self.report.left_out.add(JSON_FILE, name);
                return Ok(());
            }
            (true, JsonFiles::Refuse | JsonFiles::LeaveOut, _) => {
                return Err(Error::Json { path: path.to_path_buf() });
            }
            _ => {}
        }
        let bytes = read::bytes(path)?;
        let is_binary = || bytes.iter().take(BINARY_PROBE_BYTES).any(|&byte| byte == 0);
        if place == FoundAs::InFolder && is_binary() {
            self.report.left_out.add(BINARY, name);
            return Ok(());
        }
        let text = read::text(path, bytes)?;
        if text.is_empty() {
            self.report.left_out.add(EMPTY, name);
            return Ok(());
        }
        self.bytes = self.bytes.saturating_add(text.len() as u64);
        if self.bytes > TEXT_BYTES_MAX {
            let most = format!("{} of text", Bytes(TEXT_BYTES_MAX));
            return Err(Error::TooMuchText(path.to_path_buf(), most));
        }
        self.documents.push(Document { name, text });
        Ok(())
    }
}

/// Whether a file's name says that it is JSON, which is no text: also notebooks and JSONL, in any
/// case.
#[must_use]
pub fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|end| JSON.iter().any(|known| end.eq_ignore_ascii_case(known)))
}

/// The last component of the path as it was named, and the path below it. The absolute path is not
/// used, because the split and the fingerprint must not depend on where the folder lies.
fn document_name(named: &Path, relative: Option<&str>) -> String {
    let base = named.file_name().map(|name| name.to_string_lossy());
    match (base, relative) {
        (Some(base), Some(relative)) => format!("{base}/{relative}"),
        (Some(base), None) => base.into_owned(),
        (None, relative) => relative.unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_a_corpus_that_is_too_large_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "four").unwrap();
        let read = |before| {
            let mut reading = Reading { bytes: before, ..Reading::default() };
            reading.file(&path, "a.txt".into(), FoundAs::Named)
        };
        read(TEXT_BYTES_MAX - 4).unwrap();
        let error = read(TEXT_BYTES_MAX - 3).unwrap_err().to_string();
        assert!(error.contains("a.txt` goes beyond 64.0 GiB of text"), "{error}");
    }
}
