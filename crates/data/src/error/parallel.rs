//! What can go wrong with parallel text, where, and what to do about it.

use std::path::PathBuf;

/// Why parallel text could not be read. Every message ends in a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// An option that cannot be.
    #[error("parallel text cannot have {option} of {value}; use {allowed}")]
    Setting {
        /// The field of [`ParallelOptions`](crate::parallel::ParallelOptions).
        option: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },

    /// A language's name that would not be one word in a file, a table or a vocabulary.
    #[error(
        "`{}` is no code of a language; use letters, digits, `_`, `-` and `@`, at most {} of \
        them, such as pt_BR",
        .code.escape_debug(), crate::bounds::CODE_BYTES_MAX
    )]
    Code {
        /// What was given.
        code: String,
    },

    /// A folder without files of pairs.
    #[error(
        "there are no files of pairs (LANGUAGE.tsv or LANGUAGE.tsv.gz) in `{}`; make some with \
        `make catalogues`, or name \
         another folder", folder.display()
    )]
    NoPairFiles {
        /// The folder.
        folder: PathBuf,
    },

    /// A language was asked for that the sources do not have.
    #[error("there is no text in the language `{language}`; name some of: {}", known.join(", "))]
    UnknownLanguage {
        /// What was asked for.
        language: String,
        /// What there is, the nearest first.
        known: Vec<String>,
    },

    /// A language was asked for that has too little text.
    #[error(
        "the language `{language}` has {train} pairs to train on and {validation} to validate on \
        after all that was left out, and the \
         fewest allowed are {fewest} in all and 1 to train on; add text, or lower that limit"
    )]
    TooFewPairs {
        /// What was asked for.
        language: String,
        /// Pairs to train on.
        train: usize,
        /// Pairs to validate on.
        validation: usize,
        /// How many there must be.
        fewest: usize,
    },

    /// Nothing is left of any language.
    #[error("no language has {fewest} pairs: {report}; name more sources, or lower the limit")]
    NoPairs {
        /// How many there must be.
        fewest: usize,
        /// What was read.
        report: String,
    },

    /// More pairs than can be held.
    #[error(
        "there are more than {} pairs; name fewer sources or languages",
        crate::bounds::PAIRS_MAX
    )]
    TooManyPairs,

    /// A file of pairs is not UTF-8.
    #[error(
        "`{}`, line {line}: byte {byte} of the line is not UTF-8; convert the file (for example \
        with `iconv -t UTF-8`)",
        path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The first invalid byte of that line, from 1.
        byte: usize,
    },

    /// A line of a TSV file is not a pair.
    #[error(
        "`{}`, line {line}: {columns} columns, and a pair has 2; write SOURCE, a tab and TARGET \
        on each line",
        path.display()
    )]
    Columns {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Parts between tabs.
        columns: usize,
    },

    /// Two files that should go line by line do not.
    #[error(
        "`{}` has {foreign_lines} lines and `{}` has {english_lines}, so that they are not \
        aligned; line N of one must be \
         the translation of line N of the other",
        foreign.display(), english.display()
    )]
    Misaligned {
        /// The file of sources.
        foreign: PathBuf,
        /// Its lines.
        foreign_lines: usize,
        /// The file of targets.
        english: PathBuf,
        /// Its lines.
        english_lines: usize,
    },

    /// A damaged archive.
    #[error("`{}` cannot be unpacked ({reason}); check it with `gzip -t`, and fetch or write it \
        anew", path.display())]
    Gzip {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// An archive of too much text.
    #[error("`{}` unpacks to more than {bytes_max} bytes; split it", path.display())]
    Unpacked {
        /// The file.
        path: PathBuf,
        /// How many it may have.
        bytes_max: u64,
    },
}
