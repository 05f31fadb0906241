//! Small text files, read with a bound and written whole or not at all.

use std::{path::Path, sync::Arc};

use gpipe::Bytes;
use gpipe_files::{Aside, ReadError};
use signal_hook::consts::SIGXFSZ;

use crate::CliError;

/// Adds the path to an error of the operating system.
pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CliError + use<> {
    let what = path.display().to_string();
    move |source| CliError::Io { what, source }
}

/// A text file of at most so many bytes.
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

/// Sees that a file can be written later, and leaves what is there as it is.
pub(crate) fn check_writable(path: &Path) -> Result<(), CliError> {
    Aside::new(path, folder_of(path)?).map(drop).map_err(io(path))
}

/// Writes a file that is there whole or not at all, and the folder that it is in. It is on disk
/// when this returns.
pub(crate) fn write_aside(path: &Path, text: &str) -> Result<(), CliError> {
    folder_of(path)?;
    gpipe_files::write(path, text.as_bytes()).map_err(io(path))
}

/// The folder that a file is in, which is made if need be.
fn folder_of(path: &Path) -> Result<&Path, CliError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    Ok(folder)
}

/// Lets a file that grows beyond the limit of the process (`ulimit -f`) be an error of writing, as
/// a full disk is: SIGXFSZ would end the process.
pub(crate) fn limits_are_errors() {
    // With a handler the signal ends nothing, and the write fails. Where there is no such signal
    // there is no such end.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}
