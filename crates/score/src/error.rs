//! Errors and their remedies.

/// A result whose error is [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a sentence or an accumulator could not be counted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A sentence has no reference.
    #[error(
        "sentence {sentence} has no reference: give it at least one (an empty text is a reference \
         without words)"
    )]
    NoReference {
        /// The number of the sentence, from 1, in the order of `add`.
        sentence: u64,
    },

    /// The smoothing value is negative or not finite.
    #[error("BLEU cannot be smoothed by {value}: give a finite number of 0 or more")]
    Smoothing {
        /// The value.
        value: f64,
    },

    /// Two accumulators have different options.
    #[error(
        "scores that count differently cannot be merged ({ours} and {theirs}): make both with the \
         same options"
    )]
    Options {
        /// The signature of the accumulator that was merged into.
        ours: String,
        /// The signature of the other accumulator.
        theirs: String,
    },
}
