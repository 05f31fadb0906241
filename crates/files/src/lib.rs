//! Reads files with a size limit, and writes them completely or not at all.
//!
//! Every reader of a file uses [`open`] or [`read()`]. Opening a named pipe would wait for its
//! other end, and a file may be larger than memory. [`Aside`] writes a file that replaces another.

#![forbid(unsafe_code)]

mod aside;

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
};

pub use aside::{Aside, WRITING};

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system reported an error.
    #[error("{0}")]
    Io(io::Error),
    /// The path is a folder, a named pipe, a socket or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// The file is larger than the caller allows.
    #[error("it has {bytes} bytes, at most {most} are read")]
    TooLarge {
        /// The file's size, as far as known.
        bytes: u64,
        /// The limit.
        most: u64,
    },
}

impl From<ReadError> for io::Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io(error) => error,
            other => Self::new(io::ErrorKind::InvalidInput, other),
        }
    }
}

/// Opens a regular file, following links.
///
/// # Errors
/// [`ReadError::Io`], [`ReadError::NotAFile`].
pub fn open(path: &Path) -> Result<File, ReadError> {
    match fs::metadata(path).map_err(ReadError::Io)?.is_file() {
        true => File::open(path).map_err(ReadError::Io),
        false => Err(ReadError::NotAFile),
    }
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// [`ReadError`].
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, ReadError> {
    let file = open(path)?;
    let bytes = file.metadata().map_err(ReadError::Io)?.len();
    if bytes > most {
        return Err(ReadError::TooLarge { bytes, most });
    }
    let mut content = Vec::new();
    // The file may grow meanwhile, so the limit applies to the read, too.
    file.take(most.saturating_add(1)).read_to_end(&mut content).map_err(ReadError::Io)?;
    match content.len() as u64 {
        bytes if bytes > most => Err(ReadError::TooLarge { bytes, most }),
        _ => Ok(content),
    }
}

/// Writes a file completely or not at all. The file is on disk when this returns.
///
/// # Errors
/// The system's error. As in [`Aside::publish`], the old file is unchanged then, unless only
/// syncing the folder failed.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let aside = Aside::new(path, folder.unwrap_or(Path::new(".")))?;
    aside.file().write_all(bytes)?;
    aside.publish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("five");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.to_string(), "it has 5 bytes, at most 4 are read");
        assert!(matches!(read(folder.path(), 5), Err(ReadError::NotAFile)));
        let error = read(&folder.path().join("none"), 5).unwrap_err();
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
        // A device has no size and no end.
        assert!(matches!(read(Path::new("/dev/zero"), 5), Err(ReadError::NotAFile)));
        // A file in /proc, which reports a size of 0.
        let told = read(Path::new("/proc/self/status"), 3).unwrap_err();
        assert_eq!(told.to_string(), "it has 4 bytes, at most 3 are read");
    }
}
