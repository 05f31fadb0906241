//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-distributed --test suite NAME::` runs one file.

mod bounds;
mod checkpoints;
mod common;
mod parts;
mod replicas;
