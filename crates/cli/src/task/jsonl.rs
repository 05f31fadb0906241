//! Samples of lines of JSON: texts, prompts with completions, conversations. Rows of them, several
//! to a row or one in each, are mini-batches for predicting the next token.

use std::{
    fmt::Write,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    time::SystemTime,
};

use gpipe::{IntoTensors, Padding, PipelineBuilder, TensorSpec, layers::DOCUMENTS};
use gpipe_checkpoint::manifest::sha256;
use gpipe_data::{
    Document, IGNORE, TRAINING_BYTES_MAX, Tokenizer,
    jsonl::{
        Encoded, Encoder, Fields, NO_DOCUMENT, OnBadLine, PackedBatch, RowBatches, Rows, Samples,
        Source,
        batches::in_order,
        cache::{self, Key},
    },
};
use tch::{Kind, Tensor};

use super::{
    Batch, MakeBatch, Part, Task, Vocabulary,
    language::{learned_from, tokens_to_learn},
    template::{self, Template},
};
use crate::{
    CliError,
    config::{CacheChoice, Config, JsonlConfig, OnBadLineChoice, PackingChoice},
    files::io,
    output::complain,
    progress::Reading,
};

/// A tokenizer is learned from at most this much text, of which it takes a sample.
const TEXT_BYTES_MAX: u64 = 4 * TRAINING_BYTES_MAX;
/// Lines that were left out and are listed.
const LISTED_MAX: usize = 5;

/// Samples as tokens, in rows.
pub(crate) struct Jsonl {
    vocabulary: Vocabulary,
    /// The sources to learn from, with their weights.
    train: Vec<(Source, f64)>,
    validation: Source,
    summary: String,
    fingerprint: String,
    config: Config,
    sequence: usize,
    packing: PackingChoice,
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
        let train: Vec<(Source, f64)> =
            train.into_iter().map(|(samples, weight)| (placed(samples), weight)).collect();
        let validation = placed(held_out);
        check(&sources, &train, &validation)?;
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
        reader.tell_left_out(&mut summary);
        let tokenizer = vocabulary.tokenizer()?;
        let _ = write!(summary, "vocabulary {}{learned}", tokenizer.vocabulary());
        let fingerprint = fingerprint(&train);
        let (config, sequence) = (config.clone(), data.sequence);
        Ok(Self { vocabulary, train, validation, summary, fingerprint, config, sequence, packing })
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

    fn training(
        &self,
        batches: u64,
        samples: u64,
        _fed: Range<usize>,
    ) -> Result<MakeBatch, CliError> {
        let (config, packing) = (&self.config, self.packing);
        let all = RowBatches::new(
            self.train.clone(),
            self.sequence,
            config.train.mini_batch,
            config.seed,
        )?;
        let all = all.starting_at(batches, samples);
        Ok(Box::new(move |number| Ok(tensors(&all.batch(number), packing)?)))
    }

    fn validation(&self, _fed: bool) -> Result<Vec<Part<'_>>, CliError> {
        let most = self.config.train.validation_tokens;
        held_out(&self.validation, &self.config, self.packing, most)
    }
}

/// The rows of `source` in order, up to the mini-batch in which `most` targets are reached.
fn held_out<'a>(
    source: &'a Source,
    config: &Config,
    packing: PackingChoice,
    most: usize,
) -> Result<Vec<Part<'a>>, CliError> {
    let mut seen = 0;
    let all = in_order(source, super::sequence(config), config.train.mini_batch)?;
    let all = all.take_while(move |PackedBatch { batch, .. }| {
        let goes_on = seen < most;
        seen += batch.targets.iter().filter(|target| **target != IGNORE).count();
        goes_on
    });
    Ok(Part::all(Box::new(all.map(move |batch| Ok(tensors(&batch, packing)?)))))
}

/// The samples to measure a trained model on: those in `files`, or those that the run held out.
pub(crate) struct Measured {
    source: Source,
    packing: PackingChoice,
    /// Where they are from.
    pub what: String,
}

impl Measured {
    /// Reads the samples.
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
        let template = Template::of(vocabulary)?;
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
        let mut left_out = String::new();
        reader.tell_left_out(&mut left_out);
        if let Some(first) = left_out.lines().next() {
            let _ = write!(what, "; {first}");
        }
        let rows = Rows::new(&samples, data.sequence, packing != PackingChoice::None);
        Ok(Self { source: Source { samples, rows }, packing, what })
    }

    /// The rows in order, up to the mini-batch in which `most` targets are reached.
    pub(crate) fn parts(&self, config: &Config, most: usize) -> Result<Vec<Part<'_>>, CliError> {
        held_out(&self.source, config, self.packing, most)
    }
}

/// Adds the input that keeps documents of a row apart, if they are to be kept apart, and what fills
/// up rows.
pub(super) fn with_rows(
    mut builder: PipelineBuilder,
    config: &Config,
    samples: usize,
) -> PipelineBuilder {
    let mut inputs = vec![Some(0)];
    if config.packing() == Some(PackingChoice::Separate) {
        let shape = [samples, super::sequence(config)].map(|size| size as i64);
        builder = builder.named_input(DOCUMENTS, TensorSpec::new(shape, Kind::Int64));
        inputs.push(Some(NO_DOCUMENT));
    }
    builder.padding(Padding { inputs, targets: vec![Some(IGNORE)] })
}

/// A mini-batch as tensors: inputs, targets, and if they are kept apart the documents, int64
/// [samples, sequence].
fn tensors(own: &PackedBatch, packing: PackingChoice) -> Result<Batch, tch::TchError> {
    let PackedBatch { batch, documents } = own;
    let shape = [batch.samples as i64, batch.sequence as i64];
    let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_reshape(shape);
    let mut inputs = tensor(&batch.inputs)?.into_tensors();
    if packing == PackingChoice::Separate {
        inputs = inputs.named(DOCUMENTS, tensor(documents)?);
    }
    Ok(Batch { inputs, targets: tensor(&batch.targets)?, samples: batch.samples as u64 })
}

/// The configured files to learn from, each source with its weight. Files without weights are one
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

fn encoder<'a>(data: &JsonlConfig, template: Option<&'a Template>) -> Encoder<'a> {
    let names = data.fields.clone();
    Encoder {
        template: template.map(|own| &own.compiled),
        fields: Fields {
            text: names.text,
            prompt: names.prompt,
            completion: names.completion,
            messages: names.messages,
        },
        on_bad_line: match data.on_bad_line {
            OnBadLineChoice::Stop => OnBadLine::Stop,
            OnBadLineChoice::Skip => OnBadLine::Skip,
        },
    }
}

/// Reads files as samples, or takes them from an earlier run.
struct Reader<'a> {
    encoder: Encoder<'a>,
    tokenizer: &'a Tokenizer,
    /// The folder of earlier samples.
    cache: Option<PathBuf>,
    /// What samples depend on besides the file.
    settings: Vec<Vec<u8>>,
    left_out: u64,
    bad: Vec<String>,
}

impl<'a> Reader<'a> {
    fn new(
        data: &JsonlConfig,
        vocabulary: &'a Vocabulary,
        template: Option<&'a Template>,
    ) -> Result<Self, CliError> {
        let cache = match &data.cache {
            CacheChoice::Off => None,
            CacheChoice::Folder(folder) => Some(folder.clone()),
            CacheChoice::Auto => default_cache(),
        };
        let encoder = encoder(data, template);
        let tokenizer = vocabulary.tokenizer()?;
        let mut settings = vec![tokenizer.to_json()?.into_bytes()];
        settings.push(tokenizer.end_of_document().to_le_bytes().to_vec());
        if let Some(Template { source, tokens, .. }) = template {
            settings.push(source.clone().into_bytes());
            settings.push(format!("{tokens:?}").into_bytes());
        }
        settings.push(format!("{:?}", encoder.fields).into_bytes());
        Ok(Self { encoder, tokenizer, cache, settings, left_out: 0, bad: Vec::new() })
    }

    /// The samples of some files.
    fn samples(&mut self, paths: &[PathBuf]) -> Result<Samples, CliError> {
        let mut all = Samples::default();
        for path in paths {
            let Encoded { samples, left_out, bad } = self.encoded(path)?;
            all.append(&samples);
            self.left_out += left_out;
            let listed = bad
                .into_iter()
                .map(|bad| format!("{}, line {}: {}", bad.path.display(), bad.line, bad.reason));
            self.bad.extend(listed.take(LISTED_MAX - self.bad.len().min(LISTED_MAX)));
        }
        Ok(all)
    }

    fn encoded(&self, path: &Path) -> Result<Encoded, CliError> {
        let state = || -> Result<(u64, SystemTime), CliError> {
            let own = fs::metadata(path).and_then(|own| Ok((own.len(), own.modified()?)));
            own.map_err(io(path))
        };
        let before = state()?;
        let kept = match &self.cache {
            None => None,
            Some(folder) => Some(folder.join(self.key(path)?)),
        };
        if let Some(encoded) = kept.as_deref().and_then(cache::read) {
            return Ok(encoded);
        }
        let mut progress = Reading::new(path, before.0);
        let encoded = self.encoder.encode(path, self.tokenizer, |bytes| progress.tell(bytes))?;
        progress.finish();
        // A file that changed meanwhile is not what the key says.
        if let Some(kept) = kept
            && state()? == before
            && let Err(error) = cache::write(&kept, &encoded)
        {
            complain!("gpipe: warning: the tokens are not kept: {}: {error}", kept.display());
        }
        Ok(encoded)
    }

    fn key(&self, path: &Path) -> Result<String, CliError> {
        let mut key = Key::default();
        for setting in &self.settings {
            key = key.with(setting);
        }
        Ok(key.with_file(path).map_err(io(path))?.name())
    }

    /// Adds lines about the lines that were left out.
    fn tell_left_out(&self, text: &mut String) {
        if self.left_out == 0 {
            return;
        }
        let _ =
            writeln!(text, "left out {} bad lines (data.on_bad_line = \"skip\")", self.left_out);
        for bad in &self.bad {
            let _ = writeln!(text, "  {bad}");
        }
        let more = self.left_out - self.bad.len() as u64;
        if more > 0 {
            let _ = writeln!(text, "  and {more} more");
        }
    }
}

/// `gpipe/tokens` in the user's folder for caches. `None` if there is no such folder.
fn default_cache() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let named = named.filter(|folder| folder.is_absolute());
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    Some(named.or_else(home)?.join("gpipe").join("tokens"))
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
        "{what}: {}, {} tokens ({} to learn){weight}",
        counted(samples.len(), "sample"),
        samples.tokens(),
        samples.learned()
    );
    let used = 100.0 * rows.used() as f64 / (rows.len() * length).max(1) as f64;
    let how = match packing {
        PackingChoice::Joined => "several samples each, which see the earlier ones",
        PackingChoice::None => "one sample each",
        _ => "several samples each, which do not see each other",
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
            "  longer than data.sequence = {length}: {}; {} to learn cut off, {} left out whole",
            counted(long.cut, "sample"),
            counted(long.lost, "token"),
            counted(long.left_out, "sample")
        );
    }
}

/// A number of things, such as `2 samples`.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Fails if there is nothing to learn from or to validate on.
fn check(
    sources: &[(Vec<PathBuf>, f64)],
    train: &[(Source, f64)],
    validation: &Source,
) -> Result<(), CliError> {
    let empty = train.iter().zip(sources).find(|((source, _), _)| source.rows.is_empty());
    if let Some((_, (paths, _))) = empty {
        let reason = "there is nothing to learn from: add lines, of which at least one is not \
            held out for validation, or raise data.sequence";
        return Err(CliError::Usage(format!("{}: {reason}", names(paths))));
    }
    match validation.rows.is_empty() {
        false => Ok(()),
        true => Err(CliError::Usage(
            "no sample is left to validate on: add lines, or name a file with --set \
            data.validation='[\"FILE\"]'"
                .into(),
        )),
    }
}

/// The SHA-256 of all sources, in order, with their weights and rows.
fn fingerprint(train: &[(Source, f64)]) -> String {
    let mut bytes = Vec::new();
    for (source, weight) in train {
        bytes.extend(source.samples.fingerprint());
        bytes.extend((source.rows.len() as u64).to_le_bytes());
        bytes.extend(weight.to_le_bytes());
    }
    sha256(&bytes)
}
