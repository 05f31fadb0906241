//! Gathers the pairs of all sources: removes duplicates, orders and splits them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::corpus::check_code;
use super::{
    Language, LanguageReport, PAIRS_MAX, Pair, ParallelCorpus, ParallelError, ParallelOptions,
    Reason, Report, Source, folder, lines, pairs,
};
use crate::hash::{StableHasher, unit};
use crate::{Error, Result};

/// The pairs gathered so far, by language.
pub(super) struct Gathering<'a> {
    options: &'a ParallelOptions,
    /// Every language found, requested or not.
    known: BTreeSet<String>,
    pairs: BTreeMap<String, (Vec<Pair>, LanguageReport)>,
    count: usize,
    report: Report,
}

impl<'a> Gathering<'a> {
    pub(super) fn new(options: &'a ParallelOptions) -> Self {
        let (known, pairs, report) = Default::default();
        Self { options, known, pairs, count: 0, report }
    }

    pub(super) fn read(&mut self, source: &Source) -> Result<()> {
        match source {
            Source::Folder { folder } => self.folder(folder),
            Source::Tsv { language, path } => self.tsv(language, path),
            Source::Lines { language, source, target } => {
                self.files(language, 2, |pair| lines::read_aligned(source, target, pair))
            }
        }
    }

    fn folder(&mut self, folder: &Path) -> Result<()> {
        let found = folder::find(folder).map_err(|error| missing(folder, error))?;
        self.report.files_passed_over += found.others;
        found.files.iter().try_for_each(|(language, path)| self.tsv(language, path))
    }

    fn tsv(&mut self, language: &str, path: &Path) -> Result<()> {
        self.files(language, 1, |pair| lines::read_tsv(path, pair))
    }

    fn files(
        &mut self,
        language: &str,
        files: usize,
        read: impl FnOnce(&mut dyn FnMut(&str, &str) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        check_code(language)?;
        if !self.is_wanted(language) {
            self.report.files_passed_over += files;
            return Ok(());
        }
        let options = self.options;
        read(&mut |source, target| self.add(language, pairs::pair(source, target, options)))?;
        self.report.files += files;
        Ok(())
    }

    /// Whether a language was requested. Records that the language exists.
    fn is_wanted(&mut self, code: &str) -> bool {
        if !self.known.contains(code) {
            self.known.insert(code.to_owned());
        }
        self.options.languages.is_empty()
            || self.options.languages.iter().any(|asked| asked == code)
    }

    fn add(&mut self, code: &str, pair: Result<Pair, Reason>) -> Result<()> {
        if !self.pairs.contains_key(code) {
            self.pairs.insert(code.to_owned(), Default::default());
        }
        let Some((pairs, report)) = self.pairs.get_mut(code) else { return Ok(()) };
        match pair {
            Ok(_) if self.count == PAIRS_MAX => return Err(ParallelError::TooManyPairs.into()),
            Ok(pair) => {
                self.count += 1;
                pairs.push(pair);
            }
            Err(reason) => report.leave_out(reason, 1),
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Result<(ParallelCorpus, Report)> {
        let Self { options, known, pairs, mut report, .. } = self;
        if let Some(unknown) = options.languages.iter().find(|asked| !known.contains(*asked)) {
            return Err(unknown_language(unknown, &known));
        }
        let mut languages = Vec::new();
        for (code, (pairs, mut counts)) in pairs {
            let pairs = ordered(pairs, options.most_pairs, &mut counts);
            let (validation, train): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| {
                unit(pairs::sentence_key(&pair.target)) < options.validation_share
            });
            (counts.train, counts.validation) = (train.len(), validation.len());
            if counts.kept() < options.min_pairs || train.is_empty() {
                report.too_few.insert(code, counts);
            } else {
                report.languages.insert(code.clone(), counts);
                languages.push(Language { code, train, validation });
            }
        }
        let fewest = options.min_pairs;
        let is_left = |code: &&String| report.languages.contains_key(*code);
        if let Some(code) = options.languages.iter().find(|code| !is_left(code)) {
            let counts = report.too_few.get(code).cloned().unwrap_or_default();
            let LanguageReport { train, validation, .. } = counts;
            return Err(ParallelError::TooFewPairs {
                language: code.clone(),
                train,
                validation,
                fewest,
            }
            .into());
        }
        if languages.is_empty() {
            return Err(ParallelError::NoPairs { fewest, report: report.to_string() }.into());
        }
        Ok((ParallelCorpus { languages }, report))
    }
}

/// The pairs in hash order, without duplicates, and at most `most` of them unless `most` is 0.
fn ordered(pairs: Vec<Pair>, most: usize, counts: &mut LanguageReport) -> Vec<Pair> {
    let hash = |pair: &Pair| {
        let mut hasher = StableHasher::new();
        hasher.field(pair.source.as_bytes());
        hasher.field(pair.target.as_bytes());
        hasher.finish()
    };
    let all = pairs.len();
    let mut hashed: Vec<(u64, Pair)> = pairs.into_iter().map(|pair| (hash(&pair), pair)).collect();
    hashed.sort_unstable();
    hashed.dedup();
    counts.leave_out(Reason::Duplicate, all - hashed.len());
    if most > 0 {
        counts.leave_out(Reason::OverMost, hashed.len().saturating_sub(most));
        hashed.truncate(most);
    }
    hashed.into_iter().map(|(_, pair)| pair).collect()
}

/// Turns the error of a missing folder into its specific variant.
fn missing(folder: &Path, error: Error) -> Error {
    match error {
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Error::MissingPath { path: folder.to_path_buf() }
        }
        other => other,
    }
}

fn unknown_language(asked: &str, known: &BTreeSet<String>) -> Error {
    let mut known: Vec<String> = known.iter().cloned().collect();
    known.sort_by(|a, b| strsim::jaro_winkler(b, asked).total_cmp(&strsim::jaro_winkler(a, asked)));
    ParallelError::UnknownLanguage { language: asked.to_owned(), known }.into()
}
