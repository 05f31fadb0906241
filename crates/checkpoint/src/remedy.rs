//! Remedies for errors of the operating system.

use std::io;

/// The error number of a failing disk on every Unix; `io::ErrorKind` has no stable name for it.
const EIO: i32 = 5;

/// A remedy for a system error, or an empty text.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::FileTooLarge => ": raise the limit on the size of files (ulimit -f)",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": make room, or keep fewer checkpoints"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            ": use a folder that can be written"
        }
        io::ErrorKind::IsADirectory
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::AlreadyExists
        | io::ErrorKind::DirectoryNotEmpty => ": something else has its name: move that away",
        _ if error.raw_os_error() == Some(EIO) => {
            ": the disk may be failing: look at the system's log, or use another one"
        }
        _ => "",
    }
}
