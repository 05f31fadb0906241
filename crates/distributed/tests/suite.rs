//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-distributed --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod bounds;
mod checkpoints;
mod common;
mod parts;
mod replicas;
mod sharding;
mod slow;
