//! Weights in one safetensors file, keyed by full parameter name; written aside and renamed, so that a file
//! of that name is always complete.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use tch::Tensor;

/// What goes wrong with a weights file.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// The content is no safetensors file, or cannot be made one.
    #[error("{path}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// Writes `tensors` to `path`. Whatever was there stays until the new file is complete and on disk.
///
/// # Errors
/// [`WeightsError`]; the file aside is removed then.
pub fn save(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), WeightsError> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".writing");
    let aside = PathBuf::from(aside);
    let result = write(&aside, tensors).and_then(|()| {
        std::fs::rename(&aside, path)
            .map_err(|source| WeightsError::Io { path: path.to_owned(), source })
    });
    if result.is_err() {
        let _ = std::fs::remove_file(&aside);
    }
    result
}

fn write(aside: &Path, tensors: &[(String, Tensor)]) -> Result<(), WeightsError> {
    Tensor::write_safetensors(tensors, aside).map_err(|error| WeightsError::Format {
        path: aside.to_owned(),
        reason: error.to_string(),
    })?;
    let sync = File::open(aside).and_then(|file| file.sync_all());
    sync.map_err(|source| WeightsError::Io { path: aside.to_owned(), source })
}

/// Reads all tensors of `path`, by name.
///
/// # Errors
/// [`WeightsError`]
pub fn load(path: &Path) -> Result<Vec<(String, Tensor)>, WeightsError> {
    File::open(path).map_err(|source| WeightsError::Io { path: path.to_owned(), source })?;
    let mut tensors = Tensor::read_safetensors(path).map_err(|error| WeightsError::Format {
        path: path.to_owned(),
        reason: format!("it is not a safetensors file: {error}"),
    })?;
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(tensors)
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
