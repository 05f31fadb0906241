//! Errors in parallel text: what went wrong, where, and what to do about it.

use std::path::PathBuf;

/// Why parallel text could not be read. Every message ends in a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// An option is out of range.
    #[error("data.{option} = {value}: use {allowed}")]
    Setting {
        /// The name of a field of [`ParallelOptions`](crate::parallel::ParallelOptions) in a
        /// configuration.
        option: &'static str,
        /// Its value.
        value: String,
        /// The values allowed.
        allowed: &'static str,
    },

    /// A language code would not be one word in a file, a table or a vocabulary.
    #[error(
        "`{}` is no code of a language; use letters, digits, `_`, `-` and `@`, at most {} of \
        them, such as pt_BR",
        .code.escape_debug(), crate::bounds::CODE_BYTES_MAX
    )]
    Code {
        /// The code given.
        code: String,
    },

    /// A folder has no files of pairs.
    #[error(
        "there are no files of pairs (LANGUAGE.tsv or LANGUAGE.tsv.gz) in `{}`; make some with \
        `make catalogues`, or name \
         another folder", folder.display()
    )]
    NoPairFiles {
        /// The folder.
        folder: PathBuf,
    },

    /// A requested language does not occur in the sources.
    #[error("there is no text in the language `{language}`; name some of: {}", known.join(", "))]
    UnknownLanguage {
        /// The language requested.
        language: String,
        /// The languages available, most similar first.
        known: Vec<String>,
    },

    /// A requested language has too little text.
    #[error(
        "the language `{language}` has {train} pairs to train on and {validation} to validate on \
        after all that was left out, and the fewest allowed are {fewest} in all and 1 to train on; \
        add text, or lower data.min_pairs or data.validation_share"
    )]
    TooFewPairs {
        /// The language requested.
        language: String,
        /// Number of training pairs.
        train: usize,
        /// Number of validation pairs.
        validation: usize,
        /// Minimum number of pairs.
        fewest: usize,
    },

    /// No language has enough pairs.
    #[error(
        "no language has {fewest} pairs in all and 1 to train on: {report}; name more sources, or \
        lower data.min_pairs or data.validation_share"
    )]
    NoPairs {
        /// Minimum number of pairs.
        fewest: usize,
        /// What was read.
        report: String,
    },

    /// There are more pairs than fit the limit.
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
        /// The first invalid byte of that line, counted from 1.
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
        /// Number of tab-separated columns.
        columns: usize,
    },

    /// Two aligned files have different numbers of lines.
    #[error(
        "`{}` has {foreign_lines} lines and `{}` has {english_lines}, so that they are not \
        aligned; line N of one must be \
         the translation of line N of the other",
        foreign.display(), english.display()
    )]
    Misaligned {
        /// The file of source sentences.
        foreign: PathBuf,
        /// Number of lines in it.
        foreign_lines: usize,
        /// The file of target sentences.
        english: PathBuf,
        /// Number of lines in it.
        english_lines: usize,
    },

    /// A compressed file is damaged.
    #[error("`{}` cannot be unpacked ({reason}); check it with `gzip -t`, and fetch or write it \
        anew", path.display())]
    Gzip {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A compressed file unpacks to too much text.
    #[error("`{}` unpacks to more than {bytes_max} bytes; split it", path.display())]
    Unpacked {
        /// The file.
        path: PathBuf,
        /// The limit, in bytes.
        bytes_max: u64,
    },
}
