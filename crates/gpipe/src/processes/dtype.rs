//! Dtypes as numbers, for what is sent between processes.

use tch::Kind;

/// By number.
const KINDS: [Kind; 10] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::Bool,
    Kind::BFloat16,
];

/// The number of a dtype, if it can be sent.
pub fn code(kind: Kind) -> Option<u8> {
    KINDS.iter().position(|own| *own == kind).and_then(|position| u8::try_from(position).ok())
}

/// The dtype of a number.
pub fn kind(code: u8) -> Option<Kind> {
    KINDS.get(usize::from(code)).copied()
}
