//! Pairs of all sources, without duplicates, split and in an order of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use super::catalogue::{Catalogue, Message, Number, Plurals, folder};
use super::report::LanguageReport;
use super::{ParallelError, Reason, Report, clean, lines};
use crate::hash::{StableHasher, unit};
use crate::{Error, Result};

/// No corpus has more pairs than this, before duplicates are taken out.
pub const PAIRS_MAX: usize = 1 << 27;

/// No code of a language is longer than this.
pub const CODE_BYTES_MAX: usize = 32;

/// A sentence and its translation into English.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    /// The foreign text.
    pub source: String,
    /// The English text.
    pub target: String,
}

/// The pairs of one language with English.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Language {
    /// As gettext has it: `de`, `pt_BR`, `sr@latin`.
    pub code: String,
    /// Pairs to learn from.
    pub train: Vec<Pair>,
    /// Pairs to measure on. Their English sentences are in no language's `train`.
    pub validation: Vec<Pair>,
}

/// Text in several languages with its English.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelCorpus {
    /// Sorted by code.
    pub languages: Vec<Language>,
}

/// Where pairs are from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Gettext catalogues, at any depth below a folder: `CODE/LC_MESSAGES/*.mo`, and `*.po` whose language is that of
    /// such a folder, of their header or of their name. A catalogue that is broken is an error in the report, no more.
    Catalogues {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of lines `source<TAB>target`, plain or gzip.
    Tsv {
        /// The language of the sources.
        language: String,
        /// The file.
        path: PathBuf,
    },
    /// Two files whose lines correspond, plain or gzip.
    Lines {
        /// The language of the sources.
        language: String,
        /// The file of sources.
        source: PathBuf,
        /// The file of targets.
        target: PathBuf,
    },
}

/// What of the sources becomes a corpus.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelOptions {
    /// Codes of the languages to keep; none for all.
    pub languages: Vec<String>,
    /// About which share of the English sentences is to validate on.
    pub validation_share: f64,
    /// Most pairs of one language, both sides of the split together; 0 for all.
    pub most_pairs: usize,
    /// Most bytes of one side of a pair.
    pub bytes_max: usize,
    /// Most that one side of a pair may be longer than the other, after 10 characters are added to both. Characters of
    /// Chinese, Japanese and Korean count twice.
    pub ratio_max: f64,
    /// A language with fewer pairs is left out, and one without a pair to train on.
    pub fewest_pairs: usize,
    /// Whether pairs of TSV files and aligned files are cleaned as catalogues are; otherwise they are only trimmed, and left
    /// out if a side is empty, too long or out of proportion.
    pub clean: bool,
}

impl Default for ParallelOptions {
    /// All languages with 500 pairs or more, sides of at most 400 bytes and a ratio of 2.5, 2% to validate on.
    fn default() -> Self {
        Self {
            languages: Vec::new(),
            validation_share: 0.02,
            most_pairs: 0,
            bytes_max: 400,
            ratio_max: 2.5,
            fewest_pairs: 500,
            clean: true,
        }
    }
}

impl ParallelOptions {
    fn check(&self) -> Result<()> {
        let wrong = |option, value: String, allowed| {
            Err(ParallelError::Setting { option, value, allowed }.into())
        };
        if !(0.0..1.0).contains(&self.validation_share) {
            let value = self.validation_share.to_string();
            return wrong("validation_share", value, "0 to less than 1");
        }
        if self.ratio_max.is_nan() || self.ratio_max < 1.0 {
            return wrong("ratio_max", self.ratio_max.to_string(), "1 or more");
        }
        if self.bytes_max == 0 {
            return wrong("bytes_max", "0".into(), "1 or more");
        }
        self.languages.iter().try_for_each(|code| check_code(code))
    }
}

fn check_code(code: &str) -> Result<()> {
    let is_code = (1..=CODE_BYTES_MAX).contains(&code.len())
        && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-@".contains(&byte));
    if is_code { Ok(()) } else { Err(ParallelError::Code { code: code.to_owned() }.into()) }
}

impl ParallelCorpus {
    /// Reads the sources into one corpus, and says what was left out and why.
    ///
    /// - A message becomes a pair with its translation; of a plural, a form that is used for 1 (and not for 5) goes with
    ///   the English singular, and a form that is used for several numbers with the plural. Other forms (for none, for two)
    ///   are left out: they need not name the number, and English must.
    /// - White space is normalised; marks of keys (`_File`) are taken off. A pair is left out for the [`Reason`]s.
    /// - A pair that a language has twice counts once.
    /// - The split is by a stable hash of the English sentence's letters and digits, in lower case and without directives and
    ///   tags. A sentence and its near-duplicates are thus on the same side in all languages.
    /// - Pairs are in the order of their hashes, which is also the order in which `most_pairs` is filled. What comes out
    ///   depends on the pairs and the options, never on files' names or their order.
    ///
    /// # Errors
    /// An option is out of range; a language was asked for that is unknown or has too few pairs; a folder has no catalogues;
    /// a TSV file or an aligned pair of files is malformed (with the line); nothing is left; a file cannot be read.
    pub fn read(sources: &[Source], options: &ParallelOptions) -> Result<(ParallelCorpus, Report)> {
        options.check()?;
        let mut gathering = Gathering {
            options,
            known: BTreeSet::new(),
            pairs: BTreeMap::new(),
            count: 0,
            report: Report::default(),
        };
        for source in sources {
            gathering.read(source)?;
        }
        gathering.finish()
    }

    /// A stable hash of languages, pairs and split: 16 hexadecimal digits, the same on every machine. A key for caches of
    /// what was derived from the corpus; not a defence against tampering.
    pub fn fingerprint(&self) -> String {
        let mut hasher = StableHasher::new();
        for language in &self.languages {
            hasher.field(language.code.as_bytes());
            for side in [&language.train, &language.validation] {
                hasher.field(&(side.len() as u64).to_le_bytes());
                for pair in side {
                    hasher.field(pair.source.as_bytes());
                    hasher.field(pair.target.as_bytes());
                }
            }
        }
        format!("{:016x}", hasher.finish())
    }
}

/// Pairs of the languages so far.
struct Gathering<'a> {
    options: &'a ParallelOptions,
    /// Every language met, asked for or not.
    known: BTreeSet<String>,
    pairs: BTreeMap<String, (Vec<Pair>, LanguageReport)>,
    count: usize,
    report: Report,
}

impl Gathering<'_> {
    fn read(&mut self, source: &Source) -> Result<()> {
        match source {
            Source::Catalogues { folder } => self.catalogues(folder),
            Source::Tsv { language, path } => {
                self.files(language, 1, |pair| lines::read_tsv(path, pair))
            }
            Source::Lines { language, source, target } => {
                self.files(language, 2, |pair| lines::read_aligned(source, target, pair))
            }
        }
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
        let cleaned = if options.clean { clean::cleaned } else { clean::as_it_is };
        read(&mut |source, target| self.add(language, cleaned(source, target, options)))?;
        self.report.files += files;
        Ok(())
    }

    fn catalogues(&mut self, folder: &Path) -> Result<()> {
        let found = folder::find(folder).map_err(|error| missing(folder, error))?;
        if found.files.is_empty() {
            return Err(ParallelError::NoCatalogues { folder: folder.to_path_buf() }.into());
        }
        self.report.files_passed_over += found.passed_over;
        for (path, reason) in found.unreadable {
            self.report.error(path, reason);
        }
        for file in found.files {
            // Where the path says the language, files of others need not be opened.
            if file.code.as_ref().is_some_and(|code| !self.is_wanted(code)) {
                self.report.files_passed_over += 1;
                continue;
            }
            let catalogue = match Catalogue::open(&file.path) {
                Ok(catalogue) => catalogue,
                Err(reason) => {
                    self.report.error(file.path, reason);
                    continue;
                }
            };
            match file.language(&catalogue) {
                Some(code) if self.is_wanted(&code) => {
                    self.catalogue(&code, &catalogue)?;
                    self.report.files += 1;
                }
                _ => self.report.files_passed_over += 1,
            }
        }
        Ok(())
    }

    fn catalogue(&mut self, code: &str, catalogue: &Catalogue) -> Result<()> {
        let plurals = Plurals::parse(catalogue.plural_forms.as_deref());
        for _ in 0..catalogue.fuzzy {
            self.add(code, Err(Reason::Fuzzy))?;
        }
        for message in &catalogue.messages {
            for (form, translation) in message.strings.iter().enumerate() {
                let pair = target(message, form, plurals.as_ref()).and_then(|target| {
                    if clean::is_credits(message.context.as_deref(), &message.id, translation) {
                        return Err(Reason::Credits);
                    }
                    clean::cleaned(translation, target, self.options)
                });
                self.add(code, pair)?;
            }
        }
        Ok(())
    }

    /// Whether a language is asked for; it is known from now on.
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

    fn finish(self) -> Result<(ParallelCorpus, Report)> {
        let Self { options, known, pairs, mut report, .. } = self;
        if let Some(unknown) = options.languages.iter().find(|asked| !known.contains(*asked)) {
            return Err(unknown_language(unknown, &known));
        }
        let mut languages = Vec::new();
        for (code, (pairs, mut counts)) in pairs {
            let pairs = ordered(pairs, options.most_pairs, &mut counts);
            let (validation, train): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| {
                unit(clean::sentence_key(&pair.target)) < options.validation_share
            });
            (counts.train, counts.validation) = (train.len(), validation.len());
            if counts.kept() < options.fewest_pairs || train.is_empty() {
                report.too_few.insert(code, counts);
            } else {
                report.languages.insert(code.clone(), counts);
                languages.push(Language { code, train, validation });
            }
        }
        let fewest = options.fewest_pairs;
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

/// The English text of a translation, if it is known.
fn target<'a>(
    message: &'a Message,
    form: usize,
    plurals: Option<&Plurals>,
) -> Result<&'a str, Reason> {
    let Some(plural) = &message.plural else { return Ok(&message.id) };
    match plurals.and_then(|plurals| plurals.number(form, message.strings.len())) {
        Some(Number::One) => Ok(&message.id),
        Some(Number::Several) => Ok(plural),
        None => Err(Reason::PluralForm),
    }
}

/// The pairs in the order of their hashes, each once, and at most `most` unless that is 0.
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

/// A folder that is not there, by its own error.
fn missing(folder: &Path, error: Error) -> Error {
    match error {
        Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
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
