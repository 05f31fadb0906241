//! Shape and dtype of a tensor that may not exist yet.

use std::fmt;

use tch::{Kind, Tensor};

/// Shape and dtype of a tensor, or [`TensorSpec::none`]. The first size is the number of samples,
/// unless the tensor has no sample axis.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorSpec {
    /// Sizes, outermost first.
    pub shape: Vec<i64>,
    /// Element type.
    pub kind: Kind,
    is_none: bool,
}

impl TensorSpec {
    /// A tensor of `shape` and `kind`.
    pub fn new(shape: impl Into<Vec<i64>>, kind: Kind) -> Self {
        Self { shape: shape.into(), kind, is_none: false }
    }

    /// The spec of `None`, in the place of a tensor that is not there. It has no elements.
    pub fn none() -> Self {
        Self { shape: Vec::new(), kind: Kind::Bool, is_none: true }
    }

    /// Whether this is [`TensorSpec::none`].
    pub fn is_none(&self) -> bool {
        self.is_none
    }

    /// The spec of `tensor`; of an undefined tensor, [`TensorSpec::none`].
    pub fn of(tensor: &Tensor) -> Self {
        match tensor.defined() {
            true => Self::new(tensor.size(), tensor.kind()),
            false => Self::none(),
        }
    }

    /// The last size; 0 for a scalar.
    pub fn last(&self) -> i64 {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Number of elements.
    pub fn elements(&self) -> f64 {
        if self.is_none {
            return 0.0;
        }
        self.shape.iter().map(|&size| size as f64).product()
    }

    /// Size of the elements in bytes.
    pub fn bytes(&self) -> u64 {
        (self.elements() * self.kind.elt_size_in_bytes() as f64) as u64
    }

    /// The same spec with `samples` as its first size.
    pub(crate) fn with_samples(&self, samples: usize) -> Self {
        let mut spec = self.clone();
        if let Some(first) = spec.shape.first_mut() {
            *first = samples as i64;
        }
        spec
    }

    /// The same spec with another last size.
    pub fn with_last(&self, size: i64) -> Self {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = size;
        }
        Self { shape, ..self.clone() }
    }

    /// The same spec in another dtype; of `None`, `None`.
    pub fn with_kind(&self, kind: Kind) -> Self {
        Self { kind: if self.is_none { self.kind } else { kind }, ..self.clone() }
    }

    /// Whether layers may pass on tensors of this dtype: floats, whose gradients flow, and integers
    /// and booleans, which have no gradient. Complex tensors are rejected, because their gradients
    /// would be lost.
    pub(crate) fn is_supported(&self) -> bool {
        let discrete = [Kind::Bool, Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int, Kind::Int64];
        self.is_float() || discrete.contains(&self.kind)
    }

    /// Whether gradients can flow through this dtype.
    pub fn is_float(&self) -> bool {
        is_float(self.kind)
    }
}

/// Whether gradients can flow through a tensor of `kind`.
pub fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::Float | Kind::Double | Kind::BFloat16)
}

/// The name of a dtype in a message, such as `float32`.
pub(crate) fn dtype(kind: Kind) -> String {
    let name = match kind {
        Kind::Half => "float16",
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::Int => "int32",
        other => return format!("{other:?}").to_lowercase(),
    };
    name.to_owned()
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_none {
            true => f.write_str("None"),
            false => write!(f, "{} {:?}", dtype(self.kind), self.shape),
        }
    }
}
