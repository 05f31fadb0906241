//! Prepared data on disk, which later runs read instead of preparing them again.
//!
//! The name of a file is the SHA-256 of everything that its content depends on. A file begins with
//! the format of its content, and ends with a SHA-256. A damaged file is not used, and is written
//! again.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

/// Maximum number of files in a folder. The oldest files are removed.
pub const FILES_MAX: usize = 32;
/// Maximum size of a folder's files. The oldest files are removed.
const FOLDER_BYTES_MAX: u64 = 8 << 30;
/// Maximum size of a file. Larger data are prepared in every run.
const BYTES_MAX: u64 = 2 << 30;
/// The extension of the files.
const ENDING: &str = "tokens";
/// Size of a hash, in bytes.
const HASH: usize = 32;

/// The key of a file: a hash of everything that its content depends on.
#[derive(Debug, Default)]
pub struct Key(Sha256);

impl Key {
    /// Adds a part of the key, such as a setting. Its length is hashed, too.
    #[must_use]
    pub fn with(mut self, part: &[u8]) -> Self {
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
        self
    }

    /// Adds the content of the file at `path`.
    ///
    /// # Errors
    /// The I/O error of opening or reading the file.
    pub fn with_file(mut self, path: &Path) -> io::Result<Self> {
        let mut own = Sha256::new();
        io::copy(&mut gpipe_files::open(path)?, &mut own)?;
        self.0.update(own.finalize());
        Ok(self)
    }

    /// The name of the file for this key.
    #[must_use]
    pub fn name(self) -> String {
        let hash = self.0.finalize();
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hash}.{ENDING}")
    }
}

/// Reads what [`write()`] kept at `path` in this `format`, a line. `None` if the file does not
/// exist, cannot be read, is damaged or has another format.
#[must_use]
pub fn read<T: DeserializeOwned>(path: &Path, format: &str) -> Option<T> {
    postcard::from_bytes(&content(path, format)?).ok()
}

/// Keeps `value` at `path` in this `format`, a line. Removes the oldest files of the folder above
/// [`FILES_MAX`]. A change of the type needs another format.
///
/// # Errors
/// The I/O error of creating or listing the folder, writing the file or removing an old file.
pub fn write<T: Serialize>(path: &Path, format: &str, value: &T) -> io::Result<()> {
    let mut bytes = postcard::to_extend(value, [format.as_bytes(), b"\n"].concat())
        .map_err(io::Error::other)?;
    let hash = Sha256::digest(&bytes);
    bytes.extend(&hash[..]);
    if bytes.len() as u64 > BYTES_MAX {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    gpipe_files::write(path, &bytes)?;
    remove_oldest(folder)
}

/// Removes the oldest files of a folder above the limits.
fn remove_oldest(folder: &Path) -> io::Result<()> {
    let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == ENDING) {
            // Another process may have removed it.
            let state = path.metadata().and_then(|own| Ok((own.modified()?, own.len())));
            files.extend(state.map(|(modified, length)| (modified, length, path)).ok());
        }
    }
    files.sort_unstable();
    let mut bytes: u64 = files.iter().map(|(_, length, _)| length).sum();
    let mut count = files.len();
    for (_, length, path) in &files {
        if count <= FILES_MAX && bytes <= FOLDER_BYTES_MAX {
            break;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (count, bytes) = (count - 1, bytes - length),
        }
    }
    Ok(())
}

/// The content of an undamaged file.
fn content(path: &Path, format: &str) -> Option<Vec<u8>> {
    let mut bytes = gpipe_files::read(path, BYTES_MAX).ok()?;
    let (rest, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH)?)?;
    rest.strip_prefix(format.as_bytes())?.strip_prefix(b"\n")?;
    if Sha256::digest(rest)[..] != *hash {
        return None;
    }
    bytes.truncate(bytes.len() - HASH);
    bytes.drain(..=format.len());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: &str = "numbers 1";

    #[test]
    fn oracle_what_is_kept_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("lines.jsonl");
        fs::write(&own, "a").unwrap();
        let key = || Key::default().with(b"tokenizer").with_file(&own).unwrap();
        let first = key().name();
        assert_eq!(first, key().name());
        assert_ne!(first, key().with(b"").name());
        fs::write(&own, "b").unwrap();
        assert_ne!(first, key().name(), "it is keyed by content");
        let path = folder.path().join("kept").join(first);
        assert_eq!(read::<Vec<u32>>(&path, FORMAT), None);
        write(&path, FORMAT, &vec![3_u32, 1 << 30]).unwrap();
        assert_eq!(read(&path, FORMAT), Some(vec![3_u32, 1 << 30]));
        assert_eq!(read::<Vec<u32>>(&path, "numbers 2"), None);
    }

    #[test]
    fn fault_a_damaged_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, FORMAT, &vec![7_u32; 100]).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(read::<Vec<u32>>(&path, FORMAT), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read::<Vec<u32>>(&path, FORMAT), None, "cut at {at}");
        }
    }

    #[test]
    fn oracle_the_oldest_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |number: usize| folder.path().join(format!("{number}.{ENDING}"));
        for number in 0..FILES_MAX + 3 {
            write(&path(number), FORMAT, &number).unwrap();
            let seconds = std::time::Duration::from_secs(1000 + number as u64);
            let file = fs::File::options().append(true).open(path(number)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + seconds).unwrap();
        }
        fs::write(folder.path().join("other.txt"), "x").unwrap();
        write(&path(1000), FORMAT, &0_usize).unwrap();
        assert!(!path(0).exists() && !path(3).exists() && path(4).exists() && path(1000).exists());
        assert!(folder.path().join("other.txt").exists());
    }
}
