//! Tensors of one model, in one safetensors file or in several.

use std::{
    collections::{BTreeMap, btree_map},
    path::{Path, PathBuf},
};

use tch::Tensor;

use crate::tensor_file::{Entry, FileError, TensorFile, shown};

/// Files that together hold the tensors of one model. A tensor is read on request, by its range.
#[derive(Debug)]
pub struct TensorSet {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// For each tensor: the file's number, and the tensor's place among the file's entries.
    places: BTreeMap<String, (usize, usize)>,
}

impl From<TensorFile> for TensorSet {
    fn from(file: TensorFile) -> Self {
        let named = |(at, entry): (usize, &Entry)| (entry.name.clone(), (0, at));
        let places = file.entries().iter().enumerate().map(named).collect();
        Self { path: file.path().to_owned(), files: vec![file], places }
    }
}

impl TensorSet {
    /// The tensors of several files. `path`, such as their folder, names the set in errors.
    ///
    /// # Errors
    /// [`FileError`] if two files have a tensor of the same name.
    pub fn of(path: &Path, files: Vec<TensorFile>) -> Result<Self, FileError> {
        let mut places = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for (at, entry) in file.entries().iter().enumerate() {
                match places.entry(entry.name.clone()) {
                    btree_map::Entry::Vacant(place) => {
                        place.insert((number, at));
                    }
                    btree_map::Entry::Occupied(first) => {
                        let other = files[first.get().0].path().display().to_string();
                        let name = shown(&entry.name);
                        let reason = format!("{name} is in {other}, too: keep one of them");
                        return Err(FileError::format(file.path(), reason));
                    }
                }
            }
        }
        Ok(Self { path: path.to_owned(), files, places })
    }

    /// Takes tensors of `file` instead of those that have the same names.
    pub(crate) fn replace(&mut self, file: TensorFile) {
        let number = self.files.len();
        for (at, entry) in file.entries().iter().enumerate() {
            self.places.insert(entry.name.clone(), (number, at));
        }
        self.files.push(file);
    }

    /// The tensors, sorted by name.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.places.values().filter_map(|&(file, at)| self.files.get(file)?.entries().get(at))
    }

    /// The description of the tensor `name`.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        let &(file, at) = self.places.get(name)?;
        self.files.get(file)?.entries().get(at)
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// The metadata of the first file, without digests.
    #[must_use]
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.first().map(|file| file.metadata().clone()).unwrap_or_default()
    }

    /// What the set was opened as.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file with the tensor `name`, or of the set.
    #[must_use]
    pub fn path_of(&self, name: &str) -> &Path {
        let file = self.places.get(name).and_then(|&(file, _)| self.files.get(file));
        file.map_or(&self.path, TensorFile::path)
    }

    /// Reads only the tensor `name`, to the CPU.
    ///
    /// # Errors
    /// As for [`TensorFile::read`].
    pub fn read(&mut self, name: &str) -> Result<Tensor, FileError> {
        self.file(name)?.read(name)
    }

    /// Whether two tensors have the same dtype, shape and bytes.
    ///
    /// # Errors
    /// As for [`TensorSet::read`], except that any dtype is accepted.
    pub fn are_equal(&mut self, a: &str, b: &str) -> Result<bool, FileError> {
        let described = |entry: &Entry| (entry.dtype.clone(), entry.shape.clone());
        if self.entry(a).map(described) != self.entry(b).map(described) {
            return Ok(false);
        }
        let first = self.file(a)?.bytes_of(a)?;
        Ok(first == self.file(b)?.bytes_of(b)?)
    }

    /// Compares all tensors with their digests; see [`TensorFile::verify`].
    ///
    /// # Errors
    /// As for [`TensorFile::verify`].
    pub fn verify(&mut self) -> Result<(), FileError> {
        self.files.iter_mut().try_for_each(TensorFile::verify)
    }

    /// The size of all tensors, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entries().map(|entry| entry.bytes).sum()
    }

    fn file(&mut self, name: &str) -> Result<&mut TensorFile, FileError> {
        let place = self.places.get(name).map(|&(file, _)| file);
        match place.and_then(|file| self.files.get_mut(file)) {
            Some(file) => Ok(file),
            None => {
                let reason = format!("it has no tensor {}", shown(&name));
                Err(FileError::format(&self.path, reason))
            }
        }
    }
}
