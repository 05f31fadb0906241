//! Dtypes as numbers, for messages between processes.

use tch::Kind;

/// The dtypes that can be sent; a dtype's number is its index.
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

/// The number of a dtype, or `None` if it cannot be sent.
pub fn code(kind: Kind) -> Option<u8> {
    KINDS.iter().position(|own| *own == kind).and_then(|position| u8::try_from(position).ok())
}

/// The dtype with number `code`, or `None` if there is none.
pub fn kind(code: u8) -> Option<Kind> {
    KINDS.get(usize::from(code)).copied()
}
