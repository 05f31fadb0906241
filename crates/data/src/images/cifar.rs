//! CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) in their binary form.
//!
//! A record is its label (in CIFAR-100, a coarse and a fine label), followed by the red, green and
//! blue planes of an image of 32 x 32 pixels.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::decode::read;
use super::{Image, ImageSet};
use crate::hash::StableHasher;
use crate::{Error, Result};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;

/// Maximum size of a file of class names, in bytes.
const NAMES_BYTES_MAX: u64 = 1 << 16;

/// The classes of CIFAR-10, for a folder without `batches.meta.txt`.
const CIFAR_10_CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// One of the two collections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CifarKind {
    /// 10 classes: `data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin` and
    /// `batches.meta.txt`.
    Cifar10,
    /// 100 classes, the fine ones: `train.bin`, `test.bin` and `fine_label_names.txt`.
    Cifar100,
}

impl CifarKind {
    /// Number of classes.
    pub fn classes(self) -> usize {
        match self {
            Self::Cifar10 => 10,
            Self::Cifar100 => 100,
        }
    }

    /// Number of bytes before the pixels. The last of them is the label.
    fn label_bytes(self) -> usize {
        match self {
            Self::Cifar10 => 1,
            Self::Cifar100 => 2,
        }
    }

    fn record_bytes(self) -> usize {
        self.label_bytes() + 3 * PLANE
    }

    /// The folder that the archive unpacks to.
    fn folder(self) -> &'static str {
        match self {
            Self::Cifar10 => "cifar-10-batches-bin",
            Self::Cifar100 => "cifar-100-binary",
        }
    }

    fn names_file(self) -> &'static str {
        match self {
            Self::Cifar10 => "batches.meta.txt",
            Self::Cifar100 => "fine_label_names.txt",
        }
    }

    /// The files of a part, and the number of records in each.
    fn files(self, part: CifarPart) -> (&'static [&'static str], usize) {
        match (self, part) {
            (Self::Cifar10, CifarPart::Train) => (
                &[
                    "data_batch_1.bin",
                    "data_batch_2.bin",
                    "data_batch_3.bin",
                    "data_batch_4.bin",
                    "data_batch_5.bin",
                ],
                10_000,
            ),
            (Self::Cifar10, CifarPart::Test) => (&["test_batch.bin"], 10_000),
            (Self::Cifar100, CifarPart::Train) => (&["train.bin"], 50_000),
            (Self::Cifar100, CifarPart::Test) => (&["test.bin"], 10_000),
        }
    }
}

/// A part of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CifarPart {
    /// 50,000 images.
    Train,
    /// 10,000 images.
    Test,
}

/// A part of CIFAR-10 or CIFAR-100, held in memory.
#[derive(Clone)]
pub struct Cifar {
    kind: CifarKind,
    classes: Vec<String>,
    /// The path and the bytes of each file of records.
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl std::fmt::Debug for Cifar {
    /// Omits the 150 MB of pixels.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Cifar")
            .field("kind", &self.kind)
            .field("images", &self.len())
            .finish_non_exhaustive()
    }
}

impl Cifar {
    /// Reads a part from `folder`, or from the subfolder that the archive unpacks to
    /// (`cifar-10-batches-bin` or `cifar-100-binary`).
    ///
    /// # Errors
    /// Fails if a file is missing, cannot be read or has the wrong size, or if a label is out of
    /// range. Fails if the file of names exists but does not have one name per class.
    pub fn open(folder: &Path, kind: CifarKind, part: CifarPart) -> Result<Self> {
        let unpacked = folder.join(kind.folder());
        let folder = if unpacked.is_dir() { &unpacked } else { folder };
        let (names, records) = kind.files(part);
        let missing: Vec<&str> =
            names.iter().copied().filter(|name| !folder.join(name).is_file()).collect();
        if !missing.is_empty() {
            return Err(malformed(
                folder,
                format!("these files are missing: {}", missing.join(", ")),
            ));
        }
        let files = names
            .iter()
            .map(|name| {
                let path = folder.join(name);
                let bytes = records_of(&path, kind, records)?;
                Ok((path, bytes))
            })
            .collect::<Result<_>>()?;
        Ok(Self { kind, classes: class_names(folder, kind)?, files })
    }

    /// The file of an image, the record's index within that file, and the record's bytes.
    fn record(&self, index: usize) -> Option<(&Path, usize, &[u8])> {
        let per_file = self.files.first()?.1.len() / self.kind.record_bytes();
        let (path, bytes) = self.files.get(index / per_file)?;
        let number = index % per_file;
        let record = bytes.chunks_exact(self.kind.record_bytes()).nth(number)?;
        Some((path, number, record))
    }
}

impl ImageSet for Cifar {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.files.iter().map(|(_, bytes)| bytes.len() / self.kind.record_bytes()).sum()
    }

    fn class(&self, index: usize) -> usize {
        let label =
            |(_, _, record): (_, _, &[u8])| record.get(self.kind.label_bytes() - 1).copied();
        self.record(index).and_then(label).map_or(0, usize::from)
    }

    fn name(&self, index: usize) -> String {
        match self.record(index) {
            Some((path, number, _)) => format!("{} record {number}", path.display()),
            None => format!("{} image {index}", self.kind.folder()),
        }
    }

    fn image(&self, index: usize) -> Result<Image> {
        let (_, _, record) =
            self.record(index).ok_or(Error::NoSuchImage { index, images: self.len() })?;
        let mut pixels = vec![0; 3 * PLANE];
        let planes = record.get(self.kind.label_bytes()..).unwrap_or_default();
        for (channel, plane) in planes.chunks_exact(PLANE).enumerate() {
            let to = pixels.iter_mut().skip(channel).step_by(3);
            to.zip(plane).for_each(|(to, &value)| *to = value);
        }
        Ok(Image { height: SIDE, width: SIDE, pixels })
    }

    /// A hash of the classes and all bytes.
    fn fingerprint(&self) -> u64 {
        let mut hasher = StableHasher::new();
        self.classes.iter().for_each(|class| hasher.field(class.as_bytes()));
        self.files.iter().for_each(|(_, bytes)| hasher.field(bytes));
        hasher.finish()
    }
}

/// The bytes of a file of records, after checking its size and labels.
fn records_of(path: &Path, kind: CifarKind, records: usize) -> Result<Vec<u8>> {
    let expected = records * kind.record_bytes();
    let size = fs::metadata(path).map_err(Error::io("read", path))?.len();
    if size != expected as u64 {
        return Err(malformed(path, format!("it has {size} bytes and not {expected}")));
    }
    let bytes = read(path, expected as u64)?;
    let labels = bytes.iter().skip(kind.label_bytes() - 1).step_by(kind.record_bytes());
    match labels.enumerate().find(|(_, label)| usize::from(**label) >= kind.classes()) {
        Some((record, label)) => Err(malformed(
            path,
            format!(
                "record {record} has the label {label}, and there are {} classes",
                kind.classes()
            ),
        )),
        None => Ok(bytes),
    }
}

/// The class names: from their file, else the well-known names, else numbers.
fn class_names(folder: &Path, kind: CifarKind) -> Result<Vec<String>> {
    let path = folder.join(kind.names_file());
    let bytes = match read(&path, NAMES_BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(match kind {
                CifarKind::Cifar10 => CIFAR_10_CLASSES.map(str::to_owned).to_vec(),
                CifarKind::Cifar100 => (0..100).map(|class| class.to_string()).collect(),
            });
        }
        Err(error) => return Err(error),
    };
    let text = String::from_utf8_lossy(&bytes);
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    if names.len() != kind.classes() {
        let reason = format!("it has {} names for {} classes", names.len(), kind.classes());
        return Err(malformed(&path, reason));
    }
    Ok(names)
}

fn malformed(path: &Path, reason: String) -> Error {
    Error::Cifar { path: path.to_path_buf(), reason }
}
