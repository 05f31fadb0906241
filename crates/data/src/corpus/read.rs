//! Walking folders and reading text.

use std::fs;
use std::path::{Path, PathBuf};

use gpipe_files::ReadError;

use crate::{Error, Omissions, Result, bounds::TEXT_ENTRIES_MAX};

const HIDDEN: (&str, &str) = ("hidden entry", "hidden entries");
const LINK: (&str, &str) = ("symbolic link", "symbolic links");
const SPECIAL: (&str, &str) = ("socket, pipe or device", "sockets, pipes and devices");

/// Maximum size of a file: 1 GiB. A corpus is held in memory, several times over while it is
/// encoded.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// A file under a folder.
#[derive(Debug)]
pub(super) struct Entry {
    /// The path to open.
    pub(super) path: PathBuf,
    /// The path relative to the folder walked, with `/` on every system.
    pub(super) relative: String,
}

/// Every regular file under `folder`, sorted by relative path. Hidden entries and symbolic links
/// are left out and counted in `left_out`, so the walk always ends.
pub(super) fn walk(folder: &Path, left_out: &mut Omissions) -> Result<Vec<Entry>> {
    walk_at_most(folder, left_out, TEXT_ENTRIES_MAX)
}

fn walk_at_most(top: &Path, left_out: &mut Omissions, most: usize) -> Result<Vec<Entry>> {
    let (mut found, mut seen) = (Vec::new(), 0);
    let mut folders = vec![(top.to_path_buf(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
            let entry = entry.map_err(Error::io("list", &folder))?;
            seen += 1;
            if seen > most {
                let most = format!("{most} files and folders");
                return Err(Error::TooMuchText(top.to_path_buf(), most));
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = entry.path();
            let relative = format!("{prefix}{name}");
            if name.starts_with('.') {
                left_out.add(HIDDEN, relative);
                continue;
            }
            // `DirEntry::file_type` does not follow links: a link is neither a folder nor a file
            // here.
            let kind = entry.file_type().map_err(Error::io("read", &path))?;
            if kind.is_dir() {
                folders.push((path, relative + "/"));
            } else if kind.is_file() {
                found.push(Entry { path, relative });
            } else if kind.is_symlink() {
                left_out.add(LINK, relative);
            } else {
                left_out.add(SPECIAL, relative);
            }
        }
    }
    // Names that are not UTF-8 may look alike.
    found.sort_by(|a, b| (&a.relative, &a.path).cmp(&(&b.relative, &b.path)));
    Ok(found)
}

/// The size of a file. Links are followed.
pub(super) fn size_bytes(path: &Path) -> Result<u64> {
    let metadata = fs::metadata(path).map_err(Error::io("read", path))?;
    Ok(metadata.len())
}

/// The bytes of a file of at most [`FILE_BYTES_MAX`] bytes.
pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>> {
    at_most(path, FILE_BYTES_MAX)
}

/// The text of a regular file of at most `most` bytes.
pub(crate) fn text_of_at_most(path: &Path, most: u64) -> Result<String> {
    text(path, at_most(path, most)?)
}

fn at_most(path: &Path, most: u64) -> Result<Vec<u8>> {
    gpipe_files::read(path, most).map_err(|error| match error {
        ReadError::Io(source) => Error::io("read", path)(source),
        ReadError::NotAFile => Error::NotAFile { path: path.to_path_buf() },
        ReadError::TooLarge { bytes, most } => {
            Error::FileTooLarge { path: path.to_path_buf(), bytes, most }
        }
    })
}

/// The bytes as text, or an error with the offset of the first invalid byte.
pub(super) fn text(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| Error::NotUtf8 {
        path: path.to_path_buf(),
        offset: error.utf8_error().valid_up_to(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two such names were in the order in which the disk lists them.
    #[cfg(target_os = "linux")]
    #[test]
    fn regression_names_that_are_not_utf8_are_in_order() {
        use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

        let folder = tempfile::tempdir().unwrap();
        let name = |byte: u8| folder.path().join(OsStr::from_bytes(&[byte, b'.', b't']));
        for byte in [0xe9, 0xe8, 0xff, 0xe7, 0xfe] {
            fs::write(name(byte), "x").unwrap();
        }
        let found = walk(folder.path(), &mut Omissions::default()).unwrap();
        let found: Vec<PathBuf> = found.into_iter().map(|entry| entry.path).collect();
        assert_eq!(found, [0xe7, 0xe8, 0xe9, 0xfe, 0xff].map(name));
    }

    #[test]
    fn fault_a_folder_with_too_many_entries_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let walk = |most| walk_at_most(folder.path(), &mut Omissions::default(), most);
        assert_eq!(walk(3).unwrap().len(), 3);
        let error = walk(2).unwrap_err().to_string();
        assert!(error.contains("beyond 2 files and folders") && error.contains("name a part"));
    }
}
