//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-checkpoint --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;
mod damage;
mod fit;
mod keeping;
mod model_folder;
mod round_trip;
mod tensor_file;
mod untrusted;
