//! Most tests of this crate, as one program: each file is a module. Files that measure a whole
//! process, or that are run alone, are programs of their own (see `Cargo.toml`).
//!
//! `cargo test --package gpipe --test suite NAME::` runs one file.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod arguments;
mod batch_norm;
mod callers;
mod common;
mod early_end;
mod errors;
mod estimate;
mod faults;
mod functions;
mod gradients;
mod kernels;
mod ledger;
mod losses;
mod misuse;
mod observers;
mod offload;
mod optimizers;
mod oracle;
mod parts;
mod recipes;
mod reconfigure;
mod report;
mod schedules;
mod split;
mod state;
mod transparency;
mod unread;
mod unusual_models;
mod values;
