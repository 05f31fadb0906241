//! Translation into English: reads and encodes sentence pairs of many languages, and makes
//! mini-batches.

use std::{ops::Range, path::PathBuf, sync::Arc, time::SystemTime};

use gpipe::IntoTensors;
use gpipe_checkpoint::manifest::sha256;
use gpipe_data::{
    Tokenizer, kept,
    parallel::{
        PairBatch, PairSet, ParallelCorpus, ParallelOptions, Report, Side, Source, TrainPairs,
        TrainPairsOptions, TranslationVocabulary, ValidationPairs, VocabularyOptions,
    },
};
use tch::Tensor;

use super::{Batch, Batches, MakeBatch, Part, Task, Vocabulary, cache};
use crate::{
    CliError,
    config::{Config, Model, ParallelConfig},
    files::io,
    progress::Work,
};

/// The padding token, which is the same in every vocabulary that gpipe trains.
pub(crate) const PAD: i64 = 1;

/// The format of files that keep [`Prepared`].
const FORMAT: &str = "gpipe pairs 1";

/// What is kept for later runs: the tokenizer, the pairs to train and to validate on, and what was
/// read.
type Prepared = (String, PairSet, PairSet, String);

/// Sentence pairs as tokens.
pub(crate) struct Translation {
    vocabulary: Vocabulary,
    train: Arc<PairSet>,
    validation: PairSet,
    summary: String,
    fingerprint: String,
    config: Config,
    data: ParallelConfig,
}

impl Translation {
    /// Reads the pairs and encodes both sides with the vocabulary `given`, or with one trained on
    /// the training pairs.
    pub(crate) fn open(
        config: &Config,
        data: &ParallelConfig,
        given: Option<Vocabulary>,
    ) -> Result<Self, CliError> {
        let (own, train, validation, report) = prepared(config, data, given)?;
        let languages = train.languages().len();
        if validation.is_empty() {
            let longer: usize = (0..languages).map(|l| validation.left_out(l)).sum();
            return Err(CliError::Usage(match longer {
                0 => format!(
                    "no pair is held out to validate on: raise data.validation_share, which is {}",
                    data.validation_share
                ),
                longer => format!(
                    "data.length = {}: all {longer} pairs held out to validate on have more \
                    tokens: raise it",
                    data.length
                ),
            }));
        }
        let longer: usize = [&train, &validation]
            .iter()
            .flat_map(|set| (0..languages).map(|l| set.left_out(l)))
            .sum();
        let measured = match validation_pairs(data) {
            Some(most) if (0..languages).any(|language| validation.pairs(language) > most) => {
                format!(" (of which data.validation_pairs = {most} of a language are measured)")
            }
            _ => String::new(),
        };
        let summary = format!(
            "parallel text: {report}\nparallel text: {languages} languages, {} pairs to train on, \
            {} to validate on{measured} ({longer} of more than {} tokens are left out), \
            vocabulary {}",
            train.len(),
            validation.len(),
            data.length,
            own.tokenizer().vocabulary()
        );
        let vocabulary = Vocabulary::from(own.tokenizer().clone());
        let fingerprint = fingerprint(&train);
        let (config, data) = (config.clone(), data.clone());
        let train = Arc::new(train);
        Ok(Self { vocabulary, train, validation, summary, fingerprint, config, data })
    }

    /// The training and the validation pairs.
    pub(crate) fn sets(&self) -> (&PairSet, &PairSet) {
        (&self.train, &self.validation)
    }
}

/// The vocabulary `given`, or one trained on the training pairs, the pairs of both sides as tokens,
/// and what was read. They come from the cache if they were prepared before.
fn prepared(
    config: &Config,
    data: &ParallelConfig,
    given: Option<Vocabulary>,
) -> Result<(TranslationVocabulary, PairSet, PairSet, String), CliError> {
    let before = states(data);
    let kept = match cache::folder(&data.cache) {
        // What cannot be read is told by what reads it.
        Some(folder) => {
            key(config, data, given.as_ref()).ok().flatten().map(|own| folder.join(own))
        }
        None => None,
    };
    if let Some(path) = &kept
        && let Some((json, train, validation, report)) = kept::read::<Prepared>(path, FORMAT)
    {
        let own = TranslationVocabulary::from_tokenizer(Tokenizer::from_json(&json, path)?)?;
        check_pad(&own)?;
        return Ok((own, train, validation, report));
    }
    let (corpus, report) = {
        let _shown = Work::new("reading the pairs of sentences", 0);
        corpus(data)?
    };
    let own = match (given, &config.model) {
        (Some(given), _) => TranslationVocabulary::from_tokenizer(given.tokenizer()?.clone())?,
        (None, Model::Translation(model)) => {
            let options = VocabularyOptions {
                tokens: model.vocabulary,
                temperature: data.temperature,
                seed: config.seed,
                ..VocabularyOptions::default()
            };
            let _shown = Work::new("learning the vocabulary of all languages", 0);
            TranslationVocabulary::train(&corpus, &options)?
        }
        (None, _) => {
            return Err(CliError::Usage("parallel text needs a translation model".into()));
        }
    };
    check_pad(&own)?;
    let (train, validation) = {
        let _shown = Work::new("encoding the sentences", 0);
        let encode = |side| PairSet::encode(&own, &corpus, side, data.length);
        (encode(Side::Train)?, encode(Side::Validation)?)
    };
    let prepared = (own.tokenizer().to_json()?, train, validation, report.to_string());
    // If a file changed meanwhile, the key is not that of its pairs.
    if let Some(path) = kept
        && states(data) == before
    {
        cache::tell(&path, kept::write(&path, FORMAT, &prepared));
    }
    let (_, train, validation, report) = prepared;
    Ok((own, train, validation, report))
}

/// The sizes and times of all files that are read.
fn states(data: &ParallelConfig) -> Option<Vec<(u64, SystemTime)>> {
    let files = sources(data).into_iter().map(|source| source.files().ok());
    let files: Vec<PathBuf> = files.collect::<Option<Vec<_>>>()?.concat();
    let state = |path: PathBuf| {
        let own = path.metadata().ok()?;
        Some((own.len(), own.modified().ok()?))
    };
    files.into_iter().map(state).collect()
}

/// The name of the file that keeps what is prepared. `None` if the data are small.
fn key(
    config: &Config,
    data: &ParallelConfig,
    given: Option<&Vocabulary>,
) -> Result<Option<String>, CliError> {
    let mut key = cache::key();
    key = match (given, &config.model) {
        (Some(given), _) => key.with(given.tokenizer()?.to_json()?.as_bytes()),
        (None, Model::Translation(model)) => {
            let own = (model.vocabulary, data.temperature, config.seed);
            key.with(format!("{own:?}").as_bytes())
        }
        (None, _) => return Ok(None),
    };
    key = key.with(format!("{:?}, {}", options(data), data.length).as_bytes());
    let mut bytes = 0;
    for source in sources(data) {
        let kind = match &source {
            // The report counts the other files of the folder, too.
            Source::Folder { folder } => {
                let count = std::fs::read_dir(folder).map_err(io(folder))?.count();
                format!("folder of {count}")
            }
            Source::Tsv { language, .. } => format!("tsv of {language}"),
            Source::Lines { language, .. } => format!("lines of {language}"),
        };
        key = key.with(kind.as_bytes());
        for path in source.files()? {
            // The name says the language.
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            bytes += path.metadata().map_err(io(&path))?.len();
            key = key.with(name.as_bytes()).with_file(&path).map_err(io(&path))?;
        }
    }
    Ok((bytes >= cache::BYTES_MIN).then(|| key.name()))
}

impl Task for Translation {
    fn summary(&self) -> &str {
        &self.summary
    }

    fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn held_out_fingerprint(&self) -> String {
        fingerprint(&self.validation)
    }

    /// `samples` counts pairs as [`TrainPairs::pairs_seen`] does, so it gives the position of a run
    /// in the order of pairs.
    fn training(
        &self,
        batches: u64,
        samples: u64,
        _fed: Range<usize>,
    ) -> Result<MakeBatch, CliError> {
        let options = TrainPairsOptions {
            target_tokens: self.data.batch_tokens,
            temperature: self.data.temperature,
            seed: self.config.seed,
        };
        let all = TrainPairs::new(Arc::clone(&self.train), &options)?;
        let all = all.starting_at(batches, samples);
        Ok(Box::new(move |number| {
            let samples = all.pairs_per_batch();
            Ok(Batch { samples, ..tensors(&all.batch(number)?)? })
        }))
    }

    fn validation(&self, _fed: bool) -> Result<Vec<Part<'_>>, CliError> {
        parts(&self.validation, &self.data)
    }
}

/// The maximum number of pairs per language that a validation measures.
pub(crate) fn validation_pairs(data: &ParallelConfig) -> Option<usize> {
    Some(data.validation_pairs).filter(|&most| most > 0)
}

/// The pairs of each language, up to the configured maximum.
pub(crate) fn parts<'a>(
    set: &'a PairSet,
    data: &ParallelConfig,
) -> Result<Vec<Part<'a>>, CliError> {
    let most = validation_pairs(data);
    let languages = set.languages().enumerate().filter(|(language, _)| set.pairs(*language) > 0);
    let part = |(language, code): (usize, &str)| {
        let all = ValidationPairs::new(set, language, data.batch_tokens, most)?;
        let batches: Batches<'a> = Box::new(all.map(|batch| Ok(tensors(&batch)?)));
        Ok(Part { name: Some(code.to_owned()), batches })
    };
    languages.map(part).collect()
}

/// A batch as int64 tensors: the inputs are sources and decoder inputs [samples, length], and the
/// targets are [samples, length].
fn tensors(batch: &PairBatch) -> Result<Batch, tch::TchError> {
    let rows = |values: &[i64], length: usize| {
        Tensor::f_from_slice(values)?.f_reshape([batch.samples as i64, length as i64])
    };
    let sources = rows(&batch.sources, batch.source_length)?;
    let inputs = rows(&batch.inputs, batch.target_length)?;
    let targets = rows(&batch.targets, batch.target_length)?;
    Ok(Batch {
        inputs: vec![sources, inputs].into_tensors(),
        targets,
        samples: batch.samples as u64,
    })
}

/// Checks that the vocabulary's padding token is the one that the network masks.
pub(crate) fn check_pad(vocabulary: &TranslationVocabulary) -> Result<(), CliError> {
    if i64::from(vocabulary.pad()) == PAD {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "the tokenizer pads with token {}, and not with {PAD}: it is of another model",
        vocabulary.pad()
    )))
}

/// The SHA-256 of the concatenated SHA-256 of each language's pairs as tokens.
fn fingerprint(set: &PairSet) -> String {
    let language = |language: usize| {
        let sides = (0..set.pairs(language))
            .flat_map(|pair| [set.source(language, pair), set.target(language, pair)]);
        let bytes: Vec<u8> = sides.flatten().flat_map(|token| token.to_le_bytes()).collect();
        sha256(&bytes)
    };
    sha256((0..set.languages().len()).map(language).collect::<String>().as_bytes())
}

/// Reads the configured pairs.
fn corpus(data: &ParallelConfig) -> Result<(ParallelCorpus, Report), CliError> {
    let sources = sources(data);
    if sources.is_empty() {
        return Err(CliError::Usage(
            "no parallel text is named: set data.folder (make catalogues makes \
            data/translations), or name files in [[data.tsv]] or [[data.lines]]"
                .into(),
        ));
    }
    Ok(ParallelCorpus::read(&sources, &options(data))?)
}

/// Which pairs are kept, and how they are split.
fn options(data: &ParallelConfig) -> ParallelOptions {
    ParallelOptions {
        languages: data.languages.clone(),
        validation_share: data.validation_share,
        most_pairs: data.most_pairs,
        bytes_max: data.sentence_bytes,
        ratio_max: data.ratio,
        min_pairs: data.min_pairs,
    }
}

/// The configured sources of pairs.
fn sources(data: &ParallelConfig) -> Vec<Source> {
    let tsv = data
        .tsv
        .iter()
        .map(|file| Source::Tsv { language: file.language.clone(), path: file.path.clone() });
    let lines = data.lines.iter().map(|files| Source::Lines {
        language: files.language.clone(),
        source: files.source.clone(),
        target: files.target.clone(),
    });
    let folder = Some(&data.folder).filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.map(|folder| Source::Folder { folder: folder.clone() });
    folder.into_iter().chain(tsv).chain(lines).collect()
}
