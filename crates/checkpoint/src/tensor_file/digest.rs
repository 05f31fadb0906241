//! SHA-256 digests in a file's metadata, by which a reader detects changes.
//!
//! ```text
//! "gpipe.sha256:NAME"   of the tensor NAME: its name, dtype, shape and bytes
//! "gpipe.sha256"        of all other metadata, including these digests, and of each
//!                       tensor's name, dtype and shape
//! ```
//!
//! A digest is 64 lower-case hexadecimal digits. A text is hashed as its length in bytes (8 bytes,
//! little-endian) followed by its bytes. A shape is hashed as its number of axes followed by the
//! axes, 8 bytes each. Entries are hashed in the order of their names. Offsets are not hashed,
//! because the tensors' bytes are.
//!
//! A file has digests of every tensor and of the header, or none. To other programs they are
//! ordinary metadata.

use std::{collections::BTreeMap, fmt::Display};

use safetensors::tensor::{Dtype, TensorInfo};
use sha2::{Digest, Sha256};

use super::{header::Header, shown};

/// The key of the header's digest.
const HEADER: &str = "gpipe.sha256";
/// The key of a tensor's digest, without the tensor's name.
const TENSOR: &str = "gpipe.sha256:";
/// Number of hexadecimal digits of a digest.
const DIGITS: usize = 64;
/// The remedy for a file that differs from what was written.
const REMEDY: &str = "the file is damaged, or another program changed it: fetch or export it again";

/// Starts a tensor's digest with everything but the bytes.
pub(super) fn begin(name: &str, dtype: &str, shape: impl ExactSizeIterator<Item = u64>) -> Sha256 {
    let mut hash = Sha256::new();
    describe(&mut hash, name, dtype, shape);
    hash
}

fn describe(hash: &mut Sha256, name: &str, dtype: &str, shape: impl ExactSizeIterator<Item = u64>) {
    text(hash, name);
    text(hash, dtype);
    number(hash, shape.len() as u64);
    shape.for_each(|axis| number(hash, axis));
}

fn text(hash: &mut Sha256, text: &str) {
    number(hash, text.len() as u64);
    hash.update(text);
}

fn number(hash: &mut Sha256, number: u64) {
    hash.update(number.to_le_bytes());
}

/// Finishes a digest and formats it as hexadecimal digits.
pub(super) fn digits(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares a tensor's digest with the one in its file.
pub(super) fn compare(name: &str, found: Sha256, said: &str) -> Result<(), String> {
    let found = digits(found);
    if found == said {
        return Ok(());
    }
    let (name, said) = (shown(&name), shown(&said));
    Err(format!("{name}: its SHA-256 is {found}, the header says {said}: {REMEDY}"))
}

/// Reserves space for the digests before the tensors are written, so that the header's length does
/// not change later.
pub(super) fn reserve(header: &mut Header) {
    let blank = || "0".repeat(DIGITS);
    header.metadata.retain(|key, _| !is_digest(key));
    for (name, _) in &header.tensors {
        header.metadata.insert(format!("{TENSOR}{name}"), blank());
    }
    header.metadata.insert(HEADER.into(), blank());
}

/// Stores the digest of the tensor `name` in the space that [`reserve`] made.
pub(super) fn put(header: &mut Header, name: &str, digest: Sha256) {
    header.metadata.insert(format!("{TENSOR}{name}"), digits(digest));
}

/// Stores the header's digest. The digests of all tensors must be there already.
pub(super) fn seal(header: &mut Header) {
    let digest = digits(of_header(&header.metadata, &header.tensors));
    header.metadata.insert(HEADER.into(), digest);
}

/// Removes the digests from a header that was read, and returns them by tensor name. `None` if the
/// file has no digests.
///
/// Returns an error if the header differs from what was written, or some digests are missing.
pub(super) fn take(header: &mut Header) -> Result<Option<BTreeMap<String, String>>, String> {
    if !header.metadata.keys().any(|key| is_digest(key)) {
        return Ok(None);
    }
    let Some(said) = header.metadata.get(HEADER) else {
        return Err(format!("its metadata have digests of tensors, but no '{HEADER}': {REMEDY}"));
    };
    let found = digits(of_header(&header.metadata, &header.tensors));
    if found != *said {
        let said = shown(said as &dyn Display);
        return Err(format!("its header's SHA-256 is {found}, it says {said}: {REMEDY}"));
    }
    let mut digests = BTreeMap::new();
    for (name, _) in &header.tensors {
        let Some(digest) = header.metadata.get(&format!("{TENSOR}{name}")) else {
            return Err(format!("its metadata have no digest of {}: {REMEDY}", shown(name)));
        };
        digests.insert(name.clone(), digest.clone());
    }
    let count = header.metadata.keys().filter(|key| key.starts_with(TENSOR)).count();
    if count != digests.len() {
        let tensors = digests.len();
        return Err(format!("it has {tensors} tensors and digests of {count}: {REMEDY}"));
    }
    header.metadata.retain(|key, _| !is_digest(key));
    Ok(Some(digests))
}

fn is_digest(key: &str) -> bool {
    key == HEADER || key.starts_with(TENSOR)
}

fn of_header(metadata: &BTreeMap<String, String>, tensors: &[(String, TensorInfo)]) -> Sha256 {
    let mut hash = Sha256::new();
    let rest: Vec<_> = metadata.iter().filter(|(key, _)| *key != HEADER).collect();
    number(&mut hash, rest.len() as u64);
    for (key, value) in rest {
        text(&mut hash, key);
        text(&mut hash, value);
    }
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, info) in tensors {
        describe(&mut hash, name, &dtype(info.dtype), info.shape.iter().map(|&axis| axis as u64));
    }
    hash
}

/// A dtype's name in the format.
pub(super) fn dtype(dtype: Dtype) -> String {
    dtype.to_string()
}
