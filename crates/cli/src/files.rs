//! Small text files, read with a bound and written whole or not at all.

use std::{
    io::{Read, Write},
    path::Path,
    sync::Arc,
};

use gpipe::Bytes;
use gpipe_checkpoint::aside::Aside;
use signal_hook::consts::SIGXFSZ;

use crate::{CliError, metrics::io};

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
    Aside::new(path, folder_of(path)?).map(drop).map_err(io(path))
}

/// Writes a file that is there whole or not at all, and the folder that it is in. It is on disk when this returns.
pub(crate) fn write_aside(path: &Path, text: &str) -> Result<(), CliError> {
    let aside = Aside::new(path, folder_of(path)?).map_err(io(path))?;
    aside.file().write_all(text.as_bytes()).map_err(io(path))?;
    aside.publish().map_err(io(path))
}

/// The folder that a file is in, which is made if need be.
fn folder_of(path: &Path) -> Result<&Path, CliError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    Ok(folder)
}

/// Lets a file that grows beyond the limit of the process (`ulimit -f`) be an error of writing, as a full disk is: SIGXFSZ
/// would end the process.
pub(crate) fn limits_are_errors() {
    // With a handler the signal ends nothing, and the write fails. Where there is no such signal there is no such end.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}
