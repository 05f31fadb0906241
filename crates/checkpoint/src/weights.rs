//! A run's weights in one safetensors file.
//!
//! Each tensor is named `layer.parameter`, such as `block0.attention.qkv.weight`. The layer's name
//! may contain dots. The metadata contain `format = "pt"`, which PyTorch's readers expect, `names =
//! "layer.parameter"`, and the tensors' digests ([`tensor_file`]).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use gpipe::processes::Transport;
use tch::Tensor;

pub use crate::tensor_file::FileError as WeightsError;
use crate::{
    error::CheckpointError,
    multi_process::{Lane, Together},
    tensor_file::{self, Planned, TensorFile},
};

/// Metadata in every weights file that gpipe writes.
pub const METADATA: [(&str, &str); 2] = [("format", "pt"), ("names", "layer.parameter")];

/// Additional metadata by key: facts about the model that shapes do not show.
pub type Facts = BTreeMap<String, String>;

pub(crate) fn metadata() -> BTreeMap<String, String> {
    METADATA.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn metadata_with(facts: &Facts) -> BTreeMap<String, String> {
    let mut all = facts.clone();
    all.extend(metadata());
    all
}

/// Writes `tensors` to `path`, with digests. An existing file stays until the new one is complete
/// and on disk.
///
/// # Errors
/// [`WeightsError`]; the temporary file is removed then.
pub fn save(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), WeightsError> {
    save_with(path, tensors, &Facts::new())
}

/// As [`save`], with `facts` added to the metadata.
///
/// # Errors
/// As [`save`].
pub fn save_with(
    path: &Path,
    tensors: &[(String, Tensor)],
    facts: &Facts,
) -> Result<(), WeightsError> {
    tensor_file::write(path, tensors, &metadata_with(facts))
}

/// As [`save_with`], for tensors that `read` gives when it is their turn.
///
/// # Errors
/// As [`save`], or an error of `read`.
pub fn save_planned(
    path: &Path,
    tensors: &[Planned],
    facts: &Facts,
    read: impl FnMut(&str) -> Result<Tensor, WeightsError>,
) -> Result<(), WeightsError> {
    tensor_file::write_planned(path, tensors, &metadata_with(facts), read)
}

/// As [`save_with`], for a pipeline in several processes. Every rank calls this with the tensors of
/// its stages and writes them to a file beside `path`. Rank 0 merges these files, one tensor in
/// memory at a time. The folder must be on a file system that all ranks share.
///
/// # Errors
/// An error of any rank; `path` is unchanged then.
pub fn save_among(
    path: &Path,
    own: &[(String, Tensor)],
    facts: &Facts,
    processes: &Arc<dyn Transport>,
) -> Result<(), CheckpointError> {
    let together = Together::with(processes);
    let part = |rank: usize| {
        let mut part = path.as_os_str().to_owned();
        part.push(format!(".part-{rank}"));
        PathBuf::from(part)
    };
    let mine = part(processes.rank());
    let written = save(&mine, own).map_err(CheckpointError::from);
    let written = together.all(Lane::Training, written);
    let merged = written.and_then(|()| {
        let merged = match together.is_first() {
            true => {
                merge(path, (0..processes.size()).map(part), facts).map_err(CheckpointError::from)
            }
            false => Ok(()),
        };
        together.all(Lane::Training, merged)
    });
    let _ = std::fs::remove_file(&mine); // it may not exist
    merged
}

fn merge(
    path: &Path,
    parts: impl Iterator<Item = PathBuf>,
    facts: &Facts,
) -> Result<(), WeightsError> {
    let mut files = parts.map(|part| TensorFile::open(&part)).collect::<Result<Vec<_>, _>>()?;
    tensor_file::merge(path, &mut files, &metadata_with(facts))
}

/// Reads all tensors of `path` by name, and compares each with its digest, if there is one.
///
/// # Errors
/// [`WeightsError`]
pub fn load(path: &Path) -> Result<Vec<(String, Tensor)>, WeightsError> {
    let mut file = TensorFile::open(path)?;
    let names: Vec<_> = file.entries().iter().map(|entry| entry.name.clone()).collect();
    names.into_iter().map(|name| file.read(&name).map(|tensor| (name, tensor))).collect()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn oracle_what_is_saved_is_loaded_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let tensors: Vec<_> = [("a.weight", Kind::Float), ("b.weight", Kind::Double)]
            .map(|(name, kind)| (name.to_owned(), Tensor::rand([3, 4], (kind, Device::Cpu))))
            .into();
        save(&path, &tensors).unwrap();
        save(&path, &tensors).unwrap(); // replace an existing file
        assert_eq!(load(&path).unwrap(), tensors);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left aside");
        let metadata = TensorFile::open(&path).unwrap().metadata().clone();
        assert_eq!(metadata["format"], "pt");
        assert_eq!(metadata["names"], "layer.parameter");
    }

    #[test]
    fn oracle_one_file_of_several_is_that_of_all_their_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64, Kind::Bool];
        let all: Vec<(String, Tensor)> = (0..15_usize)
            .map(|n| {
                let tensor = Tensor::arange(n as i64, (Kind::Float, Device::Cpu));
                (format!("layer{n}.weight"), tensor.to_kind(kinds[n % kinds.len()]))
            })
            .collect();
        save(&path("all"), &all).unwrap();
        let mut parts = Vec::new();
        for part in 0..4 {
            let own = all.iter().skip(part).step_by(4);
            let own: Vec<_> = own.map(|(name, t)| (name.clone(), t.shallow_clone())).collect();
            parts.push(path(&format!("part{part}")));
            save(&parts[part], &own).unwrap();
        }
        merge(&path("merged"), parts.iter().cloned(), &Facts::new()).unwrap();
        assert!(std::fs::read(path("merged")).unwrap() == std::fs::read(path("all")).unwrap());
        // One tensor in two files, and a missing part.
        let twice = vec![parts[0].clone(), parts[0].clone()];
        let error =
            merge(&path("twice"), twice.into_iter(), &Facts::new()).unwrap_err().to_string();
        assert!(error.contains("layer0.weight"), "{error}");
        let error = merge(&path("twice"), [path("part9")].into_iter(), &Facts::new())
            .unwrap_err()
            .to_string();
        assert!(error.contains("part9") && !path("twice").exists(), "{error}");
    }

    #[test]
    fn fault_missing_and_damaged_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        assert!(load(&path).unwrap_err().to_string().contains("weights.safetensors"));
        std::fs::write(&path, b"not a safetensors file").unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("weights.safetensors"));
        let nowhere = folder.path().join("no/such/folder/w.safetensors");
        assert!(save(&nowhere, &[]).is_err());
    }
}
