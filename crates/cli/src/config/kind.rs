//! Tables whose keys depend on their `kind`. They are parsed by hand, because serde's tagged enums
//! do not report which key is wrong.

use serde::{Deserialize, Deserializer};

/// The key on which the other keys of a table depend.
pub(super) const KIND: &str = "kind";
/// Kinds of `[model]`.
pub(crate) const MODELS: [&str; 6] =
    ["transformer", "llama", "huggingface", "translation", "amoebanet", "resnet"];
/// Kinds of `[data]`.
pub(crate) const DATA: [&str; 6] =
    ["text", "jsonl", "parallel", "image-folder", "cifar10", "cifar100"];
/// The part of an error message between an unknown kind and the list of kinds.
pub(super) const KINDS_ARE: &str = "is no kind: use one of";

/// Splits a table into its kind, or `default` if it has none, and its other keys.
pub(super) fn with_kind<'de, D: Deserializer<'de>>(
    deserializer: D,
    default: &str,
) -> Result<(String, toml::Table), D::Error> {
    let mut table = toml::Table::deserialize(deserializer)?;
    match table.remove("kind") {
        None => Ok((default.to_owned(), table)),
        Some(toml::Value::String(kind)) => Ok((kind, table)),
        Some(other) => Ok((other.to_string(), table)),
    }
}
