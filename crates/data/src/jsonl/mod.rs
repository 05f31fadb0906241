//! Samples for fine-tuning: lines of JSON as texts whose parts are learned or only read.
//!
//! ```text
//!  file ──► Lines ──► Record ──► ChatTemplate ──► Marked text ──► Tokenizer ──► Samples
//!                                                                                  │
//!                            RowBatches ◄── Rows: samples packed, or one in each ◄─┘
//! ```
//!
//! - [`records`]: what a line says: a text, a prompt with its completion, or messages
//! - [`lines`]: lines of files, and what happens to bad ones
//! - [`template`]: the chat template of a model's folder; `python_json`: JSON in it
//! - [`marked`]: text of which parts are learned, and its tokens
//! - [`encode`]: a file as samples; [`cache`]: the same from an earlier run
//! - [`samples`]: samples as tokens, and their split into training and validation
//! - [`rows`]: where samples are in the rows of mini-batches
//! - [`batches`]: mini-batches of rows, of one source or of several with weights

pub mod batches;
pub mod cache;
pub mod encode;
pub mod lines;
pub mod marked;
mod python_json;
pub mod records;
pub mod rows;
pub mod samples;
pub mod template;

pub use batches::{NO_DOCUMENT, PackedBatch, RowBatches, Source};
pub use encode::{Encoded, Encoder};
pub use lines::{BadLine, Lines, OnBadLine};
pub use marked::{Marked, Sample};
pub use records::{Fields, Record};
pub use rows::{LongSamples, Rows};
pub use samples::Samples;
pub use template::{ChatTemplate, SpecialTokens, TemplateError};
