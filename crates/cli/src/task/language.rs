//! Language modeling: reads, splits and encodes text, and makes mini-batches for predicting the
//! next token.

use std::{ops::Range, path::PathBuf, sync::Arc};

use gpipe::IntoTensors;
use gpipe_checkpoint::manifest::sha256;
use gpipe_data::{
    Corpus, Document, JsonFiles, Limits, Texts, TokenSet, Tokenizer, TrainBatches,
    ValidationBatches, kept, shuffle,
};
use tch::Tensor;

use super::{Batch, Batches, MakeBatch, Part, Task, Vocabulary, cache, pinned};
use crate::{
    CliError,
    config::{Config, JsonChoice, LlamaConfig, Model, TextConfig, TransformerConfig},
    progress::Work,
};

/// The format of files that keep [`Prepared`].
const FORMAT: &str = "gpipe text 1";

/// What is kept for later runs: the tokenizer, and the tokens to train and to validate on.
type Prepared = (String, TokenSet, TokenSet);

/// Number of tokens that are hashed at once.
const TOKENS_HASHED: usize = 1 << 20;

/// Text as tokens.
pub(crate) struct Language {
    vocabulary: Vocabulary,
    train: Arc<TokenSet>,
    validation: TokenSet,
    summary: String,
    config: Config,
    sequence: usize,
}

impl Language {
    /// Reads the text and encodes both sides with the tokenizer `given`, or with one trained on the
    /// training text.
    pub(crate) fn open(
        config: &Config,
        data: &TextConfig,
        given: Option<Vocabulary>,
    ) -> Result<Self, CliError> {
        let (corpus, what) = {
            let _shown = Work::new("reading the text", 0);
            corpus(data)?
        };
        let learns = given.is_none().then(|| tokens_to_learn(config)).transpose()?;
        let (vocabulary, train, validation) = prepared(config, data, &corpus, given)?;
        let tokenizer = vocabulary.tokenizer()?;
        let learned = learns.map(|size| learned_from(&corpus.train, size, tokenizer));
        let learned = learned.unwrap_or_default();
        let (all, most) = (validation.tokens.len(), config.train.validation_tokens);
        let measured = match most < all {
            true => format!(" (of which train.validation_tokens = {most} are measured)"),
            false => String::new(),
        };
        let summary = format!(
            "{what}: {}\n{what}: {} training tokens, {all} validation tokens{measured}, \
            vocabulary {}{learned}",
            corpus.report,
            train.tokens.len(),
            tokenizer.vocabulary()
        );
        let (config, sequence) = (config.clone(), data.sequence);
        Ok(Self { vocabulary, train: Arc::new(train), validation, summary, config, sequence })
    }
}

/// The tokenizer `given`, or one trained on the training text, and the tokens of both sides. They
/// come from the cache if they were prepared before.
fn prepared(
    config: &Config,
    data: &TextConfig,
    corpus: &Corpus,
    given: Option<Vocabulary>,
) -> Result<(Vocabulary, TokenSet, TokenSet), CliError> {
    let bytes = |documents: &[Document]| documents.iter().map(|own| own.text.len() as u64).sum();
    let all: [u64; 2] = [bytes(&corpus.train), bytes(&corpus.validation)];
    let kept = match cache::folder(&data.cache).filter(|_| all[0] + all[1] >= cache::BYTES_MIN) {
        Some(folder) => Some(folder.join(key(config, data, corpus, given.as_ref())?)),
        None => None,
    };
    let found = kept.as_deref().and_then(|path| kept::read::<Prepared>(path, FORMAT));
    if let (Some(path), Some((json, train, validation))) = (&kept, found) {
        let made = || Tokenizer::from_json(&json, path).map(Vocabulary::from);
        let vocabulary = given.map_or_else(made, Ok)?;
        return Ok((vocabulary, train, validation));
    }
    let vocabulary = match given {
        Some(given) => given,
        None => {
            let _shown = Work::new("learning a tokenizer", 0);
            Tokenizer::train(&corpus.train, tokens_to_learn(config)?)?.into()
        }
    };
    let tokenizer = vocabulary.tokenizer()?;
    let encode = |documents: &[&Document], all: u64| {
        let work = Work::new("encoding the text", all);
        TokenSet::encode_each(tokenizer, documents, |bytes| work.tell(bytes))
    };
    let mut documents: Vec<&Document> = corpus.train.iter().collect();
    if data.shuffle_documents {
        shuffle(&mut documents, config.seed);
    }
    let train = encode(&documents, all[0])?;
    let validation = encode(&corpus.validation.iter().collect::<Vec<_>>(), all[1])?;
    let prepared: Prepared = (tokenizer.to_json()?, train, validation);
    if let Some(path) = kept {
        cache::tell(&path, kept::write(&path, FORMAT, &prepared));
    }
    let (_, train, validation) = prepared;
    Ok((vocabulary, train, validation))
}

/// The name of the file that keeps what is prepared of `corpus`.
fn key(
    config: &Config,
    data: &TextConfig,
    corpus: &Corpus,
    given: Option<&Vocabulary>,
) -> Result<String, CliError> {
    let mut key = cache::key();
    key = match given {
        Some(given) => {
            let tokenizer = given.tokenizer()?;
            let end = tokenizer.end_of_document().to_le_bytes();
            key.with(tokenizer.to_json()?.as_bytes()).with(&end)
        }
        None => key.with(&tokens_to_learn(config)?.to_le_bytes()),
    };
    let order = data.shuffle_documents.then_some(config.seed);
    key = key.with(format!("{order:?}, {} documents", corpus.train.len()).as_bytes());
    for document in corpus.train.iter().chain(&corpus.validation) {
        key = key.with(document.text.as_bytes());
    }
    Ok(key.name())
}

impl Task for Language {
    fn summary(&self) -> &str {
        &self.summary
    }

    fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn fingerprint(&self) -> String {
        fingerprint(&self.train)
    }

    fn held_out_fingerprint(&self) -> String {
        fingerprint(&self.validation)
    }

    fn training(
        &self,
        batches: u64,
        samples: u64,
        _fed: Range<usize>,
    ) -> Result<MakeBatch, CliError> {
        let (tokens, config) = (Arc::clone(&self.train), &self.config);
        let all = TrainBatches::new(tokens, self.sequence, config.train.mini_batch, config.seed)?;
        let all = all.starting_at(batches, samples);
        Ok(Box::new(move |number| Ok(tensors(&all.batch(number))?)))
    }

    fn validation(&self, _fed: bool) -> Result<Vec<Part<'_>>, CliError> {
        let most = self.config.train.validation_tokens;
        Ok(Part::all(batches(&self.validation, &self.config, most)?))
    }

    fn bits_per_byte(&self, nats: f64) -> Option<f64> {
        Some(self.validation.bits_per_byte(nats))
    }
}

/// The SHA-256 of the concatenated SHA-256 of all parts of the tokens, in order.
pub(crate) fn fingerprint(tokens: &TokenSet) -> String {
    let part = |part: &[u32]| {
        let bytes: Vec<u8> = part.iter().flat_map(|token| token.to_le_bytes()).collect();
        sha256(&bytes)
    };
    let parts = tokens.tokens.chunks(TOKENS_HASHED).map(part);
    sha256(parts.collect::<String>().as_bytes())
}

/// Mini-batches over `tokens`, in order, with the first `most` of them as targets.
pub(crate) fn batches<'a>(
    tokens: &'a TokenSet,
    config: &Config,
    most: usize,
) -> Result<Batches<'a>, CliError> {
    let (sequence, samples) = (super::sequence(config), config.train.mini_batch);
    let all = ValidationBatches::new(tokens, sequence, samples, Some(most))?;
    Ok(Box::new(all.map(|batch| Ok(tensors(&batch)?))))
}

/// A batch as tensors: inputs and targets, int64 [samples, sequence].
fn tensors(batch: &gpipe_data::Batch) -> Result<Batch, tch::TchError> {
    let shape = [batch.samples as i64, batch.sequence as i64];
    let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_reshape(shape);
    let (inputs, targets) = (tensor(&batch.inputs)?, tensor(&batch.targets)?);
    Ok(Batch { inputs: inputs.into_tensors(), targets, samples: batch.samples as u64 })
}

/// The vocabulary size for a tokenizer trained on the data.
pub(super) fn tokens_to_learn(config: &Config) -> Result<usize, CliError> {
    match &config.model {
        Model::Transformer(TransformerConfig { vocabulary, .. })
        | Model::Llama(LlamaConfig { vocabulary, .. }) => Ok(*vocabulary),
        Model::HuggingFace(_) => Err(CliError::Usage(
            "the model has a fixed vocabulary: name its tokenizer with --set data.tokenizer=PATH"
                .into(),
        )),
        _ => Err(CliError::Usage("text needs a transformer or a llama".into())),
    }
}

/// A note about a tokenizer trained on `documents`, if it has fewer tokens than were `asked` for or
/// was trained on a sample.
pub(super) fn learned_from(documents: &[Document], asked: usize, tokenizer: &Tokenizer) -> String {
    let fewer = match tokenizer.vocabulary() < asked {
        true => format!(" (of {asked} that were asked for: the text repeats no more)"),
        false => String::new(),
    };
    match Tokenizer::sampled_one_in(documents) {
        1 => fewer,
        one_in => format!("{fewer}, learned from 1 in {one_in} parts of the training text"),
    }
}

/// The held-out part of the configured text, with its description.
pub(crate) fn held_out(data: &TextConfig) -> Result<(Texts, String), CliError> {
    let (corpus, what) = corpus(data).map_err(|error| match error {
        CliError::Data(source @ gpipe_data::Error::MissingPath { .. }) => CliError::Usage(format!(
            "{source}: it is the run's own text; run where you trained, or name another with \
            --text PATH"
        )),
        other => other,
    })?;
    let texts = Texts { documents: corpus.validation, report: corpus.report };
    Ok((texts, format!("held out of {what}")))
}

/// The configured treatment of JSON files.
pub(crate) fn json(data: &TextConfig) -> JsonFiles {
    match data.json {
        JsonChoice::Refuse => JsonFiles::Refuse,
        JsonChoice::Text => JsonFiles::AsText,
        JsonChoice::Skip => JsonFiles::LeaveOut,
    }
}

/// Reads and splits the text, and describes it.
fn corpus(data: &TextConfig) -> Result<(Corpus, String), CliError> {
    let limits = Limits {
        train_bytes: data.train_bytes.limit(),
        validation_bytes: data.validation_bytes.limit(),
        per_crate_bytes: data.crate_bytes.limit(),
    };
    if !data.text.is_empty() {
        let names: Vec<String> = data.text.iter().map(|path| path.display().to_string()).collect();
        return Ok((Corpus::from_paths(&data.text, &limits, json(data))?, names.join(", ")));
    }
    let lock = &data.cargo_lock;
    if !lock.exists() {
        return Err(CliError::Usage(format!(
            "name the data: --data FILE.jsonl or --text PATH; without them the text is the \
            sources of the crates in {}, which is not here",
            lock.display()
        )));
    }
    let corpus = Corpus::from_cargo_sources(lock, &registry_sources()?, &limits)?;
    pinned::check(lock, &corpus.report)?;
    Ok((corpus, format!("Rust sources of the crates in {}", lock.display())))
}

/// The folder in which cargo keeps fetched sources.
fn registry_sources() -> Result<PathBuf, CliError> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let home = home.ok_or_else(|| {
        CliError::Usage(
            "neither CARGO_HOME nor HOME is set: name your text with --text PATH".into(),
        )
    })?;
    Ok(home.join("registry").join("src"))
}
