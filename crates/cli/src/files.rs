//! Small text files, read with a bound and written whole or not at all; where what was fetched lies.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use gpipe::Bytes;

use crate::{CliError, metrics::io};

/// The user's folder.
pub(crate) fn home() -> PathBuf {
    std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default()
}

/// Where `make` puts what it fetches: GPIPE_HOME, or ~/.cache/gpipe.
pub(crate) fn gpipe_home() -> PathBuf {
    let own = std::env::var_os("GPIPE_HOME").map(PathBuf::from);
    own.unwrap_or_else(|| home().join(".cache").join("gpipe"))
}

/// A text file of at most so many bytes.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<String, CliError> {
    // A named pipe would be waited for without an end.
    let metadata = std::fs::metadata(path).map_err(io(path))?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(CliError::Usage(format!("{}: it is no regular file", path.display())));
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(io(path))?;
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(io(path))?;
    if text.len() as u64 > bytes_max {
        let (path, most) = (path.display(), Bytes(bytes_max));
        return Err(CliError::Usage(format!("{path}: it is too long, at most {most} are read")));
    }
    Ok(text)
}

/// Sees that a file can be written later, and leaves what is there as it is.
pub(crate) fn check_writable(path: &Path) -> Result<(), CliError> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(io(parent))?;
    }
    let aside = path.with_extension("writing");
    std::fs::write(&aside, "").and_then(|()| std::fs::remove_file(&aside)).map_err(io(&aside))
}

/// Writes a file that is there whole or not at all, and the folder that it is in.
pub(crate) fn write_aside(path: &Path, text: &str) -> Result<(), CliError> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(io(parent))?;
    }
    let aside = path.with_extension("writing");
    std::fs::write(&aside, text).map_err(io(&aside))?;
    std::fs::rename(&aside, path).map_err(io(path))
}
