//! Files from tensors, and one of several.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Seek, SeekFrom, Write},
    path::Path,
};

use safetensors::tensor::{Dtype, TensorInfo};
use sha2::Digest;
use tch::Tensor;

use super::{FileError, KINDS, TensorError, TensorFile, digest, header::Header};
use gpipe_files::Aside;

/// Room for a layer's header: growing a large buffer for it would copy all of it.
const HEADER_GUESS: usize = 16 << 10;

/// The bytes of a file with `tensors` and `metadata`, without digests. Tensors may be on any device
/// and have any strides.
///
/// # Errors
/// [`TensorError`]: a dtype that has no place in the format, two tensors of one name.
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

/// Writes [`encode`]'s tensors and metadata to `path`, with digests, one tensor in memory at a
/// time. Whatever was there stays until the new file is complete and on disk.
///
/// # Errors
/// [`FileError`]; the file aside is removed then.
pub fn write(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), FileError> {
    let cannot = |error: TensorError| FileError::format(path, error.to_string());
    let layout = layout(place(tensors).map_err(cannot)?, metadata);
    put(path, layout, |placed| bytes(&placed.name, placed.body).map_err(cannot))
}

/// Writes all tensors of `files` to one file, the same that [`write()`] would make of them, one
/// tensor in memory at a time. Those that have digests are compared with them.
///
/// # Errors
/// [`FileError`]: two tensors of one name, a dtype of which nothing is known; damage; a failing
/// disk. The file aside is removed then.
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
    put(path, layout(all, metadata), |placed| {
        let (number, index) = placed.body;
        files[number].bytes(index)
    })
}

/// Writes a file aside, and gives it its name when all of it is on disk.
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

/// Writes the parts of a file: the header last of all, once the digests are known, in the room that
/// was left for it.
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

/// A tensor that has its place in a file.
struct Placed<T> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
    body: T,
}

/// A header, and the tensors in the order of their bytes.
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

/// The order of the tensors: the widest dtype first to keep all aligned.
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
