//! Decoding: generates outputs one token at a time.
//!
//! - [`BeamSearch`]: chooses tokens, given a source of logits
//! - [`Decoding`]: a pipeline's logits of new positions; layers cache what they need of earlier
//!   ones

mod beam;
#[cfg(test)]
mod tests;

pub use beam::{BeamSearch, Continuation, Hypothesis, NextLogits, Sentence};

pub use crate::pipeline::{Decoding, GroupStep};
