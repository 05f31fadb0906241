//! Samples of JSONL files: texts, prompts with completions, conversations. Rows of them, several
//! to a row or one in each, are mini-batches for predicting the next token.
//!
//! - [`reader`]: files as samples, read or kept by an earlier run

mod reader;

use std::{fmt::Write, ops::Range, path::PathBuf, sync::Arc};

use gpipe::{IntoTensors, Padding, PipelineBuilder, TensorSpec, layers::DOCUMENTS};
use gpipe_checkpoint::manifest::sha256;
use gpipe_data::{
    Document, IGNORE, TRAINING_BYTES_MAX, Tokenizer,
    jsonl::{NO_DOCUMENT, PackedBatch, RowBatches, Rows, Samples, Source, batches::in_order},
};
use tch::{Kind, Tensor};

use self::reader::{Reader, encoder};
use super::{
    Batch, MakeBatch, Part, Task, Vocabulary,
    language::{learned_from, tokens_to_learn},
    template::{self, Template},
};
use crate::{
    CliError,
    config::{Config, Data, JsonlConfig, PackingChoice},
    numbers::counted,
};

/// A tokenizer is learned from at most this much text, of which it takes a sample.
const TEXT_BYTES_MAX: u64 = 4 * TRAINING_BYTES_MAX;
/// Samples as tokens, in rows.
pub(crate) struct Jsonl {
    vocabulary: Vocabulary,
    /// The sources to train on, with their weights.
    train: Vec<(Arc<Source>, f64)>,
    validation: Source,
    summary: String,
    fingerprint: String,
    config: Config,
    sequence: usize,
    told: Told,
}

impl Jsonl {
    /// Reads the files and encodes their samples with the tokenizer `given`, or with one learned
    /// from the files.
    pub(crate) fn open(
        config: &Config,
        data: &JsonlConfig,
        given: Option<Vocabulary>,
    ) -> Result<Self, CliError> {
        let packing = config.packing().unwrap_or(PackingChoice::None);
        let sources = sources(data);
        let (vocabulary, template, learned) = vocabulary(config, data, given)?;
        let mut reader = Reader::new(data, &vocabulary, template.as_ref())?;
        let mut held_out = Samples::default();
        let mut train = Vec::with_capacity(sources.len());
        for (paths, weight) in &sources {
            let samples = reader.samples(paths)?;
            if data.validation.is_empty() {
                let (own, other) = samples.split(data.validation_share);
                held_out.append(&other);
                train.push((own, *weight));
            } else {
                train.push((samples, *weight));
            }
        }
        if !data.validation.is_empty() {
            held_out = reader.samples(&data.validation)?;
        }
        let placed = |samples: Samples| {
            let rows = Rows::new(&samples, data.sequence, packing != PackingChoice::None);
            Source { samples, rows }
        };
        let train: Vec<(Arc<Source>, f64)> = train
            .into_iter()
            .map(|(samples, weight)| (Arc::new(placed(samples)), weight))
            .collect();
        let validation = placed(held_out);
        let mut skipped = String::new();
        reader.tell_skipped(&mut skipped);
        if let Err(reason) = check(&sources, &train, &validation) {
            // Skipped lines may be why too few samples are left.
            return Err(CliError::Usage(format!("{reason}\n{skipped}").trim_end().to_owned()));
        }
        let mut summary = String::new();
        for ((paths, _), (source, weight)) in sources.iter().zip(&train) {
            let weight = if train.len() > 1 { Some(*weight) } else { None };
            describe(&mut summary, &names(paths), source, (data.sequence, packing), weight);
        }
        let what = match data.validation.is_empty() {
            true => "held out".to_owned(),
            false => names(&data.validation),
        };
        describe(&mut summary, &what, &validation, (data.sequence, packing), None);
        let most = config.train.validation_tokens;
        if let Some(part) = part_of_rows(&validation, most) {
            let _ = writeln!(summary, "  measured: {part} (train.validation_tokens = {most})");
        }
        summary.push_str(&skipped);
        let tokenizer = vocabulary.tokenizer()?;
        let _ = write!(summary, "vocabulary {}{learned}", tokenizer.vocabulary());
        let fingerprint = fingerprint(train.iter().map(|(own, weight)| (own.as_ref(), *weight)));
        let (config, sequence, told) = (config.clone(), data.sequence, Told::of(config));
        Ok(Self { vocabulary, train, validation, summary, fingerprint, config, sequence, told })
    }
}

impl Task for Jsonl {
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
        fingerprint([(&self.validation, 1.0)])
    }

    fn training(
        &self,
        batches: u64,
        samples: u64,
        _fed: Range<usize>,
    ) -> Result<MakeBatch, CliError> {
        let (config, told) = (&self.config, self.told);
        let all = RowBatches::new(
            self.train.clone(),
            self.sequence,
            config.train.mini_batch,
            config.seed,
        )?;
        let all = all.starting_at(batches, samples);
        Ok(Box::new(move |number| Ok(tensors(&all.batch(number), told)?)))
    }

    fn validation(&self, _fed: bool) -> Result<Vec<Part<'_>>, CliError> {
        let most = self.config.train.validation_tokens;
        held_out(&self.validation, &self.config, self.told, most)
    }
}

/// The rows of `source` that are measured, spread evenly: as many as have about `most` targets.
fn held_out<'a>(
    source: &'a Source,
    config: &Config,
    told: Told,
    most: usize,
) -> Result<Vec<Part<'a>>, CliError> {
    let count = measured_rows(source, most);
    let all = in_order(source, super::sequence(config), config.train.mini_batch, count)?;
    Ok(Part::all(Box::new(all.map(move |batch| Ok(tensors(&batch, told)?)))))
}

/// The number of rows of `source` with about `most` targets; all, if it has no more targets.
fn measured_rows(source: &Source, most: usize) -> usize {
    let Source { samples, rows } = source;
    let targets = samples.learned().saturating_sub(rows.long.lost).max(1);
    // In 128 bits, because the product may overflow 64.
    let part = (rows.len() as u128 * most as u128 / targets as u128).max(1);
    usize::try_from(part).unwrap_or(usize::MAX).min(rows.len())
}

/// Says how many rows are measured, unless all are.
fn part_of_rows(source: &Source, most: usize) -> Option<String> {
    let (part, all) = (measured_rows(source, most), source.rows.len());
    (part < all).then(|| format!("{part} of {all} rows, spread evenly"))
}

/// The samples to measure a trained model on: those in `files`, or those that the run held out.
pub(crate) struct Measured {
    source: Source,
    told: Told,
    /// Where they are from.
    pub what: String,
}

impl Measured {
    /// Reads the samples. The configured chat template counts if the model has none.
    pub(crate) fn open(
        config: &Config,
        data: &JsonlConfig,
        vocabulary: &Vocabulary,
        files: &[PathBuf],
    ) -> Result<Self, CliError> {
        let mut data = data.clone();
        if !files.is_empty() {
            data.validation = files.to_vec();
        }
        let packing = config.packing().unwrap_or(PackingChoice::None);
        let template = match Template::of(vocabulary)? {
            Some(own) => Some(own),
            None => template::configured(&data.chat_template)?,
        };
        let mut reader = Reader::new(&data, vocabulary, template.as_ref())?;
        let (samples, what) = match data.validation.is_empty() {
            false => (reader.samples(&data.validation)?, names(&data.validation)),
            true => {
                let (mut held_out, sources) = (Samples::default(), sources(&data));
                let mut all = Vec::new();
                for (paths, _) in sources {
                    held_out.append(&reader.samples(&paths)?.split(data.validation_share).1);
                    all.extend(paths);
                }
                (held_out, format!("held out of {}", names(&all)))
            }
        };
        let mut what = format!("{what}: {}", counted(samples.len(), "sample"));
        let mut skipped = String::new();
        reader.tell_skipped(&mut skipped);
        if let Some(first) = skipped.lines().next() {
            let _ = write!(what, "; {first}");
        }
        let rows = Rows::new(&samples, data.sequence, packing != PackingChoice::None);
        if rows.long.cut > 0 {
            let lost = counted(rows.long.lost, "token");
            let _ = write!(what, "; longer than data.sequence: {} ({lost} cut off)", rows.long.cut);
        }
        Ok(Self { source: Source { samples, rows }, told: Told::of(config), what })
    }

    /// Says how many rows `parts` measures, unless it measures all.
    pub(crate) fn part_of_rows(&self, most: usize) -> Option<String> {
        part_of_rows(&self.source, most)
    }

    /// A fingerprint of the samples.
    pub(crate) fn fingerprint(&self) -> String {
        fingerprint([(&self.source, 1.0)])
    }

    /// As many rows as have about `most` targets, spread evenly.
    pub(crate) fn parts(&self, config: &Config, most: usize) -> Result<Vec<Part<'_>>, CliError> {
        held_out(&self.source, config, self.told, most)
    }
}

/// What the model is told about the documents in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    /// Where each begins, so that they do not attend to each other.
    Beginnings,
    /// Which positions are padding. The others are one document.
    Padding,
}

impl Told {
    fn of(config: &Config) -> Self {
        let has_padding = matches!(&config.data, Data::Jsonl(data) if !data.texts_only);
        match config.packing() {
            Some(PackingChoice::Separate) => Self::Beginnings,
            // The balance of experts is that of tokens.
            _ if has_padding && super::balances_experts(config).is_some() => Self::Padding,
            _ => Self::Nothing,
        }
    }
}

/// Adds the input that tells of documents, if there is one, and what fills up rows.
pub(super) fn with_rows(
    mut builder: PipelineBuilder,
    config: &Config,
    samples: usize,
) -> PipelineBuilder {
    let mut inputs = vec![Some(0)];
    if Told::of(config) != Told::Nothing {
        let shape = [samples, super::sequence(config)].map(|size| size as i64);
        builder = builder.named_input(DOCUMENTS, TensorSpec::new(shape, Kind::Int64));
        inputs.push(Some(NO_DOCUMENT));
    }
    builder.padding(Padding { inputs, targets: vec![Some(IGNORE)] })
}

/// A mini-batch as tensors: inputs, targets, and what is told of documents, int64 [samples,
/// sequence].
fn tensors(own: &PackedBatch, told: Told) -> Result<Batch, tch::TchError> {
    let PackedBatch { batch, documents } = own;
    let shape = [batch.samples as i64, batch.sequence as i64];
    let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_reshape(shape);
    let mut inputs = tensor(&batch.inputs)?.into_tensors();
    inputs = match told {
        Told::Nothing => inputs,
        Told::Beginnings => inputs.named(DOCUMENTS, tensor(documents)?),
        // All begin at 0 where they are one.
        Told::Padding => inputs.named(DOCUMENTS, tensor(documents)?.f_clamp_max(0)?),
    };
    Ok(Batch { inputs, targets: tensor(&batch.targets)?, samples: batch.samples as u64 })
}

/// The configured files to train on, each source with its weight. Files without weights are one
/// source.
fn sources(data: &JsonlConfig) -> Vec<(Vec<PathBuf>, f64)> {
    if !data.files.is_empty() {
        return vec![(data.files.clone(), 1.0)];
    }
    data.sources.iter().map(|source| (vec![source.path.clone()], source.weight)).collect()
}

fn names(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

/// The vocabulary, its chat template, and a note about a tokenizer that was learned.
fn vocabulary(
    config: &Config,
    data: &JsonlConfig,
    given: Option<Vocabulary>,
) -> Result<(Vocabulary, Option<Template>, String), CliError> {
    if let Some(given) = given {
        let vocabulary = template::with_configured(given, &data.chat_template)?;
        let template = Template::of(&vocabulary)?;
        return Ok((vocabulary, template, String::new()));
    }
    let size = tokens_to_learn(config)?;
    let template = template::configured(&data.chat_template)?;
    let encoder = encoder(data, template.as_ref());
    let (mut documents, mut rest): (Vec<Document>, u64) = (Vec::new(), TEXT_BYTES_MAX);
    let mut is_all = true;
    for path in sources(data).iter().flat_map(|(paths, _)| paths) {
        let (own, is_whole) = encoder.texts(path, rest)?;
        rest -= own.iter().map(|document| document.text.len() as u64).sum::<u64>().min(rest);
        documents.extend(own);
        is_all &= is_whole;
    }
    let tokenizer = Tokenizer::train(&documents, size)?;
    let mut learned = learned_from(&documents, size, &tokenizer);
    if !is_all {
        let _ = write!(learned, ", of the first {} of text", gpipe::Bytes(TEXT_BYTES_MAX));
    }
    let vocabulary = template::with_configured(tokenizer.into(), &data.chat_template)?;
    Ok((vocabulary, template, learned))
}

/// Adds lines about samples and their rows.
fn describe(
    text: &mut String,
    what: &str,
    source: &Source,
    (length, packing): (usize, PackingChoice),
    weight: Option<f64>,
) {
    let Source { samples, rows } = source;
    let weight = weight.map_or_else(String::new, |weight| format!(", weight {weight}"));
    let _ = writeln!(
        text,
        "{what}: {}, {} tokens ({} in the loss){weight}",
        counted(samples.len(), "sample"),
        samples.tokens(),
        samples.learned()
    );
    let used = 100.0 * rows.used() as f64 / (rows.len() * length).max(1) as f64;
    let how = match packing {
        PackingChoice::Joined => "samples attend to earlier ones",
        PackingChoice::None => "one sample each",
        _ => "samples do not attend to each other",
    };
    let count = counted(rows.len(), "row");
    let _ = writeln!(text, "  {count} of {length} tokens, {used:.0}% used: {how}");
    let long = rows.long;
    if long.continued > 0 {
        let texts = counted(long.continued, "long text");
        let _ = writeln!(text, "  continued in further rows: {texts}");
    }
    if long.cut > 0 {
        let _ = writeln!(
            text,
            "  longer than data.sequence = {length}: {}; {} of the loss cut off, {} skipped",
            counted(long.cut, "sample"),
            counted(long.lost, "token"),
            counted(long.left_out, "sample")
        );
    }
}

/// Fails if there is nothing to train on or to validate on.
fn check(
    sources: &[(Vec<PathBuf>, f64)],
    train: &[(Arc<Source>, f64)],
    validation: &Source,
) -> Result<(), String> {
    let empty = train.iter().zip(sources).find(|((source, _), _)| source.rows.is_empty());
    if let Some(((source, _), (paths, _))) = empty {
        let reason = match source.samples.is_empty() {
            true if validation.samples.is_empty() => "there is no sample in it: add lines",
            true => "all of its samples are held out for validation: add lines",
            false => "no sample has a token in the loss within data.sequence tokens: raise it",
        };
        return Err(format!("{}: {reason}", names(paths)));
    }
    if !validation.rows.is_empty() {
        return Ok(());
    }
    let named = "or name a file with --set data.validation='[\"FILE\"]'";
    match (validation.samples.is_empty(), train.iter().any(|(own, _)| own.samples.len() > 1)) {
        (false, _) => Err(
            "samples to validate on have no token in the loss within data.sequence tokens: raise it"
                .into(),
        ),
        (true, true) => Err(format!(
            "all samples are equal, none is left to validate on: add others, {named}"
        )),
        (true, false) => {
            Err(format!("there is one sample, none is left to validate on: add lines, {named}"))
        }
    }
}

/// The SHA-256 of all sources, in order, with their weights and rows.
fn fingerprint<'a>(sources: impl IntoIterator<Item = (&'a Source, f64)>) -> String {
    let mut bytes = Vec::new();
    for (source, weight) in sources {
        bytes.extend(source.samples.fingerprint());
        bytes.extend((source.rows.len() as u64).to_le_bytes());
        bytes.extend(weight.to_le_bytes());
    }
    sha256(&bytes)
}
