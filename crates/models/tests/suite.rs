//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-models --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../../gpipe/tests/common/mod.rs"]
mod common;
mod documents;
mod estimates;
mod images;
mod llama;
mod lora;
mod padding;
mod rows;
mod translate;
mod translation;
