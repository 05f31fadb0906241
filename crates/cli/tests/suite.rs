//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe-cli --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod adapters;
mod cli;
mod common;
mod environments;
mod explained;
mod folders;
mod foreign_weights;
mod image_faults;
mod images;
mod interchange;
mod keys;
mod ledger;
mod llama;
mod lost_files;
mod planning;
mod plot;
mod readme;
mod recipes;
mod reported;
mod resume;
mod samples;
mod schedules;
mod trace;
mod translation;
