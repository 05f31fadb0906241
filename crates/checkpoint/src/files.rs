//! Performs every change that a checkpoint makes to the file system, one operation at a time.
//! Writes, fsyncs and renames are ordered here only, so tests can delay or fail each of them.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::symlink,
    path::Path,
    sync::Arc,
};

use gpipe_files::ReadError;

use crate::error::{CheckpointError, Result};

/// A change to the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Create a folder.
    CreateFolder,
    /// Create an empty file.
    Create,
    /// Write a file's content.
    Write,
    /// Call fsync on a file or folder.
    Sync,
    /// Rename a file or folder.
    Rename,
    /// Create a symbolic link.
    Link,
    /// Remove a file, or a folder with its content.
    Remove,
}

/// A function called before each operation. If it returns an error, the operation is not performed
/// and fails with that error.
pub type Hook = Arc<dyn Fn(Operation, &Path) -> io::Result<()> + Send + Sync>;

/// Access to the file system, with an optional hook for tests.
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
    /// Calls `hook` before every operation.
    pub fn with_hook(hook: Hook) -> Self {
        Self { hook: Some(hook) }
    }

    fn before(&self, operation: Operation, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(operation, path))
    }

    /// Creates a folder and its missing parents.
    pub(crate) fn create_folder(&self, path: &Path) -> Result<()> {
        let create = || {
            self.before(Operation::CreateFolder, path)?;
            fs::create_dir_all(path)
        };
        create().map_err(failed("create", path))
    }

    /// Creates a folder in an existing one. Unlike [`Files::create_folder`], it does not recreate a
    /// parent that was removed.
    pub(crate) fn create_folder_within(&self, path: &Path) -> Result<()> {
        let create = || {
            self.before(Operation::CreateFolder, path)?;
            fs::create_dir(path)
        };
        create().map_err(failed("create", path))
    }

    /// Creates a file with content `bytes` and syncs it to disk.
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

    /// Syncs a folder, which makes the names in it permanent.
    pub(crate) fn sync_folder(&self, path: &Path) -> Result<()> {
        let sync = || {
            self.before(Operation::Sync, path)?;
            File::open(path)?.sync_all()
        };
        sync().map_err(failed("sync", path))
    }

    /// Renames `from` to `to` atomically: a reader sees either the old or the new one.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let rename = || {
            self.before(Operation::Rename, to)?;
            fs::rename(from, to)
        };
        rename().map_err(failed("rename to", to))
    }

    /// Points the symbolic link `link` at `target` atomically, and creates the link if needed.
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

    /// Removes a file, a link or a folder with its content. A missing path is no error.
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
