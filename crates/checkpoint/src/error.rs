//! What goes wrong with state on disk: which file, what about it, and what to do.

use std::{io, path::PathBuf, time::Duration};

use crate::remedy::remedy;

/// An error of saving, finding or restoring a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// What was tried: "create", "write", "read" and so on.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that is not what was written.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint of another model, optimizer or seed.
    #[error("{} does not fit: {reason}", path.display())]
    Misfit {
        /// The checkpoint.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// There is none where one was named.
    #[error("{}: {reason}", path.display())]
    NotFound {
        /// Where it was looked for.
        path: PathBuf,
        /// What was found there instead.
        reason: String,
    },
    /// The folder that was written to is not there any more. Nothing is made in its place.
    #[error("{}: {reason}", path.display())]
    Gone {
        /// The folder's name.
        path: PathBuf,
        /// What became of it.
        reason: String,
    },
    /// A tensor that cannot be written, or a number that cannot be.
    #[error("{what}: {reason}")]
    Content {
        /// Which.
        what: String,
        /// Why not.
        reason: String,
    },
    /// The writer did not end in time. It goes on, and no other checkpoint is begun before it ends.
    #[error("checkpoint {} was still being written after {waited:?}: is the disk too slow, or \
        gone?", path.display())]
    Late {
        /// The checkpoint.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A safetensors file.
    #[error(transparent)]
    File(#[from] crate::tensor_file::FileError),
    /// Another process failed, or its part of the checkpoint did.
    #[error(transparent)]
    Peer(#[from] gpipe::processes::PeerError),
    /// The pipeline refused.
    #[error(transparent)]
    Pipeline(#[from] gpipe::Error),
}

/// The result of working with checkpoints.
pub type Result<T> = std::result::Result<T, CheckpointError>;
