//! A trained model's tokens or classes: a file beside its weights, and in each of its checkpoints.

use std::path::Path;

use gpipe_checkpoint::{Checkpoint, CheckpointError};
use gpipe_data::Tokenizer;

use crate::{
    CliError,
    config::{Config, Model, TokenizerChoice},
    files::read_bounded,
};

/// File of a text model's tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// File of an image model's classes, a JSON list of their names.
const CLASSES: &str = "classes.json";
/// Maximum size of a file of classes.
const CLASSES_BYTES_MAX: u64 = 64 << 20;

/// A text model's tokens, or the names of an image model's classes.
#[derive(Clone)]
pub(crate) enum Vocabulary {
    Tokens(Box<Tokenizer>),
    Classes(Vec<String>),
}

impl Vocabulary {
    /// The number of tokens or classes.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Tokens(tokenizer) => tokenizer.vocabulary(),
            Self::Classes(classes) => classes.len(),
        }
    }

    /// The name of the file.
    pub(crate) fn file(&self) -> &'static str {
        match self {
            Self::Tokens(_) => TOKENIZER,
            Self::Classes(_) => CLASSES,
        }
    }

    /// The contents of the file.
    pub(crate) fn to_json(&self) -> Result<String, CliError> {
        match self {
            Self::Tokens(tokenizer) => Ok(tokenizer.to_json()?),
            Self::Classes(classes) => serde_json::to_string_pretty(classes)
                .map_err(|error| CliError::Usage(format!("{CLASSES}: {error}"))),
        }
    }

    /// The name of the file for a configured model.
    pub(crate) fn file_of(config: &Config) -> &'static str {
        match config.model {
            Model::Transformer(_) | Model::Llama(_) | Model::Translation(_) => TOKENIZER,
            _ => CLASSES,
        }
    }

    /// The configured tokenizer, if the configuration names a file.
    pub(crate) fn configured(config: &Config) -> Result<Option<Self>, CliError> {
        match config.tokenizer() {
            Some(TokenizerChoice::File(path)) => {
                Ok(Some(Self::Tokens(Box::new(Tokenizer::load(path)?))))
            }
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
                return Self::load(&path).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads the file.
    pub(crate) fn load(path: &Path) -> Result<Self, CliError> {
        if !path.ends_with(CLASSES) {
            return Ok(Self::Tokens(Box::new(Tokenizer::load(path)?)));
        }
        Self::from_text(&read_bounded(path, CLASSES_BYTES_MAX)?, path)
    }

    /// The vocabulary of a checkpoint.
    pub(crate) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, CliError> {
        for file in [TOKENIZER, CLASSES] {
            if let Some(bytes) = checkpoint.run_file(file)? {
                let path = checkpoint.folder().join(file);
                return Self::from_text(&String::from_utf8_lossy(&bytes), &path);
            }
        }
        Err(CheckpointError::NotFound {
            path: checkpoint.folder().join(TOKENIZER),
            reason: format!(
                "the checkpoint has neither that nor {CLASSES}: it is of no run of `gpipe train`"
            ),
        }
        .into())
    }

    fn from_text(text: &str, path: &Path) -> Result<Self, CliError> {
        if !path.ends_with(CLASSES) {
            return Ok(Self::Tokens(Box::new(Tokenizer::from_json(text, path)?)));
        }
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
            Self::Tokens(tokenizer) => Ok(tokenizer),
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
