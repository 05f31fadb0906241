//! What was read and kept, and what was left out and why.

use std::collections::BTreeMap;
use std::fmt;

/// Why a pair was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// One side is empty or only white space.
    Empty,
    /// One side has more bytes than
    /// [`ParallelOptions::bytes_max`](super::ParallelOptions::bytes_max).
    TooLong,
    /// One side is longer than [`ParallelOptions::ratio_max`](super::ParallelOptions::ratio_max)
    /// times the other.
    Ratio,
    /// The same pair already occurred.
    Duplicate,
    /// The language already has [`ParallelOptions::most_pairs`](super::ParallelOptions::most_pairs)
    /// pairs.
    OverMost,
}

impl Reason {
    /// The reason in words, for a table.
    pub fn words(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::TooLong => "too long",
            Self::Ratio => "length ratio",
            Self::Duplicate => "duplicates",
            Self::OverMost => "over the most pairs",
        }
    }
}

/// Counts of a language's pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LanguageReport {
    /// Number of training pairs.
    pub train: usize,
    /// Number of validation pairs.
    pub validation: usize,
    /// Number of pairs left out, by reason.
    pub left_out: BTreeMap<Reason, usize>,
}

impl LanguageReport {
    /// Number of pairs kept.
    pub fn kept(&self) -> usize {
        self.train + self.validation
    }

    pub(super) fn leave_out(&mut self, reason: Reason, pairs: usize) {
        if pairs > 0 {
            *self.left_out.entry(reason).or_default() += pairs;
        }
    }
}

/// What was read and kept, and what was left out and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Counts for each language of the corpus.
    pub languages: BTreeMap<String, LanguageReport>,
    /// Counts for each language that was left out because it has too few pairs. `train` and
    /// `validation` count the pairs it has.
    pub too_few: BTreeMap<String, LanguageReport>,
    /// Number of files that pairs were taken from.
    pub files: usize,
    /// Number of files skipped: their language was not requested, or their names have no language.
    pub files_passed_over: usize,
}

impl Report {
    /// Number of pairs kept, over all languages of the corpus.
    pub fn kept(&self) -> usize {
        self.languages.values().map(LanguageReport::kept).sum()
    }

    /// Number of pairs left out by reason, over all languages of the corpus.
    pub fn left_out(&self) -> BTreeMap<Reason, usize> {
        let mut all = BTreeMap::new();
        for (reason, pairs) in self.languages.values().flat_map(|language| &language.left_out) {
            *all.entry(*reason).or_default() += pairs;
        }
        all
    }
}

/// Displays as one line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kept, languages, files) = (self.kept(), self.languages.len(), self.files);
        let validation: usize = self.languages.values().map(|language| language.validation).sum();
        write!(
            f,
            "read {files} files: {kept} pairs in {languages} languages, {validation} of them to \
            validate on"
        )?;
        let left_out = self.left_out();
        if !left_out.is_empty() {
            let all: usize = left_out.values().sum();
            let parts =
                left_out.iter().map(|(reason, pairs)| format!("{pairs} {}", reason.words()));
            write!(f, "; left out {all} pairs ({})", parts.collect::<Vec<_>>().join(", "))?;
        }
        if !self.too_few.is_empty() {
            let language =
                |(code, own): (&String, &LanguageReport)| format!("{code} {}", own.kept());
            let names: Vec<String> = self.too_few.iter().map(language).collect();
            write!(f, "; left out languages with too few pairs ({})", names.join(", "))?;
        }
        if self.files_passed_over > 0 {
            let files = self.files_passed_over;
            write!(f, "; left out {files} files in other languages, or not called LANGUAGE.tsv")?;
        }
        Ok(())
    }
}
