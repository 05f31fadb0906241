//! Data for training, from files to batches: text for language models, images for classifiers, and
//! parallel text for translation.
//!
//! Images and parallel text have modules of their own, [`images`] and [`parallel`]. Text takes this
//! way:
//!
//! ```text
//!  files ──► Corpus ──► Tokenizer ──► TokenSet ──► TrainBatches / ValidationBatches ──► Loader
//!       [1]        [2]           [3]          [4]                                     [5]
//! ```
//!
//! 1. [`Corpus`]: documents read from disk, split into training and validation; and what was left
//!    out.
//! 2. [`Tokenizer`]: byte-level BPE learned from the training documents; lossless on any UTF-8.
//! 3. [`TokenSet`]: all documents as one sequence of tokens, with the bytes they stand for; in
//!    their order or shuffled.
//! 4. [`TrainBatches`], [`ValidationBatches`]: windows of that sequence.
//! 5. [`Loader`]: the same batches, made ahead on a thread.
//!
//! Everything here is a pure function of (files, configuration, seed): no environment, no global
//! random state, and no clock and no threads but the loader's and those that decode images, which
//! change no value. The obvious design - a shuffling iterator - is deliberately absent: an iterator
//! that remembers where it is cannot be resumed after a crash without saving its state, and two
//! ranks cannot agree on a batch without talking. [`TrainBatches::batch`] and
//! [`images::TrainImages::batch`] are random access instead.
//!
//! Also absent: tensors (a [`Batch`] holds plain `Vec<i64>`), downloads and caches
//! ([`Corpus::fingerprint`] is a key for a cache that others may keep).
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
mod loader;
mod omissions;
mod order;
pub mod parallel;
mod permutation;
mod tokenizer;
mod tokens;

pub use batches::{BATCH_TOKENS_MAX, Batch, IGNORE, TrainBatches, ValidationBatches};
pub use corpus::{Corpus, Cut, Document, FILE_BYTES_MAX, JsonFiles, Limits, TextReport, Texts};
pub use error::{Error, Result};
pub use loader::{LOADER_DEPTH_MAX, Loaded, Loader, LoaderSettings};
pub use omissions::Omissions;
pub use tokenizer::{
    END_OF_DOCUMENT, TRAINING_BYTES_MAX, Tokenizer, VOCABULARY_MAX, VOCABULARY_MIN,
};
pub use tokens::TokenSet;
