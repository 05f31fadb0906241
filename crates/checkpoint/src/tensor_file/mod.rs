//! Reads and writes one safetensors file.
//!
//! A file starts with the header's length, eight bytes in little-endian order. The header follows:
//! JSON with string metadata and each tensor's name, dtype, shape and offsets. The tensors' bytes
//! follow without gaps. Files that gpipe writes name tensors `layer.parameter`.
//!
//! Files are untrusted. [`TensorFile::open`] reads only the header. It checks the header's length
//! against the file's length before it allocates memory, and rejects inconsistent headers. A
//! tensor's bytes are read on request. The bytes of a written file depend only on its tensors and
//! metadata, not on the order of the tensors.
//!
//! [`write()`] and [`merge`] add digests to the metadata. `gpipe.sha256:NAME` is the SHA-256 of a
//! tensor's name, dtype, shape and bytes. `gpipe.sha256` is the SHA-256 of the rest of the header
//! (details in `digest.rs`). Readers check the header's digest when they open a file, and a
//! tensor's digest when they read the tensor. Files without digests, from other programs, are read
//! unchecked. Reading 1 GiB from the page cache and verifying it took 0.8 s of processor time, of
//! which reading took 0.2 s (one core of an AMD EPYC with SHA extensions, 2026-11-23).
//!
//! - `header`: metadata and tensor descriptions
//! - `digest`: detects changes
//! - `write`: writes tensors to a file, and merges several files
//! - this file: reads

mod digest;
mod header;
mod write;

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Cursor, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use gpipe_files::ReadError;
use safetensors::tensor::{Dtype, TensorInfo};
use sha2::{Digest, Sha256};
use tch::{Kind, Tensor};

use crate::remedy::{USE, remedy};
use header::{HEADER_MAX, Header, LENGTH};
pub use write::{Planned, encode, merge, write, write_planned};

/// The dtypes that can be read. Other dtypes of the format are listed but cannot be read.
const KINDS: [(Dtype, Kind); 10] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I64, Kind::Int64),
    (Dtype::I32, Kind::Int),
    (Dtype::I16, Kind::Int16),
    (Dtype::I8, Kind::Int8),
    (Dtype::U8, Kind::Uint8),
    (Dtype::BOOL, Kind::Bool),
];

/// Buffer size in bytes while a tensor is verified.
const PIECE: usize = 1 << 20;

/// An error of a safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The operating system reported an error.
    #[error("{}: {source}{}", path.display(), remedy(USE, source))]
    Io {
        /// The file, its temporary file while it is written, or its folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The content is not a safetensors file, is not what was requested, or cannot be written as
    /// one.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A rule of a name map does not fit the file.
    #[error("{rule}: {reason}")]
    Rule {
        /// The map's file, the rule's number and its text.
        rule: String,
        /// What is wrong, with the path of the safetensors file.
        reason: String,
    },
}

impl FileError {
    pub(crate) fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), reason: reason.into() }
    }

    fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

/// Why a tensor cannot be written or converted. Names the tensor.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TensorError(pub(crate) String);

impl TensorError {
    pub(crate) fn of(name: &str, reason: impl fmt::Display) -> Self {
        Self(format!("{}: {reason}", shown(&name)))
    }
}

/// A file's description of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The tensor's name.
    pub name: String,
    /// The dtype's name in the format, such as `BF16`.
    pub dtype: String,
    /// The dtype as which the tensor is read; `None` if it cannot be read.
    pub kind: Option<Kind>,
    /// The tensor's shape.
    pub shape: Vec<i64>,
    /// The size in bytes.
    pub bytes: u64,
    /// The SHA-256 of name, dtype, shape and bytes, as recorded in the file; `None` if the file has
    /// no digests.
    pub sha256: Option<String>,
    /// Offset of the bytes from the start of the file.
    start: u64,
}

/// A file, or its bytes in memory.
trait Source: Read + Seek + Send + std::fmt::Debug {}

impl<T: Read + Seek + Send + std::fmt::Debug> Source for T {}

/// An open safetensors file whose header has been read.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Box<dyn Source>,
    entries: Vec<Entry>,
    metadata: BTreeMap<String, String>,
    has_digests: bool,
}

impl TensorFile {
    /// Opens `path` and reads only its header. If the header has a digest, the header is compared
    /// with it.
    ///
    /// # Errors
    /// [`FileError`]. Among others, the file's length contradicts its header, or the header is
    /// damaged.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let io = FileError::io(path);
        let file = gpipe_files::open(path).map_err(|error| match error {
            ReadError::Io(error) => io(error),
            other => FileError::format(path, other.to_string()),
        })?;
        let length = file.metadata().map_err(&io)?.len();
        Self::read_header(Box::new(file), length, path)
    }

    /// Reads the header of a file in memory. `path`, its source or destination, names it in errors.
    ///
    /// # Errors
    /// As [`TensorFile::open`].
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, FileError> {
        let length = bytes.len() as u64;
        Self::read_header(Box::new(Cursor::new(bytes)), length, path)
    }

    fn read_header(mut file: Box<dyn Source>, length: u64, path: &Path) -> Result<Self, FileError> {
        let io = FileError::io(path);
        let text = match header_length(&mut file, length).map_err(&io)? {
            Ok(header_length) => read_exactly(&mut file, header_length).map_err(&io)?,
            Err(reason) => return Err(FileError::format(path, reason)),
        };
        let mut header = Header::parse(&text).map_err(|reason| FileError::format(path, reason))?;
        let start = LENGTH + text.len() as u64;
        check_length(length, start, &header).map_err(|reason| FileError::format(path, reason))?;
        let digests =
            digest::take(&mut header).map_err(|reason| FileError::format(path, reason))?;
        let has_digests = digests.is_some();
        let mut digests = digests.unwrap_or_default();
        let entry = |(name, info): (String, TensorInfo)| {
            let sha256 = digests.remove(&name);
            Entry { sha256, ..Entry::new(name, &info, start) }
        };
        let mut entries: Vec<_> = header.tensors.into_iter().map(entry).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let (path, metadata) = (path.to_owned(), header.metadata);
        Ok(Self { path, file, entries, metadata, has_digests })
    }

    /// The file's tensors, sorted by name.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The file's metadata, without digests.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the file has digests, which detect damage.
    #[must_use]
    pub fn has_digests(&self) -> bool {
        self.has_digests
    }

    /// Reads all tensors and compares each with its digest, in pieces of 1 MiB. Reads nothing if
    /// the file has no digests.
    ///
    /// # Errors
    /// [`FileError`]: names the first tensor that differs from its digest, or reports a failing
    /// disk.
    pub fn verify(&mut self) -> Result<(), FileError> {
        let Self { path, file, entries, .. } = self;
        for entry in entries {
            let Some(said) = &entry.sha256 else { continue };
            let mut hash = entry.begin_digest();
            hash_entry(file.as_mut(), entry, &mut hash).map_err(FileError::io(path))?;
            digest::compare(&entry.name, hash, said)
                .map_err(|reason| FileError::format(path, reason))?;
        }
        Ok(())
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads only the tensor `name`, to the CPU.
    ///
    /// # Errors
    /// [`FileError`]: there is no such tensor, its dtype cannot be read, its bytes differ from its
    /// digest, the disk fails, or memory is exhausted.
    pub fn read(&mut self, name: &str) -> Result<Tensor, FileError> {
        let at = self.position(name)?;
        let Self { path, entries, .. } = self;
        let entry = &entries[at];
        let Some(kind) = entry.kind else {
            let known: Vec<_> = KINDS.iter().map(|(dtype, _)| dtype.to_string()).collect();
            let (dtype, known) = (&entry.dtype, known.join(", "));
            let reason = format!("{} is {dtype}: readable are {known}", shown(&name));
            return Err(FileError::format(path, reason));
        };
        let bytes = self.bytes(at)?;
        let Self { path, entries, .. } = self;
        tensor(&bytes, &entries[at].shape, kind)
            .map_err(|reason| FileError::format(path, TensorError::of(name, reason).to_string()))
    }

    /// The bytes of the tensor `name`, of any dtype.
    ///
    /// # Errors
    /// As [`TensorFile::read`].
    pub(crate) fn bytes_of(&mut self, name: &str) -> Result<Vec<u8>, FileError> {
        let at = self.position(name)?;
        self.bytes(at)
    }

    fn position(&self, name: &str) -> Result<usize, FileError> {
        let found = self.entries.binary_search_by(|entry| entry.name.as_str().cmp(name));
        let missing =
            |_| FileError::format(&self.path, format!("it has no tensor {}", shown(&name)));
        found.map_err(missing)
    }

    /// Reads the bytes of entry `at` and compares them with the tensor's digest.
    fn bytes(&mut self, at: usize) -> Result<Vec<u8>, FileError> {
        let Self { path, file, entries, .. } = self;
        let entry = &entries[at];
        let read = file.seek(SeekFrom::Start(entry.start));
        let bytes = read.and_then(|_| read_exactly(file.as_mut(), entry.bytes));
        let bytes = bytes.map_err(FileError::io(path))?;
        if let Some(said) = &entry.sha256 {
            let mut hash = entry.begin_digest();
            hash.update(&bytes);
            digest::compare(&entry.name, hash, said)
                .map_err(|reason| FileError::format(path, reason))?;
        }
        Ok(bytes)
    }
}

/// Adds a tensor's bytes to `hash`, in pieces of [`PIECE`] bytes.
fn hash_entry(file: &mut dyn Source, entry: &Entry, hash: &mut Sha256) -> io::Result<()> {
    file.seek(SeekFrom::Start(entry.start))?;
    let mut piece = vec![0; PIECE];
    let mut left = entry.bytes;
    while left > 0 {
        let room = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
        file.read_exact(&mut piece[..room])?;
        hash.update(&piece[..room]);
        left -= room as u64;
    }
    Ok(())
}

impl Entry {
    /// Starts the tensor's digest.
    fn begin_digest(&self) -> Sha256 {
        // Lossless, because axes are not negative.
        let shape = self.shape.iter().map(|axis| axis.unsigned_abs());
        digest::begin(&self.name, &self.dtype, shape)
    }

    fn new(name: String, info: &TensorInfo, start: u64) -> Self {
        let (from, to) = info.data_offsets;
        Self {
            name,
            dtype: digest::dtype(info.dtype),
            sha256: None,
            kind: KINDS.iter().find(|(dtype, _)| *dtype == info.dtype).map(|(_, kind)| *kind),
            // Lossless, because the header's check found that each axis fits an i64.
            shape: info.shape.iter().map(|&axis| axis as i64).collect(),
            bytes: (to - from) as u64,
            start: start + from as u64,
        }
    }
}

/// Reads the header's length and checks it against `length`, the file's length.
fn header_length(file: &mut dyn Source, length: u64) -> io::Result<Result<u64, String>> {
    if length < LENGTH {
        let reason = format!("truncated: {length} bytes, a safetensors file has at least {LENGTH}");
        return Ok(Err(reason));
    }
    let mut bytes = [0; LENGTH as usize];
    file.read_exact(&mut bytes)?;
    let header = u64::from_le_bytes(bytes);
    if bytes == *b"version " {
        return Ok(Err("it is a pointer of Git LFS, not the file itself: run git lfs pull".into()));
    }
    if header > HEADER_MAX {
        return Ok(Err("it is not a safetensors file, its header is too long: give one".into()));
    }
    if header > length - LENGTH {
        let least = LENGTH + header;
        return Ok(Err(format!(
            "truncated: {length} bytes, the header alone ends at {least}: fetch it again"
        )));
    }
    Ok(Ok(header))
}

fn check_length(length: u64, start: u64, header: &Header) -> Result<(), String> {
    match start.checked_add(header.data_len()) {
        Some(said) if said == length => Ok(()),
        Some(said) if said < length => {
            Err(format!("has {} bytes after its last tensor", length - said))
        }
        said => {
            let said = said.unwrap_or(u64::MAX);
            Err(format!("truncated: {length} bytes, the header says {said}: fetch it again"))
        }
    }
}

/// Reads the next `count` bytes. Memory may not suffice, even though `count` is within the file's
/// length.
fn read_exactly(file: &mut dyn Source, count: u64) -> io::Result<Vec<u8>> {
    let room = usize::try_from(count).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(room)?;
    file.take(count).read_to_end(&mut bytes)?;
    // The file may have been truncated since it was opened.
    if bytes.len() == room { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn tensor(bytes: &[u8], shape: &[i64], kind: Kind) -> Result<Tensor, String> {
    // tch copies as many bytes as the shape implies, regardless of the slice's length.
    let elements = shape
        .iter()
        .try_fold(1usize, |product, &axis| product.checked_mul(usize::try_from(axis).ok()?));
    let needed = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
    if needed != Some(bytes.len()) {
        return Err(format!("{} bytes are no {kind:?} of shape {shape:?}", bytes.len()));
    }
    if kind == Kind::Bool
        && let Some(byte) = bytes.iter().find(|byte| **byte > 1)
    {
        return Err(format!("a BOOL is 0 or 1, not {byte}"));
    }
    Tensor::f_from_data_size(bytes, shape, kind).map_err(|error| error.to_string())
}

/// Formats text from a file for a message: replaces control characters and truncates long text.
pub fn shown(text: &dyn fmt::Display) -> String {
    const CHARACTERS_MAX: usize = 300;
    let text = text.to_string();
    let mut shown: String = text
        .chars()
        .take(CHARACTERS_MAX)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    if text.chars().nth(CHARACTERS_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_bytes_that_are_not_the_shape_make_no_tensor() {
        for (count, shape) in
            [(7, vec![2]), (9, vec![2]), (8, vec![-2]), (0, vec![]), (8, vec![2; 99])]
        {
            assert!(tensor(&vec![0; count], &shape, Kind::Float).is_err(), "{count}, {shape:?}");
        }
        assert!(tensor(&[0; 8], &[2], Kind::Float).is_ok());
    }

    #[test]
    fn fault_text_of_a_file_is_cut_and_harmless_in_messages() {
        assert_eq!(shown(&"a\u{1b}[31m"), "a\u{fffd}[31m");
        assert_eq!(shown(&"x".repeat(300)), "x".repeat(300));
        assert_eq!(shown(&"é".repeat(301)), "é".repeat(300) + "...");
    }
}
