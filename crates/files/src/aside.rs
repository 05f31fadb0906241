//! A file that is written under a temporary name and renamed when it is complete and on disk.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

use crate::ReadError;

/// The suffix of a temporary file's name.
pub const WRITING: &str = ".writing";

/// Maximum length of a target name that the temporary name starts with. File systems allow 255
/// bytes.
const NAME_MAX: usize = 200;

/// A temporary file that replaces its target. Dropping it before [`Aside::publish`] removes it. A
/// killed process leaves it as `NAME.RANDOM.writing`, which is harmless.
#[derive(Debug)]
pub struct Aside {
    file: NamedTempFile,
    folder: PathBuf,
    path: PathBuf,
}

impl Aside {
    /// Creates an empty temporary file for `path` in `folder`, which must be the folder of `path`.
    ///
    /// # Errors
    /// The system's error. It contains no path; callers should report `path`. A device or a pipe is
    /// refused: a file would take its place.
    pub fn new(path: &Path, folder: &Path) -> io::Result<Self> {
        if fs::metadata(path).is_ok_and(|own| !own.is_file() && !own.is_dir()) {
            let reason = format!("{}: name a file", ReadError::NotAFile);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let mut prefix = path.file_name().unwrap_or_default().to_owned();
        if prefix.len() > NAME_MAX {
            prefix = "gpipe".into();
        }
        prefix.push(".");
        // Opened here rather than by `tempfile`, to get the permissions of any new file and the
        // system's unmodified error.
        let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
        let file = Builder::new().prefix(&prefix).suffix(WRITING).make_in(folder, create)?;
        Ok(Self { file, folder: folder.to_owned(), path: path.to_owned() })
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Syncs the file, renames it and syncs the folder. A reader sees either the old file or the
    /// complete new one, even after a power failure.
    ///
    /// # Errors
    /// The system's error. The old file is unchanged then, unless only syncing the folder failed.
    pub fn publish(self) -> io::Result<()> {
        let Self { file, folder, path } = self;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|failed| failed.error)?;
        File::open(folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Regression: two writers of one file must not share a temporary file, or either could publish
    /// half of the other's content.
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
        // A dropped file leaves nothing, and a published one has the permissions of any new file.
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
        // As root, a picture that was written to /dev/null took the place of the device.
        let error = Aside::new(Path::new("/dev/null"), Path::new("/dev")).unwrap_err();
        assert_eq!(error.to_string(), "it is not a regular file: name a file");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
