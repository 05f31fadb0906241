//! Properties of a model that no shape shows, such as the number of attention heads.
//!
//! Weights with another value would fit the shapes but make another network. Weights that gpipe
//! wrote have these facts in their metadata. For weights from elsewhere, a `config.json` beside
//! them may have them.

mod llama;
mod transformer;

use std::path::Path;

use gpipe_checkpoint::{Checkpoint, manifest, tensor_file::shown, weights::Facts};

use crate::{
    CliError,
    args::ConfigArguments,
    config::{Config, Model},
    files::read_bounded,
};

/// Maximum size of a `config.json`.
const BYTES_MAX: u64 = 1 << 20;
/// The file beside weights from elsewhere.
const SOURCE: &str = "config.json";
/// Prefix of a fact's key, which is a configuration key.
const PREFIX: &str = "model.";
/// Prefix of the key of a fact about adapters.
const ADAPTERS: &str = "lora.";

/// The facts of a configured model, by configuration key.
pub(crate) fn of(config: &Config) -> Facts {
    let all = match &config.model {
        Model::Transformer(own) => {
            vec![("heads", own.heads.to_string()), ("gelu", own.gelu.to_string())]
        }
        Model::Translation(own) => {
            vec![("heads", own.heads.to_string()), ("logit_clip", own.logit_clip.to_string())]
        }
        Model::Llama(own) => vec![
            ("heads", own.heads.to_string()),
            ("theta", own.theta.to_string()),
            ("window", own.window.to_string()),
            ("eps", own.eps.to_string()),
        ],
        // The whole description goes with its weights.
        Model::HuggingFace(_) | Model::AmoebaNet(_) | Model::ResNet(_) => Vec::new(),
    };
    let mut all: Facts =
        all.into_iter().map(|(key, value)| (format!("{PREFIX}{key}"), value)).collect();
    if let Some(lora) = config.lora.adapters() {
        all.insert(format!("{ADAPTERS}alpha"), lora.alpha.to_string());
    }
    all
}

/// The facts of a checkpoint's run. Empty if the checkpoint has no valid configuration.
pub(crate) fn of_checkpoint(checkpoint: &Checkpoint) -> Facts {
    let origin = checkpoint.folder().join(manifest::NAME);
    let text = &checkpoint.manifest().config;
    let config = Config::from_text(text, &origin, &ConfigArguments::default());
    config.map_or_else(|_| Facts::new(), |config| of(&config))
}

/// The facts in a file's metadata.
pub(crate) fn in_metadata(metadata: &Facts) -> Facts {
    let is_fact = |key: &str| key.starts_with(PREFIX) || key.starts_with(ADAPTERS);
    let own = metadata.iter().filter(|(key, _)| is_fact(key));
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Refuses weights of `from` whose facts `said` differ from those of the configured model.
pub(crate) fn check(from: &Path, said: &Facts, config: &Config) -> Result<(), CliError> {
    for (key, own) in of(config) {
        if let Some(said) = said.get(&key).filter(|said| **said != own) {
            let (from, said) = (from.display(), shown(said));
            return Err(CliError::Usage(format!(
                "{from}: its weights were trained with {key} = {said}, the configuration has \
                {key} = {own}: no shape shows it, but the network would be another; set {key} = \
                {said}"
            )));
        }
    }
    Ok(())
}

/// Compares the `config.json` beside foreign weights with the configured model.
///
/// Returns a line for the user about what could not be compared. Returns `None` if everything was
/// compared or the model has no such facts.
pub(crate) fn check_source(from: &Path, config: &Config) -> Result<Option<String>, CliError> {
    let facts = match &config.model {
        Model::Transformer(model) => transformer::facts(model),
        Model::Llama(model) => llama::facts(model),
        _ => return Ok(None),
    };
    let path = from.with_file_name(SOURCE);
    if !path.exists() {
        return Ok(Some(format!(
            "there is no {SOURCE} beside {}: not checked, because no shape shows it: {facts}",
            from.display()
        )));
    }
    let text = read_bounded(&path, BYTES_MAX)?;
    let compared = match &config.model {
        Model::Llama(model) => llama::compare(&text, model, config).map(|()| None),
        Model::Transformer(model) => transformer::compare(&text, model, &path),
        _ => Ok(None),
    };
    compared.map_err(|reason| CliError::Usage(format!("{}: {reason}", path.display())))
}
