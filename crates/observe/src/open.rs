//! Opening files to read them.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

/// Opens a regular file: to open a named pipe is to wait for its other end.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
}
