//! A folder of pairs: one file for each language.

use std::fs;
use std::path::{Path, PathBuf};

use super::ParallelError;
use crate::{Error, Result};

/// Endings of the names of files of pairs, after the language code.
const ENDINGS: [&str; 2] = [".tsv", ".tsv.gz"];

/// The files in a folder: `LANGUAGE.tsv` and `LANGUAGE.tsv.gz`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The language and path of each file, sorted by name.
    pub files: Vec<(String, PathBuf)>,
    /// Number of entries with another name.
    pub others: usize,
}

/// Finds files of pairs directly in `folder`.
pub(super) fn find(folder: &Path) -> Result<Found> {
    let failed = || Error::io("list", folder);
    let mut found = Found { files: Vec::new(), others: 0 };
    for entry in fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let name = entry.file_name();
        let language = name.to_str().and_then(|name| {
            ENDINGS
                .iter()
                .find_map(|ending| name.strip_suffix(ending))
                .filter(|code| !code.is_empty())
        });
        match language {
            Some(language) => found.files.push((language.to_owned(), entry.path())),
            None => found.others += 1,
        }
    }
    found.files.sort();
    if found.files.is_empty() {
        return Err(ParallelError::NoPairFiles { folder: folder.to_path_buf() }.into());
    }
    Ok(found)
}
