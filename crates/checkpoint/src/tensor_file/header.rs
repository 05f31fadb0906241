//! A safetensors header: `{"__metadata__": {"k": "v"}, "name": {"dtype", "shape", "data_offsets"},
//! ..}`.
//!
//! This module parses and renders the text, for two reasons. The `safetensors` crate keeps the last
//! of two tensors of one name, and it writes metadata in random order. The crate's `Metadata::new`
//! validates offsets and sizes. The limits beyond that are libtorch's.

use std::{collections::BTreeMap, fmt};

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, MapAccess, Visitor},
    ser::SerializeMap,
};

use super::{TensorError, shown};

/// Maximum length of a header in bytes, set by the format.
pub(super) const HEADER_MAX: u64 = 100_000_000;
/// Size in bytes of the number before the header, which is the header's length.
pub(super) const LENGTH: u64 = 8;
/// Maximum length of a tensor's name, in bytes.
const NAME_MAX: usize = 1024;
/// Maximum number of axes of a tensor that libtorch's kernels support.
const AXES_MAX: usize = 64;
/// The reserved name that no tensor may have.
const METADATA: &str = "__metadata__";

/// A file's metadata and tensor descriptions. Tensors are in the order of their bytes.
#[derive(Default)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<(String, TensorInfo)>,
}

impl Header {
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let no_file = |reason: &str| format!("it is not a safetensors file: {reason}");
        // The format requires that the header starts with '{', with only blanks after the last '}'.
        if text.first() != Some(&b'{') {
            return Err(no_file("its header does not begin with '{'"));
        }
        let end = text.iter().rposition(|byte| *byte != b' ');
        if end.is_none_or(|end| text[end] != b'}') {
            return Err(no_file("its header does not end with '}' and blanks"));
        }
        let mut header: Self = serde_json::from_slice(text)
            .map_err(|error| format!("it is not a safetensors file: {}", shown(&error)))?;
        header.tensors.sort_by_key(|(_, info)| info.data_offsets);
        header.check()?;
        Ok(header)
    }

    /// Renders the length and the header, padded to align the tensors' bytes.
    pub(super) fn render(&self) -> Result<Vec<u8>, TensorError> {
        self.check().map_err(TensorError)?;
        let mut text = serde_json::to_vec(self).map_err(|error| TensorError(error.to_string()))?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let length = text.len() as u64;
        if length > HEADER_MAX {
            let reason = format!("the header has {length} bytes, at most {HEADER_MAX} are allowed");
            return Err(TensorError(reason + ": put fewer tensors into one file"));
        }
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.append(&mut text);
        Ok(bytes)
    }

    /// Total size of all tensors, in bytes.
    pub(super) fn data_len(&self) -> u64 {
        self.tensors.last().map_or(0, |(_, info)| info.data_offsets.1 as u64)
    }

    fn check(&self) -> Result<(), String> {
        let mut names: Vec<_> = self.tensors.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two tensors are named {}", shown(&pair[0])));
        }
        for (name, info) in &self.tensors {
            check_limits(name, &info.shape)?;
        }
        Metadata::new(None, self.tensors.clone()).map_err(|error| shown(&error))?;
        Ok(())
    }
}

fn check_limits(name: &str, shape: &[usize]) -> Result<(), String> {
    if name.len() > NAME_MAX {
        return Err(format!(
            "a tensor's name has {} bytes, at most {NAME_MAX} are allowed: {}",
            name.len(),
            shown(&name)
        ));
    }
    if name == METADATA {
        return Err(format!("a tensor cannot be named {METADATA}: the format keeps that name"));
    }
    if shape.len() > AXES_MAX {
        let axes = shape.len();
        return Err(format!("{} has {axes} axes, at most {AXES_MAX} are allowed", shown(&name)));
    }
    // Empty tensors are checked, too: libtorch multiplies their other axes to compute strides.
    let product = shape
        .iter()
        .try_fold(1i64, |product, &axis| product.checked_mul(i64::try_from(axis.max(1)).ok()?));
    if product.is_none() {
        return Err(format!("{} has an impossible shape {shape:?}", shown(&name)));
    }
    Ok(())
}

impl Serialize for Header {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA, &self.metadata)?;
        }
        for (name, info) in &self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a header, {\"name\": {\"dtype\", \"shape\", \"data_offsets\"}, ..}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut metadata: Option<Option<BTreeMap<String, String>>> = None;
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name != METADATA {
                tensors.push((name, map.next_value()?));
            } else if metadata.replace(map.next_value()?).is_some() {
                return Err(A::Error::duplicate_field(METADATA));
            }
        }
        Ok(Header { metadata: metadata.flatten().unwrap_or_default(), tensors })
    }
}
