//! What can go wrong, and what to do about it.

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a sentence or an accumulator could not be counted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to compare a sentence with.
    #[error(
        "sentence {sentence} has no reference: give it at least one (an empty text is a reference \
         without words)"
    )]
    NoReference {
        /// Which one, from 1, in the order of `add`.
        sentence: u64,
    },

    /// A smoothing value that makes no precision.
    #[error("BLEU cannot be smoothed by {value}: give a finite number of 0 or more")]
    Smoothing {
        /// The value given.
        value: f64,
    },

    /// Sums of counts that do not count the same things.
    #[error(
        "scores that count differently cannot be merged ({ours} and {theirs}): make both with the \
         same options"
    )]
    Options {
        /// The signature of the one merged into.
        ours: String,
        /// The signature of the other.
        theirs: String,
    },
}
