//! Every change that a checkpoint makes to the file system, one operation at a time: the only place
//! where the order of writes, fsyncs and renames meets the disk, and so the place to slow it down
//! or to let it fail.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::symlink,
    path::Path,
    sync::Arc,
};

use gpipe_files::ReadError;

use crate::error::{CheckpointError, Result};

/// A change that is about to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A new folder.
    CreateFolder,
    /// A new, empty file.
    Create,
    /// The content of a file.
    Write,
    /// fsync of a file or folder.
    Sync,
    /// A new name for a file or folder.
    Rename,
    /// A new symbolic link.
    Link,
    /// Removal of a file or folder with all that is in it.
    Remove,
}

/// Called before each operation; its error takes the operation's place.
pub type Hook = Arc<dyn Fn(Operation, &Path) -> io::Result<()> + Send + Sync>;

/// The file system, with a hook for tests.
#[derive(Clone, Default)]
pub struct Files {
    hook: Option<Hook>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("hooked", &self.hook.is_some()).finish()
    }
}

impl Files {
    /// With `hook` before every operation.
    pub fn with_hook(hook: Hook) -> Self {
        Self { hook: Some(hook) }
    }

    fn before(&self, operation: Operation, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(operation, path))
    }

    /// A new folder and its parents.
    pub(crate) fn create_folder(&self, path: &Path) -> Result<()> {
        let create = || {
            self.before(Operation::CreateFolder, path)?;
            fs::create_dir_all(path)
        };
        create().map_err(failed("create", path))
    }

    /// A new folder in one that is there: a folder that is gone is not made again.
    pub(crate) fn create_folder_within(&self, path: &Path) -> Result<()> {
        let create = || {
            self.before(Operation::CreateFolder, path)?;
            fs::create_dir(path)
        };
        create().map_err(failed("create", path))
    }

    /// A new file with `bytes`, on disk when this returns.
    pub(crate) fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let write = || {
            self.before(Operation::Create, path)?;
            let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
            self.before(Operation::Write, path)?;
            file.write_all(bytes)?;
            self.before(Operation::Sync, path)?;
            file.sync_all()
        };
        write().map_err(failed("write", path))
    }

    /// Makes the names in a folder permanent.
    pub(crate) fn sync_folder(&self, path: &Path) -> Result<()> {
        let sync = || {
            self.before(Operation::Sync, path)?;
            File::open(path)?.sync_all()
        };
        sync().map_err(failed("sync", path))
    }

    /// Gives `from` the name `to`, at once: whoever looks sees the one or the other.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let rename = || {
            self.before(Operation::Rename, to)?;
            fs::rename(from, to)
        };
        rename().map_err(failed("rename to", to))
    }

    /// Lets the symbolic link `link` name `target`, at once.
    pub(crate) fn point(&self, link: &Path, target: &str) -> Result<()> {
        let aside = link.with_extension("writing");
        self.remove(&aside)?;
        let create = || {
            self.before(Operation::Link, &aside)?;
            symlink(target, &aside)
        };
        create().map_err(failed("link", &aside))?;
        self.rename(&aside, link).inspect_err(|_| {
            let _ = self.remove(&aside);
        })
    }

    /// Removes a file, a link or a folder with all that is in it; it is no error if there is none.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        let remove = || {
            let about = match path.symlink_metadata() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                about => about?,
            };
            self.before(Operation::Remove, path)?;
            if about.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
        };
        remove().map_err(failed("remove", path))
    }
}

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    gpipe_files::read(path, limit).map_err(|error| match error {
        ReadError::Io(error) => failed("read", path)(error),
        other => CheckpointError::Damaged { path: path.to_owned(), reason: other.to_string() },
    })
}

pub(crate) fn failed(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { action, path, source }
}
