//! The weights of a model's folder as Hugging Face's transformers writes them: `model.safetensors`,
//! or several shards and `model.safetensors.index.json`, which says where each tensor is.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path},
};

use gpipe_files::ReadError;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::{
    tensor_file::{self, FileError, Planned, TensorFile, shown},
    tensor_set::TensorSet,
};

/// The file of weights, if there is one.
pub const WEIGHTS: &str = "model.safetensors";
/// The list of tensors, if there are several files.
pub const INDEX: &str = "model.safetensors.index.json";

/// Maximum size of an index.
const INDEX_BYTES_MAX: u64 = 100 << 20;
/// Maximum number of shards, all of which are open at once.
const SHARDS_MAX: usize = 512;

#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: BTreeMap<String, serde_json::Value>,
    weight_map: BTreeMap<String, String>,
}

/// Opens the weights in `folder`. Only headers are read.
///
/// # Errors
/// [`FileError`]: there are no weights; the index is damaged; a shard, or a tensor in it, is
/// missing; two shards have a tensor of the same name.
pub fn open(folder: &Path) -> Result<TensorSet, FileError> {
    let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
    if single.is_file() {
        return TensorSet::of(folder, vec![TensorFile::open(&single)?]);
    }
    if !index.is_file() {
        let reason = format!("there is neither {WEIGHTS} nor {INDEX} in it");
        return Err(FileError::format(folder, reason));
    }
    let listed = read_index(&index)?;
    let names: BTreeSet<&String> = listed.values().collect();
    if names.len() > SHARDS_MAX {
        let reason = format!("it names {} files, at most {SHARDS_MAX} are allowed", names.len());
        return Err(FileError::format(&index, reason));
    }
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        // A name must not lead out of the folder.
        let mut parts = Path::new(name).components();
        let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !is_plain {
            let reason = format!("it names {}, which is no file of this folder", shown(name));
            return Err(FileError::format(&index, reason));
        }
        let path = folder.join(name);
        if !path.is_file() {
            let reason = format!("it names {name}, which is missing: fetch that file, too");
            return Err(FileError::format(&index, reason));
        }
        files.push(TensorFile::open(&path)?);
    }
    let set = TensorSet::of(folder, files)?;
    let is_elsewhere =
        |(name, file): &(&String, &String)| !set.path_of(name).ends_with(file.as_str());
    if let Some((name, file)) = listed.iter().find(is_elsewhere) {
        let (name, file) = (shown(name), shown(file));
        let reason = format!("it says that {name} is in {file}, which has no such tensor");
        return Err(FileError::format(&index, reason));
    }
    Ok(set)
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, FileError> {
    let bytes = gpipe_files::read(path, INDEX_BYTES_MAX).map_err(|error| match error {
        ReadError::Io(source) => FileError::Io { path: path.to_owned(), source },
        other => FileError::format(path, other.to_string()),
    })?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| {
        let reason = format!("it is not a list of tensors with their files ({error})");
        FileError::format(path, reason)
    })?;
    Ok(index.weight_map)
}

/// Writes weights into `folder`, which must exist: one file, or several of at most `shard_bytes`
/// each (a larger tensor has a file of its own), and the index. `read` gives each tensor when it is
/// its turn, so that one is in memory at a time. Returns the names of the files of weights.
///
/// # Errors
/// [`FileError`]: a tensor cannot be read or written.
pub fn write(
    folder: &Path,
    tensors: &[Planned],
    shard_bytes: u64,
    mut read: impl FnMut(&str) -> Result<Tensor, FileError>,
) -> Result<Vec<String>, FileError> {
    let shards = shards(tensors, shard_bytes);
    let of = |number: usize| match shards.len() {
        1 => WEIGHTS.to_owned(),
        all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
    };
    let names: Vec<String> = (0..shards.len()).map(of).collect();
    for (own, name) in shards.iter().zip(&names) {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        tensor_file::write_planned(&folder.join(name), own, &metadata, &mut read)?;
    }
    if shards.len() > 1 {
        let total: u64 = tensors.iter().map(Planned::bytes).sum();
        let placed = shards.iter().zip(&names);
        let map = placed.flat_map(|(own, name)| own.iter().map(|t| (t.name.clone(), name.clone())));
        let index = Index {
            metadata: [("total_size".to_owned(), total.into())].into(),
            weight_map: map.collect(),
        };
        let path = folder.join(INDEX);
        let text = serde_json::to_string_pretty(&index)
            .map_err(|error| FileError::format(&path, error.to_string()))?;
        gpipe_files::write(&path, (text + "\n").as_bytes())
            .map_err(|source| FileError::Io { path: path.clone(), source })?;
    }
    Ok(names)
}

/// The tensors of each file, in order. There is at least one file.
fn shards(tensors: &[Planned], shard_bytes: u64) -> Vec<&[Planned]> {
    let mut all = Vec::new();
    let (mut first, mut bytes) = (0, 0_u64);
    for (at, tensor) in tensors.iter().enumerate() {
        if at > first && bytes.saturating_add(tensor.bytes()) > shard_bytes {
            all.push(&tensors[first..at]);
            (first, bytes) = (at, 0);
        }
        bytes = bytes.saturating_add(tensor.bytes());
    }
    all.push(&tensors[first..]);
    all
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn oracle_shards_are_filled_in_order() {
        let planned = |(at, elements): (usize, &i64)| Planned {
            name: format!("t{at}"),
            kind: Kind::Float,
            shape: vec![*elements],
        };
        let split = |sizes: &[i64], most: u64| -> Vec<usize> {
            let tensors: Vec<Planned> = sizes.iter().enumerate().map(planned).collect();
            shards(&tensors, most).iter().map(|own| own.len()).collect()
        };
        assert_eq!(split(&[1, 1, 1], 100), [3]);
        assert_eq!(split(&[1, 1, 1], 8), [2, 1]);
        assert_eq!(split(&[5, 1, 1, 5], 8), [1, 2, 1], "a tensor that is larger");
        assert_eq!(split(&[], 8), [0]);
        assert_eq!(split(&[1, 1], 0), [1, 1]);
    }
}
