//! Writes tensors to a file, and merges several files into one.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Seek, SeekFrom, Write},
    path::Path,
};

use safetensors::tensor::{Dtype, TensorInfo};
use sha2::Digest;
use tch::{Kind, Tensor};

use super::{FileError, KINDS, TensorError, TensorFile, digest, header::Header};
use gpipe_files::Aside;

/// Capacity reserved for a layer's header, so that a large buffer is not reallocated and copied.
const HEADER_GUESS: usize = 16 << 10;

/// Encodes `tensors` and `metadata` as the bytes of a file, without digests. Tensors may be on any
/// device and have any strides.
///
/// # Errors
/// [`TensorError`]: the format lacks a tensor's dtype, or two tensors have one name.
pub fn encode(
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, TensorError> {
    let Layout { header, tensors: sorted } = layout(place(tensors)?, metadata);
    let bodies: usize = sorted.iter().map(|placed| placed.bytes).sum();
    let mut all = Vec::with_capacity(bodies + HEADER_GUESS);
    all.append(&mut header.render()?);
    for placed in sorted {
        all.append(&mut bytes(&placed.name, placed.body)?);
    }
    Ok(all)
}

/// Writes `tensors` and `metadata` to `path`, with digests, one tensor in memory at a time. An
/// existing file stays until the new one is complete and on disk.
///
/// # Errors
/// [`FileError`]; the temporary file is removed then.
pub fn write(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), FileError> {
    let cannot = |error: TensorError| FileError::format(path, error.to_string());
    let layout = layout(place(tensors).map_err(cannot)?, metadata);
    put(path, layout, |placed| bytes(&placed.name, placed.body).map_err(cannot))
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// Its dtype in the file.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<i64>,
}

impl Planned {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let elements = self.shape.iter().map(|axis| axis.unsigned_abs()).product::<u64>();
        elements * self.kind.elt_size_in_bytes() as u64
    }
}

/// As [`write()`], for tensors that `read` gives when it is their turn.
///
/// # Errors
/// As [`write()`]; an error of `read`; or a tensor that is not as it was planned.
pub fn write_planned(
    path: &Path,
    tensors: &[Planned],
    metadata: &BTreeMap<String, String>,
    mut read: impl FnMut(&str) -> Result<Tensor, FileError>,
) -> Result<(), FileError> {
    let cannot = |error: TensorError| FileError::format(path, error.to_string());
    let mut all = Vec::with_capacity(tensors.len());
    for own in tensors {
        all.push(Placed {
            name: own.name.clone(),
            dtype: dtype_of(&own.name, own.kind).map_err(cannot)?,
            shape: own.shape.iter().map(|&axis| axis.unsigned_abs() as usize).collect(),
            bytes: usize::try_from(own.bytes()).unwrap_or(usize::MAX),
            body: own,
        });
    }
    put(path, layout(all, metadata), |placed| {
        let tensor = read(&placed.name)?;
        let Planned { name, kind, shape } = placed.body;
        if tensor.kind() != *kind || tensor.size() != *shape {
            return Err(cannot(TensorError::of(name, "it is not as it was planned")));
        }
        bytes(name, &tensor).map_err(cannot)
    })
}

/// Merges all tensors of `files` into one file, one tensor in memory at a time. The result equals
/// what [`write()`] would write. Tensors that have digests are verified.
///
/// # Errors
/// [`FileError`]: two tensors have one name, a dtype cannot be written, a file is damaged, or the
/// disk fails. The temporary file is removed then.
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
            let bytes = entry.bytes as usize; // `open` checked it against the file's length
            let body = (number, index);
            all.push(Placed { name: entry.name.clone(), dtype: *dtype, shape, bytes, body });
        }
    }
    put(path, layout(all, metadata), |placed| {
        let (number, index) = placed.body;
        files[number].bytes(index)
    })
}

/// Writes a temporary file, and renames it to `path` once it is complete and on disk.
fn put<T>(
    path: &Path,
    layout: Layout<T>,
    body: impl FnMut(&Placed<T>) -> Result<Vec<u8>, FileError>,
) -> Result<(), FileError> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let aside = Aside::new(path, folder).map_err(FileError::io(path))?;
    fill(aside.file(), path, layout, body)?;
    aside.publish().map_err(FileError::io(path))
}

/// Writes the parts of a file. The header is written last, into space reserved for it, because it
/// contains the digests.
fn fill<T>(
    file: &File,
    path: &Path,
    layout: Layout<T>,
    mut body: impl FnMut(&Placed<T>) -> Result<Vec<u8>, FileError>,
) -> Result<(), FileError> {
    let io = FileError::io(path);
    let render = |header: &Header| {
        header.render().map_err(|error| FileError::format(path, error.to_string()))
    };
    let Layout { mut header, tensors } = layout;
    digest::reserve(&mut header);
    let room = render(&header)?;
    let mut out = BufWriter::new(file);
    out.write_all(&room).map_err(&io)?;
    for placed in &tensors {
        let bytes = body(placed)?;
        let shape = placed.shape.iter().map(|&axis| axis as u64);
        let mut hash = digest::begin(&placed.name, &digest::dtype(placed.dtype), shape);
        hash.update(&bytes);
        digest::put(&mut header, &placed.name, hash);
        out.write_all(&bytes).map_err(&io)?;
    }
    digest::seal(&mut header);
    let head = render(&header)?;
    if head.len() != room.len() {
        let reason = "its header changed its length while it was written: report this as a bug";
        return Err(FileError::format(path, reason));
    }
    out.seek(SeekFrom::Start(0)).and_then(|_| out.write_all(&head)).map_err(&io)?;
    out.flush().map_err(&io)
}

/// A tensor to be placed in a file.
struct Placed<T> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
    body: T,
}

/// A header, and its tensors in the order of their bytes.
struct Layout<T> {
    header: Header,
    tensors: Vec<Placed<T>>,
}

fn place(tensors: &[(String, Tensor)]) -> Result<Vec<Placed<&Tensor>>, TensorError> {
    let mut all = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        all.push(Placed {
            name: name.clone(),
            dtype: dtype(name, tensor)?,
            shape: tensor.size().iter().map(|&axis| axis.unsigned_abs() as usize).collect(),
            bytes: size(tensor),
            body: tensor,
        });
    }
    Ok(all)
}

/// Orders the tensors, widest dtype first, which keeps all of them aligned.
fn layout<T>(mut tensors: Vec<Placed<T>>, metadata: &BTreeMap<String, String>) -> Layout<T> {
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
    Layout { header, tensors }
}

fn dtype(name: &str, tensor: &Tensor) -> Result<Dtype, TensorError> {
    if !tensor.defined() {
        return Err(TensorError::of(name, "it is undefined"));
    }
    dtype_of(name, tensor.f_kind().map_err(|error| TensorError::of(name, error))?)
}

fn dtype_of(name: &str, kind: Kind) -> Result<Dtype, TensorError> {
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
