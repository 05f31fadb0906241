//! Errors of state on disk. Each names the file, the problem and the remedy.

use std::{io, path::PathBuf, time::Duration};

use crate::remedy::remedy;

/// An error while saving, finding or restoring a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(action, source))]
    Io {
        /// The attempted action: "create", "write", "read" and so on.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file differs from what was written.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint is of another model, optimizer or seed.
    #[error("{} does not fit: {reason}", path.display())]
    Misfit {
        /// The checkpoint.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// There is no checkpoint at the given path.
    #[error("{}: {reason}", path.display())]
    NotFound {
        /// The path that was searched.
        path: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// The folder being written to no longer exists. It is not created again.
    #[error("{}: {reason}", path.display())]
    Gone {
        /// The folder's name.
        path: PathBuf,
        /// What happened to the folder.
        reason: String,
    },
    /// A tensor or number cannot be written.
    #[error("{what}: {reason}")]
    Content {
        /// The tensor, number or file.
        what: String,
        /// Why it cannot be written.
        reason: String,
    },
    /// The writer took longer than the timeout. It continues, and no other checkpoint starts before
    /// it ends.
    #[error("checkpoint {} was not written within {waited:?}: use a faster disk, or raise \
        checkpoint.timeout_s (in a program, Settings::timeout)", path.display())]
    Late {
        /// The checkpoint.
        path: PathBuf,
        /// How long the caller waited.
        waited: Duration,
    },
    /// An error of a safetensors file.
    #[error(transparent)]
    File(#[from] crate::tensor_file::FileError),
    /// Another rank failed, or could not write its part of the checkpoint.
    #[error(transparent)]
    Peer(#[from] gpipe::processes::PeerError),
    /// The pipeline returned an error.
    #[error(transparent)]
    Pipeline(#[from] gpipe::Error),
}

/// A result whose error is [`CheckpointError`].
pub type Result<T> = std::result::Result<T, CheckpointError>;
