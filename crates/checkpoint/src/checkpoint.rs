//! Opens, verifies and reads one checkpoint on disk, and restores it into a pipeline.

use std::path::{Path, PathBuf};

use gpipe::{
    Pipeline,
    state::{Counters, LayerOutline},
};
use tch::Tensor;

use crate::{
    error::{CheckpointError, Result},
    files,
    layer_files::{open, read_checked, read_kind, read_layer},
    manifest::{self, FileEntry, FileKind, Manifest},
    tensor_file::{Entry, TensorFile},
    tensor_set::TensorSet,
};

/// Maximum number of misfits listed in one error.
const MISFITS_NAMED: usize = 5;

/// A checkpoint whose manifest is valid.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    /// Whether every file has been compared with the manifest.
    verified: bool,
}

impl Checkpoint {
    /// Reads the manifest in `folder`. Other files are checked by [`Checkpoint::verify`] and by the
    /// methods that read them.
    ///
    /// # Errors
    /// The manifest is missing, damaged or of another format.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(manifest::NAME);
        if !path.exists() {
            let reason = "it has no manifest.json: it is no checkpoint, or not a complete one";
            return Err(CheckpointError::NotFound { path: folder.into(), reason: reason.into() });
        }
        let bytes = files::read(&path, manifest::BYTES_MAX)?;
        let manifest = Manifest::decode(&bytes)
            .map_err(|reason| CheckpointError::Damaged { path: path.clone(), reason })?;
        Ok(Self { folder: folder.to_owned(), manifest, verified: false })
    }

    /// The checkpoint's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest, which describes the checkpoint's content.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads every file and compares it with the manifest.
    ///
    /// # Errors
    /// Names the first file that is missing, has another length, or has other content.
    pub fn verify(&self) -> Result<()> {
        self.check_files()
    }

    /// Verifies the checkpoint and remembers that, so that [`Checkpoint::restore`] does not verify
    /// it again.
    pub(crate) fn verified(mut self) -> Result<Self> {
        self.verify()?;
        self.verified = true;
        Ok(self)
    }

    /// Checks that the optimizer state has the shapes in `outlines`. Reads file headers only.
    fn check_optimizers(&self, outlines: &[LayerOutline]) -> Result<()> {
        for outline in outlines {
            let layer = self.manifest.layers.iter().find(|layer| layer.name == outline.layer);
            let files = layer.into_iter().flat_map(|layer| &layer.files);
            for entry in files.filter(|entry| entry.kind == FileKind::Optimizer) {
                let path = self.folder.join(&entry.path);
                let file = TensorFile::open(&path).map_err(|error| CheckpointError::Damaged {
                    path: path.clone(),
                    reason: error.to_string(),
                })?;
                self.check_optimizer(&file, outline)?;
            }
        }
        Ok(())
    }

    /// Compares every file with the manifest.
    fn check_files(&self) -> Result<()> {
        for layer in &self.manifest.layers {
            for entry in &layer.files {
                open(&self.folder, layer, entry)
                    .map_err(|error| self.name_the_swapped(entry, error))?;
            }
        }
        let check = |entry: &FileEntry| read_checked(&self.folder, entry).map(|_| ());
        self.manifest
            .files
            .iter()
            .try_for_each(|entry| check(entry).map_err(|error| self.name_the_swapped(entry, error)))
    }

    /// Checks the shapes and dtypes of a layer's optimizer state, which the manifest does not
    /// record.
    fn check_optimizer(&self, file: &TensorFile, outline: &LayerOutline) -> Result<()> {
        for own in &outline.parameters {
            for (tensor, spec) in &own.optimizer {
                let name = format!("{}.{}.{tensor}", outline.layer, own.name);
                let found = file.entries().iter().find(|entry| entry.name == name);
                let differs = |found: &&Entry| {
                    found.shape != spec.shape || found.kind.is_some_and(|kind| kind != spec.kind)
                };
                if let Some(Entry { dtype, shape, .. }) = found.filter(differs) {
                    return Err(
                        self.misfit(format!("{name} is {dtype} {shape:?}, the model's {spec}"))
                    );
                }
            }
        }
        Ok(())
    }

    fn misfit(&self, reason: String) -> CheckpointError {
        CheckpointError::Misfit { path: self.folder.clone(), reason }
    }

    /// If the damaged file has the content of another file of the checkpoint, adds that file's
    /// name.
    fn name_the_swapped(&self, entry: &FileEntry, error: CheckpointError) -> CheckpointError {
        let CheckpointError::Damaged { path, reason } = error else { return error };
        let same_size = |other: &&FileEntry| other.bytes == entry.bytes && other.path != entry.path;
        let here = files::read(&path, entry.bytes).map(|bytes| manifest::sha256(&bytes));
        let mut others = self.manifest.all_files().filter(same_size);
        let found = here.ok().and_then(|sum| others.find(|other| other.sha256 == sum));
        let reason = match found {
            Some(other) => format!("{reason}; its content is that of '{}'", other.path),
            None => reason,
        };
        CheckpointError::Damaged { path, reason }
    }

    /// Restores the whole state into `pipeline`, which may differ in K, schedule, balance or
    /// re-materialization. The model, the optimizer and every file are checked before anything is
    /// changed.
    ///
    /// # Errors
    /// [`CheckpointError::Misfit`] or [`CheckpointError::Damaged`]; the pipeline is unchanged then.
    /// A file that changes between the check and the read leaves the pipeline unusable.
    pub fn restore(&self, pipeline: &mut Pipeline) -> Result<()> {
        let outlines = pipeline.outline();
        let misfits = self.manifest.misfits(&outlines);
        if !misfits.is_empty() {
            let named: Vec<&str> = misfits.iter().take(MISFITS_NAMED).map(String::as_str).collect();
            let more = match misfits.len().saturating_sub(MISFITS_NAMED) {
                0 => String::new(),
                more => format!("; and {more} more"),
            };
            return Err(self.misfit(named.join("; ") + &more));
        }
        if !self.verified {
            self.verify()?;
        }
        self.check_optimizers(&outlines)?;
        let layers = self.manifest.layers.iter().filter(|layer| !layer.parameters.is_empty());
        let counters = Counters::from(&self.manifest.counters);
        let restored =
            pipeline.restore(&counters, layers.map(|layer| read_layer(&self.folder, layer)));
        restored.map_err(|error| match error {
            CheckpointError::Pipeline(gpipe::Error::State(reason)) => self.misfit(reason),
            error => error,
        })
    }

    /// All parameters by full name, in the model's order.
    ///
    /// # Errors
    /// A file is damaged or missing.
    pub fn parameters(&self) -> Result<Vec<(String, Tensor)>> {
        self.values(|_| FileKind::Parameters)
    }

    /// The moving averages of all parameters. A parameter without an average, because it was never
    /// trained, is returned as it is.
    ///
    /// # Errors
    /// The checkpoint has no averages, or a file is damaged or missing.
    pub fn averages(&self) -> Result<Vec<(String, Tensor)>> {
        let mut parameters = self.manifest.layers.iter().flat_map(|layer| &layer.parameters);
        if !parameters.any(|parameter| parameter.averaged) {
            return Err(self.no_averages());
        }
        self.values(|averaged| if averaged { FileKind::Averages } else { FileKind::Parameters })
    }

    /// The parameters, or their moving averages, to be read one at a time. Every file with some of
    /// them is verified first.
    ///
    /// # Errors
    /// As for [`Checkpoint::parameters`] and [`Checkpoint::averages`].
    pub fn tensors(&self, averages: bool) -> Result<TensorSet> {
        let mut set = TensorSet::of(&self.folder, Vec::new())?;
        let kinds = match averages {
            false => vec![FileKind::Parameters],
            true => vec![FileKind::Parameters, FileKind::Averages],
        };
        let mut found_averages = false;
        for layer in &self.manifest.layers {
            // Averages come after the parameters that they replace.
            for kind in &kinds {
                for entry in layer.files.iter().filter(|entry| entry.kind == *kind) {
                    found_averages |= *kind == FileKind::Averages;
                    drop(open(&self.folder, layer, entry)?);
                    set.replace(TensorFile::open(&self.folder.join(&entry.path))?);
                }
            }
        }
        match averages && !found_averages {
            false => Ok(set),
            true => Err(self.no_averages()),
        }
    }

    fn no_averages(&self) -> CheckpointError {
        let reason = "the run kept no moving averages of the weights".into();
        CheckpointError::NotFound { path: self.folder.clone(), reason }
    }

    fn values(&self, kind: impl Fn(bool) -> FileKind) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for layer in &self.manifest.layers {
            let mut tensors = read_kind(&self.folder, layer, FileKind::Parameters)?;
            if layer.parameters.iter().any(|own| kind(own.averaged) == FileKind::Averages) {
                tensors.extend(read_kind(&self.folder, layer, FileKind::Averages)?);
            }
            for parameter in &layer.parameters {
                let name = format!("{}.{}", layer.name, parameter.name);
                let value = tensors.remove(&name).ok_or_else(|| CheckpointError::Damaged {
                    path: self.folder.clone(),
                    reason: format!("its files have no tensor '{name}', which the manifest names"),
                })?;
                all.push((name, value));
            }
        }
        Ok(all)
    }

    /// The bytes of a file that belongs to the run, such as the tokenizer; `None` if there is no
    /// such file.
    ///
    /// # Errors
    /// The file is damaged or missing.
    pub fn run_file(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let entry = self.manifest.files.iter().find(|entry| entry.path == path);
        entry.map(|entry| read_checked(&self.folder, entry)).transpose()
    }
}
