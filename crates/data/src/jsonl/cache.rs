//! The cache of encoded samples on disk.
//!
//! The name of a cache file is the SHA-256 of everything that its samples depend on. The file ends
//! with the SHA-256 of its content. A damaged file is not used, and is written again.

use std::{fs, io, path::Path, time::SystemTime};

use sha2::{Digest, Sha256};

use super::{Encoded, Samples};
use crate::bounds::SAMPLE_TOKENS_MAX;

/// The first line of a cache file. A change of the format needs another number.
const MAGIC: &[u8] = b"gpipe tokens 1\n";
/// The extension of cache files.
const ENDING: &str = "tokens";
/// Maximum number of files in a cache folder. The oldest files are removed.
pub const FILES_MAX: usize = 32;
/// Size of a hash, in bytes.
const HASH: usize = 32;
/// Size of a token, in bytes.
const TOKEN: usize = 4;
/// Size of the index of a sample's end, in bytes.
const END: usize = 8;

/// The key of a cache file: a hash of everything that its samples depend on.
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

    /// The name of the cache file for this key.
    #[must_use]
    pub fn name(self) -> String {
        let hash = self.0.finalize();
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hash}.{ENDING}")
    }
}

/// Reads the samples cached at `path`. `None` if the file does not exist, cannot be read or is
/// damaged.
#[must_use]
pub fn read(path: &Path) -> Option<Encoded> {
    let most = SAMPLE_TOKENS_MAX as u64 * (TOKEN + END) as u64;
    let bytes = gpipe_files::read(path, most).ok()?;
    let (content, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH)?)?;
    if Sha256::digest(content)[..] != *hash {
        return None;
    }
    let rest = content.strip_prefix(MAGIC)?;
    let (tokens, rest) = list::<TOKEN, _>(rest, u32::from_le_bytes)?;
    let (ends, rest) = list::<END, _>(rest, u64::from_le_bytes)?;
    let ends: Vec<usize> = ends.into_iter().map(usize::try_from).collect::<Result<_, _>>().ok()?;
    let ascend = ends.windows(2).all(|pair| pair.first() < pair.last());
    if !rest.is_empty() || !ascend || ends.last().copied().unwrap_or(0) != tokens.len() {
        return None;
    }
    let samples = Samples { tokens, ends };
    Some(Encoded { samples, ..Encoded::default() })
}

/// Parses a list with its length. Returns the list and the bytes after it.
fn list<const N: usize, T>(bytes: &[u8], of: fn([u8; N]) -> T) -> Option<(Vec<T>, &[u8])> {
    let (count, rest) = bytes.split_first_chunk::<8>()?;
    let count = usize::try_from(u64::from_le_bytes(*count)).ok()?;
    let (own, rest) = rest.split_at_checked(count.checked_mul(N)?)?;
    let (all, _) = own.as_chunks::<N>();
    Some((all.iter().map(|chunk| of(*chunk)).collect(), rest))
}

/// Caches samples at `path`, and removes the oldest files of the folder above [`FILES_MAX`].
///
/// Samples of a file with skipped lines are not cached, so that each run lists the skipped lines.
///
/// # Errors
/// The I/O error of creating or listing the folder, writing the file or removing an old file.
pub fn write(path: &Path, encoded: &Encoded) -> io::Result<()> {
    if encoded.left_out > 0 {
        return Ok(());
    }
    let Samples { tokens, ends } = &encoded.samples;
    let mut bytes = MAGIC.to_vec();
    bytes.extend((tokens.len() as u64).to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes.extend((ends.len() as u64).to_le_bytes());
    bytes.extend(ends.iter().flat_map(|end| (*end as u64).to_le_bytes()));
    let hash = Sha256::digest(&bytes);
    bytes.extend(&hash[..]);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    gpipe_files::write(path, &bytes)?;
    let mut files: Vec<(SystemTime, std::path::PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == ENDING) {
            files.push((path.metadata()?.modified()?, path));
        }
    }
    files.sort_unstable();
    let old = files.len().saturating_sub(FILES_MAX);
    files.iter().take(old).try_for_each(|(_, path)| fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::samples::tests::samples;

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
        assert!(read(&path).is_none());
        let encoded = Encoded { samples: samples(&[3, 9, 2]), ..Encoded::default() };
        write(&path, &encoded).unwrap();
        assert_eq!(read(&path), Some(encoded));
    }

    #[test]
    fn fault_a_damaged_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, &Encoded { samples: samples(&[3, 9]), ..Encoded::default() }).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read(&path), None, "cut at {at}");
        }
    }

    #[test]
    fn fault_the_folder_does_not_grow_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let encoded = Encoded { samples: samples(&[3]), ..Encoded::default() };
        for number in 0..FILES_MAX + 3 {
            write(&folder.path().join(format!("{number}.tokens")), &encoded).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), FILES_MAX);
    }
}
