//! Remedies for errors of the operating system.

use std::io;

/// The error number of a failing disk on every Unix; `io::ErrorKind` has no stable name for it.
const EIO: i32 = 5;
/// The action of a file that the user named, which is read or written.
pub(crate) const USE: &str = "use";

/// A remedy for a system error of an action such as "read", or an empty text.
pub(crate) fn remedy(action: &str, error: &io::Error) -> &'static str {
    let is_reading = matches!(action, "read" | "look at");
    match error.kind() {
        io::ErrorKind::NotFound if action == USE => ": correct the path",
        io::ErrorKind::NotADirectory if action == USE => {
            ": a part of the path is a file: correct the path"
        }
        io::ErrorKind::NotADirectory if is_reading => {
            ": a part of the path is a file: give the folder of a run or a checkpoint"
        }
        io::ErrorKind::PermissionDenied if is_reading => ": make it readable",
        io::ErrorKind::PermissionDenied if action == USE => ": change its permissions",
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
