//! Which folder a path names: the one that was there before, or another.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    error::{CheckpointError, Result},
    files::failed,
};

/// A folder, told from others by its numbers in the file system and not by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderIdentity {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl FolderIdentity {
    /// The folder that has the name `path` now.
    ///
    /// # Errors
    /// There is none, or it cannot be looked at.
    pub fn of(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(failed("look at", path))?;
        Ok(Self { path: path.to_owned(), device: about.dev(), inode: about.ino() })
    }

    /// Its name when it was looked at first.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are one folder, whatever their names.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Sees that its name still names it.
    ///
    /// # Errors
    /// [`CheckpointError::Gone`]: it was removed or moved, or another folder has its name. Another
    /// error of the system's.
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
