//! Tensors and their specs, between Python and Rust.

use gpipe::TensorSpec;
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyTuple};
use pyo3_tch::PyTensor;
use tch::{Kind, Tensor};

/// The names of PyTorch's dtypes.
const KINDS: [(&str, Kind); 12] = [
    ("float32", Kind::Float),
    ("float64", Kind::Double),
    ("bfloat16", Kind::BFloat16),
    ("float16", Kind::Half),
    ("int64", Kind::Int64),
    ("int32", Kind::Int),
    ("int16", Kind::Int16),
    ("int8", Kind::Int8),
    ("uint8", Kind::Uint8),
    ("bool", Kind::Bool),
    ("complex64", Kind::ComplexFloat),
    ("complex128", Kind::ComplexDouble),
];

/// The dtype of that name.
pub(crate) fn kind(name: &str) -> PyResult<Kind> {
    let found = KINDS.iter().find(|(own, _)| *own == name);
    found.map(|(_, kind)| *kind).ok_or_else(|| {
        PyTypeError::new_err(format!("dtype torch.{name}: a pipeline cannot carry it"))
    })
}

fn name(kind: Kind) -> PyResult<&'static str> {
    let found = KINDS.iter().find(|(_, own)| *own == kind);
    found
        .map(|(name, _)| *name)
        .ok_or_else(|| PyTypeError::new_err(format!("dtype {kind:?}: a pipeline cannot carry it")))
}

/// Shape and dtype as Python gives them: `([2, 3], "float32")`.
pub(crate) type PySpec = (Vec<i64>, String);

/// The spec of a tensor that Python described.
pub(crate) fn spec((shape, dtype): PySpec) -> PyResult<TensorSpec> {
    Ok(TensorSpec::new(shape, kind(&dtype)?))
}

/// A spec for Python.
pub(crate) fn py_spec(spec: &TensorSpec) -> PyResult<(Vec<i64>, &'static str)> {
    Ok((spec.shape.clone(), name(spec.kind)?))
}

/// Tensors as a tuple of Python. They share their memory and their graph.
pub(crate) fn tuple<'py>(
    py: Python<'py>,
    tensors: impl IntoIterator<Item = Tensor>,
) -> PyResult<Bound<'py, PyTuple>> {
    let tensors: Vec<PyTensor> = tensors.into_iter().map(PyTensor).collect();
    PyTuple::new(py, tensors)
}

/// The tensors of a tuple or list of Python, or the only one.
pub(crate) fn tensors(given: &Bound<'_, PyAny>) -> PyResult<Vec<Tensor>> {
    if let Ok(one) = given.extract::<PyTensor>() {
        return Ok(vec![one.0]);
    }
    given.try_iter()?.map(|one| Ok(one?.extract::<PyTensor>()?.0)).collect()
}

/// As [`tensors`], of a list in which `None` stands for no tensor.
pub(crate) fn optional(given: Vec<Option<PyTensor>>) -> Vec<Option<Tensor>> {
    given.into_iter().map(|one| one.map(|tensor| tensor.0)).collect()
}

/// Tensors with names, for Python.
pub(crate) fn named(all: Vec<(String, Tensor)>) -> Vec<(String, PyTensor)> {
    all.into_iter().map(|(name, tensor)| (name, PyTensor(tensor))).collect()
}
