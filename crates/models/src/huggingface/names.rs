//! Names of tensors in a folder, beside the names of parameters.

/// How a folder names a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The tensor's name.
    pub name: String,
    /// Whether the tensor, a matrix, is the transpose of the parameter.
    pub transpose: bool,
}

impl Name {
    /// The name that the parameter has here.
    pub(super) fn same(name: &str) -> Self {
        Self { name: name.to_owned(), transpose: false }
    }
}

/// What a tensor of a folder is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A parameter. [`Name::name`] is the parameter's.
    Parameter(Name),
    /// A copy of another tensor of the folder, which must equal that one to the bit: a tied head.
    CopyOf(String),
    /// Something that follows from the configuration, such as a causal mask.
    Derived,
}
