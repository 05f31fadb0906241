//! Small text files, read with a bound and written whole or not at all.

use std::path::Path;

use gpipe::Bytes;

use crate::{CliError, metrics::io};

/// A text file of at most so many bytes.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<String, CliError> {
    let bytes = std::fs::metadata(path).map_err(io(path))?.len();
    if bytes > bytes_max {
        let (path, bytes, most) = (path.display(), Bytes(bytes), Bytes(bytes_max));
        return Err(CliError::Usage(format!("{path}: it has {bytes}, at most {most} are read")));
    }
    std::fs::read_to_string(path).map_err(io(path))
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
