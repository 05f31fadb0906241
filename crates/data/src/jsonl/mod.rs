//! Samples for fine-tuning: JSONL encoded as tokens with a loss mask.
//!
//! ```text
//!  file ──► Lines ──► Record ──► ChatTemplate ──► Marked text ──► Tokenizer ──► Samples
//!                                                                                  │
//!                            RowBatches ◄── Rows: samples packed, or one in each ◄─┘
//! ```
//!
//! - [`records`]: parses a line: a text, a prompt with its completion, or messages
//! - [`lines`]: reads the lines of a file, and refuses or skips invalid lines
//! - [`template`]: the chat template of a model's folder; `python_json`: its `tojson` filter
//! - `turns`: the loss mask of a conversation
//! - [`marked`]: a text with its loss mask, and its tokens
//! - [`encode`]: encodes a file as samples
//! - [`samples`]: samples as tokens, and their split into training and validation
//! - [`rows`]: packs samples into the rows of mini-batches
//! - [`batches`]: mini-batches of rows from one source, or from several sources by weight

pub mod batches;
pub mod encode;
pub mod lines;
pub mod marked;
mod python_json;
pub mod records;
pub mod rows;
pub mod samples;
pub mod template;
mod turns;

pub use batches::{NO_DOCUMENT, PackedBatch, RowBatches, Source, is_share};
pub use encode::{Encoded, Encoder};
pub use lines::{BadLine, Lines, OnBadLine};
pub use marked::{Marked, Sample};
pub use records::{Fields, Record};
pub use rows::{LongSamples, Rows};
pub use samples::Samples;
pub use template::{ChatTemplate, SpecialTokens, TemplateError};
