//! The number of references per sentence, which is part of the signature.

use std::fmt;

/// The number of references of each sentence so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum References {
    /// There is no sentence yet.
    #[default]
    Unknown,
    /// All sentences have this number.
    Each(usize),
    /// The numbers differ.
    Varying,
}

impl References {
    /// The number for both corpora together.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unknown, known) | (known, Self::Unknown) => known,
            (one, same) if one == same => one,
            _ => Self::Varying,
        }
    }
}

impl fmt::Display for References {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => formatter.write_str("0"),
            Self::Each(count) => count.fmt(formatter),
            Self::Varying => formatter.write_str("var"),
        }
    }
}
