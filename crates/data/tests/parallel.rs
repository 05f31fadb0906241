//! Tests of parallel text, from files to a corpus. Families: `oracle_` (values by hand),
//! `property_` (order, split), `fault_` (damage, wrong settings).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

#[path = "parallel/corpus.rs"]
mod corpus;
#[path = "parallel/files.rs"]
mod files;
