//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-data --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod batches;
mod corpus_cargo;
mod corpus_paths;
mod images;
mod loader;
mod pairs;
mod parallel;
mod tokenizer;
mod translation_vocabulary;
