//! A model's folder as Hugging Face's transformers writes it: `config.json`, weights, a tokenizer.

use std::path::{Path, PathBuf};

use gpipe_checkpoint::{
    TensorSet,
    fit::Fit,
    model_folder,
    names::{Mapped, Names},
};
use gpipe_models::huggingface::{self, Described, Network, names::Found};

use crate::{CliError, files::read_bounded};

/// The file of a text model's tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// The description of the model.
pub(crate) const CONFIG: &str = "config.json";
/// Maximum size of a `config.json`.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A folder whose `config.json` was read and is supported.
pub(crate) struct ModelFolder {
    pub path: PathBuf,
    /// The text of `config.json`.
    pub config: String,
    pub described: Described,
}

/// Whether `path` has a `config.json` and is neither a run nor a checkpoint of gpipe.
pub(crate) fn is_model_folder(path: &Path) -> bool {
    path.join(CONFIG).is_file()
        && !path.join("config.toml").exists()
        && !path.join(gpipe_checkpoint::manifest::NAME).exists()
}

impl ModelFolder {
    /// Reads the description of the model in `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, CliError> {
        let refuse = |reason: &str| Err(CliError::Usage(format!("{}: {reason}", path.display())));
        if !path.exists() {
            return refuse("there is no such folder: correct the path");
        }
        if path.join("config.toml").is_file() || path.join("manifest.json").is_file() {
            let run = path.display();
            return refuse(&format!(
                "it is a run of gpipe: `gpipe train --resume {run}` goes on with it, `gpipe train \
                {run}/config.toml --init {run} --out NEW` begins a run with its weights, and \
                `gpipe export {run} --to FOLDER` makes a folder for --from"
            ));
        }
        let file = path.join(CONFIG);
        if !path.is_dir() || !file.is_file() {
            return refuse(
                "it is no folder with a config.json: give the folder of a model as Hugging Face \
                distributes it; --init takes the weights of a single file",
            );
        }
        let config = read_bounded(&file, CONFIG_BYTES_MAX)?;
        let described = described(&config).map_err(|error| of_folder(path, &error))?;
        Ok(Self { path: path.to_owned(), config, described })
    }

    /// The path of the tokenizer, which must be there.
    pub(crate) fn tokenizer(&self) -> Result<PathBuf, CliError> {
        let path = self.path.join(TOKENIZER);
        if path.is_file() {
            return Ok(path);
        }
        Err(CliError::Usage(format!(
            "{}: there is no such file: fetch it, too; or make it of the older files with \
            transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            path.display()
        )))
    }

    /// The weights. Only headers are read.
    pub(crate) fn weights(&self) -> Result<TensorSet, CliError> {
        Ok(model_folder::open(&self.path)?)
    }

    /// Matches the weights with the parameters. All of them must fit.
    pub(crate) fn fit(&self, file: &mut TensorSet) -> Result<Fit, CliError> {
        fit(file, &self.described.network)
    }
}

/// Matches the weights of a folder with the parameters of `network`. All of them must fit.
pub(crate) fn fit(file: &mut TensorSet, network: &Network) -> Result<Fit, CliError> {
    let model = network.build().map_err(|error| CliError::Usage(error.to_string()))?;
    let fit = Fit::new(&model.parameters(), file, &FolderNames(network))?;
    if !fit.is_exact() {
        let path = file.path().display();
        return Err(CliError::Usage(format!("{path}: the weights do not fit {CONFIG}:\n{fit}")));
    }
    fit.check_copies(file)?;
    Ok(fit)
}

fn of_folder(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError::Usage(format!("{}: {error}", path.display()))
}

/// What the text of a `config.json` describes. Its sizes were checked.
pub(crate) fn described(config: &str) -> Result<Described, String> {
    let described = huggingface::config(config).map_err(|error| error.to_string())?;
    described.network.build().map_err(|error| format!("config.json: {error}"))?;
    Ok(described)
}

/// Refuses a tokenizer with tokens that the model does not have. A model may have more.
pub(crate) fn check_vocabulary(network: &Network, tokens: usize) -> Result<(), CliError> {
    let own = network.vocabulary();
    match i64::try_from(tokens).is_ok_and(|tokens| tokens <= own) {
        true => Ok(()),
        false => Err(CliError::Usage(format!(
            "the tokenizer has {tokens} tokens, and the model only {own} (vocab_size): it is the \
            tokenizer of another model"
        ))),
    }
}

/// Names of tensors in a folder.
pub(crate) struct FolderNames<'n>(pub &'n Network);

impl Names for FolderNames<'_> {
    fn map(&self, name: &str) -> Mapped {
        match self.0.parameter_of(name) {
            Found::Parameter(own) => Mapped::To { name: own.name, transpose: own.transpose },
            Found::CopyOf(of) => Mapped::Copy { to: None, of },
            Found::Derived => Mapped::Ignored,
        }
    }

    fn bare<'n>(&self, name: &'n str) -> &'n str {
        self.0.bare(name)
    }

    fn advice(&self) -> &'static str {
        "fetch the folder again"
    }

    fn remedy(&self, _name: &str, _parameter: Option<&str>) -> String {
        "the weights are not tied: set tie_word_embeddings to false in config.json".into()
    }
}
