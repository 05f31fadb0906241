//! Parallel text from catalogues and files to a corpus. Families: `oracle_` (values by hand; writers in `parallel/`
//! make files that the readers must give back), `property_` (order, split, random messages), `fault_` (damage, hostile files,
//! wrong settings). `parallel_memory.rs` holds the readers to the memory that a file justifies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

#[path = "parallel/catalogues.rs"]
mod catalogues;
#[path = "parallel/corpus.rs"]
mod corpus;
#[path = "parallel/files.rs"]
mod files;
#[path = "parallel/writers.rs"]
mod writers;
