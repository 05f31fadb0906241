//! Samples for fine-tuning: lines of JSON as texts whose parts are learned or only read.
//!
//! ```text
//!  files ──► Lines ──► Record ──► ChatTemplate ──► Marked text ──► Tokenizer ──► Sample
//! ```
//!
//! - [`records`]: what a line says: a text, a prompt with its completion, or messages
//! - [`lines`]: lines of files, and what happens to bad ones
//! - [`template`]: the chat template of a model's folder
//! - [`marked`]: text of which parts are learned, and its tokens

pub mod lines;
pub mod marked;
pub mod records;
pub mod template;

pub use lines::{BadLine, Lines, OnBadLine};
pub use marked::{Marked, Sample};
pub use records::{Fields, Record};
pub use template::{ChatTemplate, TemplateError};
