//! Tables whose keys depend on their `kind`. By hand, because serde's tagged enums do not say which
//! key is wrong.

use serde::{Deserialize, Deserializer, de::Error};

/// Kinds of `[model]`.
pub(super) const MODELS: [&str; 4] = ["transformer", "translation", "amoebanet", "resnet"];
/// Kinds of `[data]`.
pub(super) const DATA: [&str; 5] = ["text", "parallel", "image-folder", "cifar10", "cifar100"];
/// Between a kind and those that there are.
pub(super) const KINDS_ARE: &str = "is no kind: use one of";

/// A table's kind, or `default`, and its other keys.
pub(super) fn with_kind<'de, D: Deserializer<'de>>(
    deserializer: D,
    default: &str,
) -> Result<(String, toml::Table), D::Error> {
    let mut table = toml::Table::deserialize(deserializer)?;
    match table.remove("kind") {
        None => Ok((default.to_owned(), table)),
        Some(toml::Value::String(kind)) => Ok((kind, table)),
        Some(other) => Err(D::Error::custom(format!("kind: {other} is no text"))),
    }
}
