//! Data for training, from files to batches: text for language models, images for classifiers, and
//! parallel text for translation.
//!
//! Images and parallel text have separate modules, [`images`] and [`parallel`]. Text takes this
//! path:
//!
//! ```text
//!  files ──► Corpus ──► Tokenizer ──► TokenSet ──► TrainBatches / ValidationBatches ──► Loader
//!       [1]        [2]           [3]          [4]                                     [5]
//! ```
//!
//! 1. [`Corpus`]: documents read from disk, split into training and validation, with a report of
//!    what was left out.
//! 2. [`Tokenizer`]: byte-level BPE learned from the training documents, lossless on any UTF-8; or
//!    another program's.
//! 3. [`TokenSet`]: all documents as one sequence of tokens, in their order or shuffled, with the
//!    number of bytes they stand for.
//! 4. [`TrainBatches`], [`ValidationBatches`]: windows of that sequence.
//! 5. [`Loader`]: the same batches, prefetched on a thread.
//!
//! Everything here is a pure function of (files, configuration, seed). There is no environment, no
//! clock outside the loader and no global random state. The only threads are those of the loader
//! and the image decoders, and they do not change any value.
//!
//! The obvious design, a shuffling iterator, is deliberately absent. An iterator with a position
//! cannot be resumed after a crash without saving its state, and two ranks cannot agree on a batch
//! without communicating. [`TrainBatches::batch`] and [`images::TrainImages::batch`] therefore
//! offer random access.
//!
//! Also absent: tensors (a [`Batch`] holds plain `Vec<i64>`) and downloads. [`kept`] keeps what was
//! prepared for later runs, by content; its callers say where.
//!
//! ```
//! use gpipe_data::{Document, TokenSet, Tokenizer, TrainBatches};
//!
//! # fn main() -> gpipe_data::Result<()> {
//! let documents = vec![Document {
//!     name: "rain.txt".into(),
//!     text: "the rain in Spain stays mainly in the plain\n".repeat(20),
//! }];
//! let tokenizer = Tokenizer::train(&documents, 300)?;
//! let tokens = TokenSet::encode(&tokenizer, &documents)?;
//!
//! let batches = TrainBatches::new(&tokens, 8, 2, 42)?;
//! let batch = batches.batch(1_000); // No need to ask for the 1,000 batches before it.
//! assert_eq!((batch.samples, batch.sequence), (2, 8));
//! assert_eq!(batch.inputs[1..8], batch.targets[..7]); // Targets are inputs, one token later.
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod batches;
mod bounds;
mod corpus;
mod error;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod hash;
pub mod images;
pub mod jsonl;
pub mod kept;
mod loader;
mod omissions;
mod order;
pub mod parallel;
mod permutation;
mod tokenizer;
mod tokens;

pub use batches::{BATCH_TOKENS_MAX, Batch, IGNORE, TrainBatches, ValidationBatches};
pub use corpus::{
    Corpus, Cut, Document, FILE_BYTES_MAX, JsonFiles, Limits, TextReport, Texts, is_json,
};
pub use error::{Error, Result};
pub use loader::{LOADER_DEPTH_MAX, Loaded, Loader, LoaderSettings};
pub use omissions::Omissions;
pub use tokenizer::{
    END_OF_DOCUMENT, EndToken, TRAINING_BYTES_MAX, TextStream, Tokenizer, VOCABULARY_MAX,
    VOCABULARY_MIN, end_in_config,
};
pub use tokens::{TokenSet, shuffle};
