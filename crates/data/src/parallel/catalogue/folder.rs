//! The catalogues below a folder.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Catalogue, language};
use crate::parallel::ParallelError;
use crate::{Error, Result};

/// No folder of catalogues has more entries than this, and none is deeper.
const ENTRIES_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 32;

/// The folder in which a language's catalogues lie.
const MESSAGES: &str = "LC_MESSAGES";

/// A catalogue, and its language if its path says so.
#[derive(Debug)]
pub(in crate::parallel) struct CatalogueFile {
    pub(in crate::parallel) path: PathBuf,
    pub(in crate::parallel) code: Option<String>,
}

/// What is below a folder.
#[derive(Debug, Default)]
pub(in crate::parallel) struct Found {
    /// Sorted by path.
    pub(in crate::parallel) files: Vec<CatalogueFile>,
    /// Catalogues in English or in what is no language, and links to catalogues.
    pub(in crate::parallel) passed_over: usize,
    /// Folders that cannot be listed, and why.
    pub(in crate::parallel) unreadable: Vec<(PathBuf, String)>,
}

/// All `CODE/LC_MESSAGES/*.mo` and `*.po` below `root`. Hidden entries and symbolic links are passed over, so the walk ends.
pub(in crate::parallel) fn find(root: &Path) -> Result<Found> {
    let mut found = Found::default();
    let mut folders = vec![(root.to_path_buf(), 0)];
    let mut entries = 0;
    while let Some((folder, depth)) = folders.pop() {
        let listed = match fs::read_dir(&folder) {
            Ok(listed) => listed,
            Err(error) if depth == 0 => return Err(Error::io("list", root)(error)),
            Err(error) => {
                found.unreadable.push((folder, format!("cannot be listed: {error}")));
                continue;
            }
        };
        for entry in listed {
            let entry = entry.map_err(Error::io("list", &folder))?;
            entries += 1;
            if entries > ENTRIES_MAX {
                return Err(ParallelError::TooManyFiles {
                    folder: root.into(),
                    limit: ENTRIES_MAX,
                }
                .into());
            }
            let path = entry.path();
            // `DirEntry::file_type` does not follow links: a link is neither a folder nor a file here.
            let kind = entry.file_type().map_err(Error::io("read", &path))?;
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if kind.is_dir() && !is_hidden {
                if depth == DEPTH_MAX {
                    let reason = format!("is more than {DEPTH_MAX} folders deep");
                    found.unreadable.push((path, reason));
                } else {
                    folders.push((path, depth + 1));
                }
            } else if kind.is_file() && !is_hidden {
                found.add(path);
            } else if kind.is_symlink() && is_catalogue(&path) {
                found.passed_over += 1;
            }
        }
    }
    found.files.sort_by(|a, b| a.path.cmp(&b.path));
    found.unreadable.sort();
    Ok(found)
}

impl Found {
    fn add(&mut self, path: PathBuf) {
        let ending = path.extension().and_then(|ending| ending.to_str());
        let code = folder_code(&path);
        match (ending, &code) {
            (Some("mo" | "po"), Some(Some(_))) | (Some("po"), None) => {
                self.files.push(CatalogueFile { path, code: code.flatten() });
            }
            (Some("mo" | "po"), _) => self.passed_over += 1,
            _ => {}
        }
    }
}

fn is_catalogue(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "mo" || ending == "po")
}

/// Of `CODE/LC_MESSAGES/x.mo`: the language, which may be none; else nothing.
fn folder_code(path: &Path) -> Option<Option<String>> {
    let folder =
        path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == MESSAGES))?;
    let code = folder.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    Some(code.and_then(language::code))
}

impl CatalogueFile {
    /// The language of the catalogue: that of its folder; else of its header; else of its name (`de.po`).
    pub(in crate::parallel) fn language(&self, catalogue: &Catalogue) -> Option<String> {
        if self.code.is_some() {
            return self.code.clone();
        }
        let stem = || self.path.file_stem().and_then(|stem| stem.to_str());
        let header = catalogue.language.as_deref().and_then(language::code);
        header.or_else(|| stem().and_then(language::code))
    }
}
