//! A file that is written aside, under a name of its own, and takes the place of another when it is
//! on disk.

use std::{
    fs::{File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

/// What the name of a file that is being written ends with.
pub const WRITING: &str = ".writing";

/// Longest name that one aside begins with: file systems allow 255 bytes.
const NAME_MAX: usize = 200;

/// A file aside. Dropped before [`Aside::publish`] it is removed; a killed process leaves it as
/// `NAME.RANDOM.writing`, and it is in nobody's way.
#[derive(Debug)]
pub struct Aside {
    file: NamedTempFile,
    folder: PathBuf,
    path: PathBuf,
}

impl Aside {
    /// A new, empty file in `folder`, the one that `path` is in, for what is to become `path`.
    ///
    /// # Errors
    /// The system refuses. The error has no path: the one to name is `path`.
    pub fn new(path: &Path, folder: &Path) -> io::Result<Self> {
        let mut prefix = path.file_name().unwrap_or_default().to_owned();
        if prefix.len() > NAME_MAX {
            prefix = "gpipe".into();
        }
        prefix.push(".");
        // Opened here, and not by the crate: with the permissions of any new file, and the system's
        // own error.
        let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
        let file = Builder::new().prefix(&prefix).suffix(WRITING).make_in(folder, create)?;
        Ok(Self { file, folder: folder.to_owned(), path: path.to_owned() })
    }

    /// The file, to write to.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Syncs the file, gives it its name, and syncs the folder: whoever looks sees the old file or
    /// all of the new one, also after a power failure.
    ///
    /// # Errors
    /// The system refuses. The old file is unchanged then, unless only the folder could not be
    /// synced.
    pub fn publish(self) -> io::Result<()> {
        let Self { file, folder, path } = self;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|failed| failed.error)?;
        File::open(folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write};

    use super::*;

    /// Two that wrote the same file at the same time shared one file aside, and either could
    /// publish half of the other's.
    #[test]
    fn regression_two_that_write_one_file_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let (one, other) = (Aside::new(&path, folder.path()), Aside::new(&path, folder.path()));
        let (one, other) = (one.unwrap(), other.unwrap());
        one.file().write_all(b"one").unwrap();
        other.file().write_all(b"oth").unwrap();
        one.publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        other.file().write_all(b"er").unwrap();
        other.publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"other");
        // One that is given up leaves nothing, and a published one is as readable as any other new
        // file.
        drop(Aside::new(&path, folder.path()).unwrap());
        fs::write(folder.path().join("plain"), "").unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions();
        assert_eq!(mode("config.toml"), mode("plain"));
    }

    #[test]
    fn fault_the_system_s_own_error_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = folder.path().join("no");
        let error = Aside::new(&nowhere.join("file"), &nowhere).unwrap_err();
        assert_eq!(error.to_string(), "No such file or directory (os error 2)");
        fs::create_dir(&nowhere).unwrap();
        let error = Aside::new(&nowhere, folder.path()).unwrap().publish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
