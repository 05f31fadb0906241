//! A run's weights in one safetensors file.
//!
//! Each tensor is named `layer.parameter`: the layer's name, which may have dots itself, and the parameter's, such as
//! `block0.attention.qkv.weight`. The file's metadata say `format = "pt"` (which readers of
//! PyTorch's files ask for) and `names = "layer.parameter"`.

use std::{collections::BTreeMap, path::Path};

use tch::Tensor;

pub use crate::tensor_file::FileError as WeightsError;
use crate::tensor_file::{self, TensorFile};

/// What the metadata of our files say.
pub const METADATA: [(&str, &str); 2] = [("format", "pt"), ("names", "layer.parameter")];

pub(crate) fn metadata() -> BTreeMap<String, String> {
    METADATA.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// Writes `tensors` to `path`. Whatever was there stays until the new file is complete and on disk.
///
/// # Errors
/// [`WeightsError`]; the file aside is removed then.
pub fn save(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), WeightsError> {
    tensor_file::write(path, tensors, &metadata())
}

/// Reads all tensors of `path`, by name.
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
        save(&path, &tensors).unwrap(); // over an old one
        assert_eq!(load(&path).unwrap(), tensors);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left aside");
        let metadata = TensorFile::open(&path).unwrap().metadata().clone();
        assert_eq!(metadata["format"], "pt");
        assert_eq!(metadata["names"], "layer.parameter");
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
