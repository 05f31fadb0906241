//! Files from tensors, and one of several.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use safetensors::tensor::{Dtype, TensorInfo};
use tch::Tensor;

use super::{FileError, KINDS, TensorError, TensorFile, header::Header, read_entry};

/// Room for a layer's header: growing a large buffer for it would copy all of it.
const HEADER_GUESS: usize = 16 << 10;

/// The bytes of a file with `tensors` and `metadata`. Tensors may be on any device and have any strides.
///
/// # Errors
/// [`TensorError`]: a dtype that has no place in the format, two tensors of one name.
pub fn encode(
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, TensorError> {
    let parts = parts(tensors, metadata)?;
    let bodies: usize = tensors.iter().map(|(_, tensor)| size(tensor)).sum();
    let mut all = Vec::with_capacity(bodies + HEADER_GUESS);
    for part in parts {
        all.append(&mut part?);
    }
    Ok(all)
}

/// Writes [`encode`]'s bytes to `path`, one tensor in memory at a time. Whatever was there stays until the new file is
/// complete and on disk.
///
/// # Errors
/// [`FileError`]; the file aside is removed then.
pub fn write(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), FileError> {
    let cannot = |error: TensorError| FileError::format(path, error.to_string());
    let parts = parts(tensors, metadata).map_err(cannot)?;
    put(path, parts.map(|part| part.map_err(cannot)))
}

/// Writes all tensors of `files` to one file, the same that [`write()`] would make of them, one tensor in memory at a time.
///
/// # Errors
/// [`FileError`]: two tensors of one name, a dtype of which nothing is known; a failing disk. The file aside is removed then.
pub fn merge(
    path: &Path,
    files: &mut [TensorFile],
    metadata: &BTreeMap<String, String>,
) -> Result<(), FileError> {
    let cannot = |error: TensorError| FileError::format(path, error.to_string());
    let mut all = Vec::new();
    for (number, file) in files.iter().enumerate() {
        for (index, entry) in file.entries.iter().enumerate() {
            let known = KINDS.iter().find(|(_, kind)| Some(*kind) == entry.kind);
            let Some((dtype, _)) = known else {
                return Err(cannot(TensorError::of(&entry.name, "its dtype cannot be written")));
            };
            let shape = entry.shape.iter().map(|&axis| axis.unsigned_abs() as usize).collect();
            let bytes = entry.bytes as usize; // a file's, which was held against its length
            let body = (number, index);
            all.push(Placed { name: entry.name.clone(), dtype: *dtype, shape, bytes, body });
        }
    }
    let (head, sorted) = layout(all, metadata).map_err(cannot)?;
    let bodies = sorted.into_iter().map(|placed| {
        let (number, index) = placed.body;
        let TensorFile { path, file, entries, .. } = &mut files[number];
        read_entry(file.as_mut(), &entries[index]).map_err(FileError::io(path))
    });
    put(path, std::iter::once(Ok(head)).chain(bodies))
}

/// Writes the parts of a file aside, and gives it its name when all of them are on disk.
fn put(
    path: &Path,
    parts: impl Iterator<Item = Result<Vec<u8>, FileError>>,
) -> Result<(), FileError> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".writing");
    let aside = PathBuf::from(aside);
    let result = put_aside(&aside, parts)
        .and_then(|()| fs::rename(&aside, path).map_err(FileError::io(path)));
    if result.is_err() {
        let _ = fs::remove_file(&aside);
        return result;
    }
    // The new name is on disk when the folder is.
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(FileError::io(folder))
}

fn put_aside(
    aside: &Path,
    parts: impl Iterator<Item = Result<Vec<u8>, FileError>>,
) -> Result<(), FileError> {
    let io = FileError::io(aside);
    let mut file = BufWriter::new(File::create(aside).map_err(&io)?);
    for part in parts {
        file.write_all(&part?).map_err(&io)?;
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(&io)
}

/// A tensor that has its place in a file.
struct Placed<T> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
    body: T,
}

/// What a file is made of: the header, then each tensor's bytes.
fn parts<'a>(
    tensors: &'a [(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<impl Iterator<Item = Result<Vec<u8>, TensorError>> + use<'a>, TensorError> {
    let placed = |(name, tensor): &'a (String, Tensor)| {
        Ok(Placed {
            name: name.clone(),
            dtype: dtype(name, tensor)?,
            shape: tensor.size().iter().map(|&axis| axis.unsigned_abs() as usize).collect(),
            bytes: size(tensor),
            body: tensor,
        })
    };
    let all = tensors.iter().map(placed).collect::<Result<Vec<_>, TensorError>>()?;
    let (head, sorted) = layout(all, metadata)?;
    let bodies = sorted.into_iter().map(|placed| bytes(&placed.name, placed.body));
    Ok(std::iter::once(Ok(head)).chain(bodies))
}

/// The header, and the order of the tensors: the widest dtype first to keep all aligned.
fn layout<T>(
    mut tensors: Vec<Placed<T>>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<u8>, Vec<Placed<T>>), TensorError> {
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let mut header = Header { metadata: metadata.clone(), tensors: Vec::new() };
    let mut end = 0;
    for placed in &tensors {
        let start = end;
        end += placed.bytes;
        let info = TensorInfo {
            dtype: placed.dtype,
            shape: placed.shape.clone(),
            data_offsets: (start, end),
        };
        header.tensors.push((placed.name.clone(), info));
    }
    Ok((header.render()?, tensors))
}

fn dtype(name: &str, tensor: &Tensor) -> Result<Dtype, TensorError> {
    if !tensor.defined() {
        return Err(TensorError::of(name, "it is undefined"));
    }
    let kind = tensor.f_kind().map_err(|error| TensorError::of(name, error))?;
    let known = KINDS.iter().find(|(_, known)| *known == kind).map(|(dtype, _)| *dtype);
    known.ok_or_else(|| TensorError::of(name, format!("{kind:?} cannot be written: convert it")))
}

fn size(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

fn bytes(name: &str, tensor: &Tensor) -> Result<Vec<u8>, TensorError> {
    let mut bytes = vec![0; size(tensor)];
    tensor
        .f_copy_data_u8(&mut bytes, tensor.numel())
        .map_err(|error| TensorError::of(name, error))?;
    Ok(bytes)
}
