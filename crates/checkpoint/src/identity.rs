//! Detects whether a path still names the same folder.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    error::{CheckpointError, Result},
    files::failed,
};

/// The identity of a folder: its device and inode numbers, not its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderIdentity {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl FolderIdentity {
    /// The identity of the folder that is at `path` now.
    ///
    /// # Errors
    /// The folder does not exist, or its metadata cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(failed("look at", path))?;
        Ok(Self { path: path.to_owned(), device: about.dev(), inode: about.ino() })
    }

    /// The path that this identity was made from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same folder, whatever their paths.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Checks that the path still names this folder.
    ///
    /// # Errors
    /// [`CheckpointError::Gone`] if the folder was removed or moved, or another folder is at its
    /// path. [`CheckpointError::Io`] if the system reports another error.
    pub fn check(&self) -> Result<()> {
        let gone = |reason: &str| {
            Err(CheckpointError::Gone { path: self.path.clone(), reason: reason.to_owned() })
        };
        match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                gone("the folder was removed or moved while it was in use")
            }
            Err(error) => Err(failed("look at", &self.path)(error)),
            Ok(about) if (about.dev(), about.ino()) == (self.device, self.inode) => Ok(()),
            Ok(_) => gone(
                "another folder has its name now; the one that was in use was removed or moved",
            ),
        }
    }
}
