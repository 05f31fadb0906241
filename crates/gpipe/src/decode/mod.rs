//! Making outputs one token after the other.
//!
//! - [`BeamSearch`]: which tokens, from whatever gives the next ones' logits
//! - [`Decoding`]: a pipeline's logits of new positions, layers keeping what they need of earlier
//!   ones

mod beam;
#[cfg(test)]
mod tests;

pub use beam::{BeamSearch, Continuation, Hypothesis, NextLogits, Sentence};

pub use crate::pipeline::{Decoding, GroupStep};
