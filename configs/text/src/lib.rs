//! Nothing: the dependencies of this package are a text to learn from, see `Cargo.toml`.
