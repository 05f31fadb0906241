//! Small text files: read with a size limit, and written whole or not at all.

use std::{
    fs::File,
    io::{ErrorKind, Write},
    path::Path,
    sync::Arc,
};

use gpipe::Bytes;
use gpipe_files::{Aside, ReadError};
use signal_hook::consts::SIGXFSZ;

use crate::CliError;

/// Adds the path to an error of the operating system.
pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CliError + use<> {
    let what = path.display().to_string();
    move |source| CliError::Io { what, source }
}

/// A remedy for an error of the operating system, or an empty text.
pub(crate) fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => ": correct the path",
        ErrorKind::IsADirectory => ": give a file, not a folder",
        ErrorKind::NotADirectory => ": a part of the path is a file: correct the path",
        ErrorKind::ReadOnlyFilesystem => ": give a path that can be written",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ": make room",
        ErrorKind::FileTooLarge => ": raise the limit on the size of files (ulimit -f)",
        _ => "",
    }
}

/// Reads a text file of at most `bytes_max` bytes.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<String, CliError> {
    let refused = |reason: String| CliError::Usage(format!("{}: {reason}", path.display()));
    let bytes = gpipe_files::read(path, bytes_max).map_err(|error| match error {
        ReadError::Io(error) => io(path)(error),
        ReadError::NotAFile => refused(error.to_string()),
        ReadError::TooLarge { most, .. } => {
            refused(format!("it is too long, at most {} are read", Bytes(most)))
        }
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        refused(format!("it is no UTF-8 text, from byte {offset} on"))
    })
}

/// `text` without the byte order mark with which some editors begin a file.
pub(crate) fn without_mark(text: String) -> String {
    text.strip_prefix('\u{feff}').map(ToOwned::to_owned).unwrap_or(text)
}

/// Checks that a file can be written later, and leaves the existing one unchanged.
pub(crate) fn check_writable(path: &Path) -> Result<(), CliError> {
    aside(path).map(drop)
}

/// Writes a file whole or not at all, and creates its folder if needed. The file is on disk when
/// this returns.
pub(crate) fn write_aside(path: &Path, text: &str) -> Result<(), CliError> {
    write_aside_with(path, |mut file| file.write_all(text.as_bytes()))
}

/// As [`write_aside`], of what `write` writes.
pub(crate) fn write_aside_with(
    path: &Path,
    write: impl FnOnce(&File) -> std::io::Result<()>,
) -> Result<(), CliError> {
    let aside = aside(path)?;
    write(aside.file()).and_then(|()| aside.publish()).map_err(io(path))
}

/// A file that takes the place of `path`, whose folder is created if needed. A link stays, and what
/// it leads to is replaced: as root, `/dev/stdout` itself would be.
fn aside(path: &Path) -> Result<Aside, CliError> {
    let path = &std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    Aside::new(path, folder_of(path)?).map_err(io(path))
}

/// The folder of a file, which is created if needed.
pub(crate) fn folder_of(path: &Path) -> Result<&Path, CliError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    Ok(folder)
}

/// Turns exceeding the process's file size limit (`ulimit -f`) into a write error, like a full
/// disk. Without this, SIGXFSZ ends the process.
pub(crate) fn limits_are_errors() {
    // With a handler, the signal has no effect and the write fails. A system without the signal has
    // no such limit.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}
