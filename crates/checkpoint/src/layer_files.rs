//! Stores a layer's state as safetensors files: parameters, optimizer state and averages. Tensors
//! have their full names.

use std::{collections::HashMap, path::Path};

use gpipe::state::{LayerState, OptimizerState, ParameterState};
use tch::Tensor;

use crate::{
    error::{CheckpointError, Result},
    manifest::{FileEntry, FileKind, Layer, Parameter, dtype_name, sha256},
    tensor_file::{TensorFile, encode, shown},
    weights,
};

/// Maximum number of characters of the layer's name in a file name.
const NAME_CHARACTERS: usize = 64;

/// A layer's files in memory, before they are written.
pub(crate) struct Encoded {
    pub layer: Layer,
    /// The files' contents, in the order of `layer.files`.
    pub contents: Vec<Vec<u8>>,
}

/// Encodes the files of a layer. `index` is the layer's position in the model.
pub(crate) fn encode_layer(index: usize, state: LayerState) -> Result<Encoded> {
    let parameters = state.parameters.iter().map(describe).collect();
    let name = state.layer;
    let (mut values, mut kept, mut averages) = (Vec::new(), Vec::new(), Vec::new());
    for parameter in state.parameters {
        let full = format!("{name}.{}", parameter.name);
        values.push((full.clone(), parameter.value));
        let tensors = parameter.optimizer.map(|state| state.tensors).unwrap_or_default();
        kept.extend(tensors.into_iter().map(|(tensor, value)| (format!("{full}.{tensor}"), value)));
        averages.extend(parameter.average.map(|average| (full, average)));
    }
    let mut encoded =
        Encoded { layer: Layer { name, parameters, files: vec![] }, contents: vec![] };
    let kinds = [
        (FileKind::Parameters, "parameters", values),
        (FileKind::Optimizer, "optimizer", kept),
        (FileKind::Averages, "averages", averages),
    ];
    for (kind, what, tensors) in kinds {
        if tensors.is_empty() {
            continue;
        }
        let path = format!("{index:04}-{}.{what}.safetensors", plain(&encoded.layer.name));
        let bytes = encode(&tensors, &weights::metadata()).map_err(|error| {
            CheckpointError::Content { what: path.clone(), reason: error.to_string() }
        })?;
        let entry = FileEntry { kind, path, bytes: bytes.len() as u64, sha256: sha256(&bytes) };
        encoded.layer.files.push(entry);
        encoded.contents.push(bytes);
    }
    Ok(encoded)
}

fn describe(state: &ParameterState) -> Parameter {
    let kept = state.optimizer.iter().flat_map(|kept| &kept.tensors);
    Parameter {
        name: state.name.clone(),
        shape: state.value.size(),
        dtype: dtype_name(state.value.kind()),
        updates: state.optimizer.as_ref().map(|kept| kept.updates),
        optimizer: kept.map(|(name, _)| name.clone()).collect(),
        averaged: state.average.is_some(),
    }
}

/// A layer's name made safe for a file name. Layer names may contain any characters.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    name.chars().take(NAME_CHARACTERS).map(safe).collect()
}

/// Reads a layer's state from the files in `folder` and checks each file against the manifest.
pub(crate) fn read_layer(folder: &Path, layer: &Layer) -> Result<LayerState> {
    let mut values = read_kind(folder, layer, FileKind::Parameters)?;
    let mut kept = read_kind(folder, layer, FileKind::Optimizer)?;
    let mut averages = read_kind(folder, layer, FileKind::Averages)?;
    let mut parameters = Vec::with_capacity(layer.parameters.len());
    for parameter in &layer.parameters {
        let full = format!("{}.{}", layer.name, parameter.name);
        let take = |all: &mut HashMap<String, Tensor>, name: &str| {
            all.remove(name).ok_or_else(|| CheckpointError::Damaged {
                path: folder.to_owned(),
                reason: format!("its files have no tensor '{name}', which the manifest names"),
            })
        };
        let optimizer = match parameter.updates {
            None => None,
            Some(updates) => {
                let tensors = parameter
                    .optimizer
                    .iter()
                    .map(|name| Ok((name.clone(), take(&mut kept, &format!("{full}.{name}"))?)));
                Some(OptimizerState { updates, tensors: tensors.collect::<Result<_>>()? })
            }
        };
        let average = match parameter.averaged {
            true => Some(take(&mut averages, &full)?),
            false => None,
        };
        let (name, value) = (parameter.name.clone(), take(&mut values, &full)?);
        parameters.push(ParameterState { name, value, optimizer, average });
    }
    Ok(LayerState { layer: layer.name.clone(), parameters })
}

/// Reads the tensors of a layer's file of one kind. The map is empty if there is no such file.
pub(crate) fn read_kind(
    folder: &Path,
    layer: &Layer,
    kind: FileKind,
) -> Result<HashMap<String, Tensor>> {
    let mut all = HashMap::new();
    for entry in layer.files.iter().filter(|file| file.kind == kind) {
        let mut file = open(folder, layer, entry)?;
        for (name, ..) in layer.tensors(kind) {
            let tensor = file.read(&name).map_err(|error| CheckpointError::Damaged {
                path: folder.join(&entry.path),
                reason: error.to_string(),
            })?;
            all.insert(name, tensor);
        }
    }
    Ok(all)
}

/// Opens a layer's file. The file's bytes, the names of its tensors, and the dtypes and shapes of
/// parameters and averages must match the manifest.
pub(crate) fn open(folder: &Path, layer: &Layer, entry: &FileEntry) -> Result<TensorFile> {
    let path = folder.join(&entry.path);
    let bytes = read_checked(folder, entry)?;
    let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };
    let file = TensorFile::from_bytes(bytes, &path).map_err(|error| damaged(error.to_string()))?;
    let wanted = layer.tensors(entry.kind);
    for (name, described) in &wanted {
        let at = file.entries().binary_search_by(|entry| entry.name.cmp(name));
        let found = at.ok().and_then(|at| file.entries().get(at));
        let fits = found.is_some_and(|found| {
            described.is_none_or(|(dtype, shape)| {
                found.kind.map(dtype_name).as_deref() == Some(dtype) && shape == found.shape
            })
        });
        if !fits {
            let name = shown(name);
            return Err(damaged(format!("it has no tensor '{name}' as the manifest describes it")));
        }
    }
    if file.entries().len() != wanted.len() {
        return Err(damaged("it has tensors that the manifest does not name".into()));
    }
    Ok(file)
}

/// Reads a file, whose length and SHA-256 must match the manifest.
pub(crate) fn read_checked(folder: &Path, entry: &FileEntry) -> Result<Vec<u8>> {
    let path = folder.join(&entry.path);
    let damaged = |reason: String| Err(CheckpointError::Damaged { path: path.clone(), reason });
    let about = match std::fs::metadata(&path) {
        Ok(about) => about,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return damaged("the file is missing".into());
        }
        Err(error) => return Err(crate::files::failed("read", &path)(error)),
    };
    if !about.is_file() {
        return damaged("it is not a regular file".into());
    }
    // Check the length before allocating memory.
    let length = about.len();
    if length != entry.bytes {
        return damaged(format!("it has {length} bytes, the manifest says {}", entry.bytes));
    }
    let bytes = crate::files::read(&path, entry.bytes)?;
    let found = sha256(&bytes);
    if found != entry.sha256 {
        return damaged(format!(
            "its SHA-256 is {found}, the manifest says {}: it is damaged, or another file",
            shown(&entry.sha256)
        ));
    }
    Ok(bytes)
}
