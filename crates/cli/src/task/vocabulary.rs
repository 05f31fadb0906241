//! A trained model's tokens or classes: a file beside its weights, and in each of its checkpoints.

use std::path::Path;

use gpipe_checkpoint::{Checkpoint, CheckpointError};
use gpipe_data::{EndToken, Tokenizer, end_in_config};
use gpipe_files::ReadError;

use crate::{
    CliError,
    config::{Config, Model, TokenizerChoice},
    files::{io, read_bounded},
    model_folder::{ModelFolder, TOKENIZER, check_vocabulary},
};

/// File of an image model's classes, a JSON list of their names.
const CLASSES: &str = "classes.json";
/// Files that may lie beside a tokenizer and belong to its model. They are kept as they are, so
/// that the model can be exported with them.
pub(crate) const COMPANIONS: [&str; 9] = [
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];
/// Maximum size of a tokenizer's file, and of each companion.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Maximum size of a file of classes.
const CLASSES_BYTES_MAX: u64 = 64 << 20;

/// A text model's tokens, or the names of an image model's classes.
#[derive(Clone)]
pub(crate) enum Vocabulary {
    Tokens(Box<Tokens>),
    Classes(Vec<String>),
}

/// A tokenizer, and the files that belong to it.
#[derive(Clone)]
pub(crate) struct Tokens {
    pub tokenizer: Tokenizer,
    /// Names and contents.
    pub companions: Vec<(String, Vec<u8>)>,
}

impl Tokens {
    /// Reads a tokenizer from the text of its file. `end` ends a document if no file says what
    /// does.
    fn new(
        json: &str,
        origin: &Path,
        companions: Vec<(String, Vec<u8>)>,
        end: Option<u32>,
    ) -> Result<Self, CliError> {
        let config = companions.iter().find(|(name, _)| name == COMPANIONS[0]);
        let named = config.map(|(_, text)| end_in_config(&String::from_utf8_lossy(text)));
        let refused = |reason| CliError::Usage(format!("{}: {reason}", origin.display()));
        let named = named.transpose().map_err(refused)?.flatten();
        let end = named.as_deref().map(EndToken::Text).or(end.map(EndToken::Id));
        Ok(Self { tokenizer: Tokenizer::from_json_with(json, origin, end)?, companions })
    }
}

impl From<Tokenizer> for Vocabulary {
    fn from(tokenizer: Tokenizer) -> Self {
        Self::Tokens(Box::new(Tokens { tokenizer, companions: Vec::new() }))
    }
}

impl Vocabulary {
    /// The number of tokens or classes.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.tokenizer.vocabulary(),
            Self::Classes(classes) => classes.len(),
        }
    }

    /// Whether a metric tells anything of these classes. One of five guesses among five classes is
    /// always right.
    pub(crate) fn is_telling(&self, metric: &str) -> bool {
        metric != "top5" || self.size() > 5
    }

    /// The name of the file.
    fn file(&self) -> &'static str {
        match self {
            Self::Tokens(_) => TOKENIZER,
            Self::Classes(_) => CLASSES,
        }
    }

    /// The contents of the file.
    fn to_json(&self) -> Result<String, CliError> {
        match self {
            Self::Tokens(tokens) => Ok(tokens.tokenizer.to_json()?),
            Self::Classes(classes) => serde_json::to_string_pretty(classes)
                .map_err(|error| CliError::Usage(format!("{CLASSES}: {error}"))),
        }
    }

    /// The file and those that belong to it, by name.
    pub(crate) fn files(&self) -> Result<Vec<(String, Vec<u8>)>, CliError> {
        let mut files = vec![(self.file().to_owned(), self.to_json()?.into_bytes())];
        if let Self::Tokens(tokens) = self {
            files.extend(tokens.companions.iter().cloned());
        }
        Ok(files)
    }

    /// The contents of a file that lies beside the tokenizer.
    pub(crate) fn companion(&self, name: &str) -> Option<&[u8]> {
        match self {
            Self::Tokens(tokens) => {
                let found = tokens.companions.iter().find(|(own, _)| own == name);
                found.map(|(_, bytes)| &bytes[..])
            }
            Self::Classes(_) => None,
        }
    }

    /// The name of the file for a configured model.
    pub(crate) fn file_of(config: &Config) -> &'static str {
        match config.model {
            Model::Transformer(_)
            | Model::Llama(_)
            | Model::HuggingFace(_)
            | Model::Translation(_) => TOKENIZER,
            _ => CLASSES,
        }
    }

    /// The configured tokenizer, if the configuration names a file.
    pub(crate) fn configured(config: &Config) -> Result<Option<Self>, CliError> {
        match config.tokenizer() {
            Some(TokenizerChoice::File(path)) => Self::load(path, config.end()).map(Some),
            _ => Ok(None),
        }
    }

    /// The vocabulary of a run that starts from the weights at `from`, with the vocabulary `beside`
    /// them.
    ///
    /// The configuration takes precedence. `None` if the vocabulary is to be made from the data.
    pub(crate) fn of_weights(
        config: &Config,
        from: &Path,
        beside: Option<Self>,
    ) -> Result<Option<Self>, CliError> {
        match (config.tokenizer(), beside) {
            (Some(TokenizerChoice::File(_)), _) => Self::configured(config),
            (Some(TokenizerChoice::New), _) => Ok(None),
            (Some(TokenizerChoice::Auto), None) => Err(CliError::Usage(format!(
                "{}: there is no {TOKENIZER} beside these weights, and tokens learned from this \
                text would not be those that they were trained on: put the model's {TOKENIZER} \
                there, or name it with --set data.tokenizer=PATH (or learn new tokens all the \
                same with --set data.tokenizer=new)",
                from.display()
            ))),
            (_, beside) => Ok(beside),
        }
    }

    /// The vocabulary beside `weights`, if there is one.
    pub(crate) fn beside(weights: &Path) -> Result<Option<Self>, CliError> {
        for file in [TOKENIZER, CLASSES] {
            let path = weights.with_file_name(file);
            if path.is_file() {
                return Self::load(&path, None).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads the file, and those that belong to it. `end` ends a document if no file says what
    /// does.
    pub(crate) fn load(path: &Path, end: Option<u32>) -> Result<Self, CliError> {
        if path.ends_with(CLASSES) {
            return Self::classes_in(&read_bounded(path, CLASSES_BYTES_MAX)?, path);
        }
        let json = read_bounded(path, TOKENIZER_BYTES_MAX)?;
        let mut companions = Vec::new();
        for name in COMPANIONS {
            let path = path.with_file_name(name);
            if path.is_file() {
                companions.push((name.to_owned(), bytes(&path)?));
            }
        }
        Ok(Self::Tokens(Box::new(Tokens::new(&json, path, companions, end)?)))
    }

    /// The tokens of a model's folder.
    pub(crate) fn of_folder(folder: &ModelFolder) -> Result<Self, CliError> {
        let vocabulary = Self::load(&folder.tokenizer()?, folder.described.ends.first().copied())?;
        check_vocabulary(&folder.described.network, vocabulary.size())?;
        // What the tokenizer adds to any text may lie outside of its own vocabulary.
        let added = vocabulary.tokenizer()?.encode("")?.into_iter().max();
        check_vocabulary(&folder.described.network, added.map_or(0, |token| token as usize + 1))?;
        Ok(vocabulary)
    }

    /// The vocabulary of a checkpoint. `end` is as for [`Vocabulary::load`].
    pub(crate) fn of_checkpoint(
        checkpoint: &Checkpoint,
        end: Option<u32>,
    ) -> Result<Self, CliError> {
        if let Some(bytes) = checkpoint.run_file(TOKENIZER)? {
            let mut companions = Vec::new();
            for name in COMPANIONS {
                companions.extend(checkpoint.run_file(name)?.map(|bytes| (name.to_owned(), bytes)));
            }
            let (json, path) = (String::from_utf8_lossy(&bytes), checkpoint.folder());
            let tokens = Tokens::new(&json, &path.join(TOKENIZER), companions, end)?;
            return Ok(Self::Tokens(Box::new(tokens)));
        }
        if let Some(bytes) = checkpoint.run_file(CLASSES)? {
            let path = checkpoint.folder().join(CLASSES);
            return Self::classes_in(&String::from_utf8_lossy(&bytes), &path);
        }
        Err(CheckpointError::NotFound {
            path: checkpoint.folder().join(TOKENIZER),
            reason: format!(
                "the checkpoint has neither that nor {CLASSES}: it is of no run of `gpipe train`"
            ),
        }
        .into())
    }

    fn classes_in(text: &str, path: &Path) -> Result<Self, CliError> {
        let classes: Result<Vec<String>, _> = serde_json::from_str(text);
        match classes {
            Ok(classes) if !classes.is_empty() => Ok(Self::Classes(classes)),
            Ok(_) => Err(CliError::Usage(format!("{}: it names no class", path.display()))),
            Err(error) => Err(CliError::Usage(format!(
                "{}: it is not a JSON list of the names of the classes (line {}, column {}): put \
                the one of the model's run there",
                path.display(),
                error.line(),
                error.column()
            ))),
        }
    }

    /// The tokenizer. Fails for an image model.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, CliError> {
        match self {
            Self::Tokens(tokens) => Ok(&tokens.tokenizer),
            Self::Classes(_) => Err(CliError::Usage(
                "the model classifies images, and has no text: use gpipe predict".into(),
            )),
        }
    }

    /// The classes. Fails for a text model.
    pub(crate) fn classes(&self) -> Result<&[String], CliError> {
        match self {
            Self::Classes(classes) => Ok(classes),
            Self::Tokens(_) => Err(CliError::Usage(
                "the model is of text, and has no classes: use gpipe generate or gpipe translate"
                    .into(),
            )),
        }
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>, CliError> {
    gpipe_files::read(path, TOKENIZER_BYTES_MAX).map_err(|error| match error {
        ReadError::Io(error) => io(path)(error),
        other => CliError::Usage(format!("{}: {other}", path.display())),
    })
}
