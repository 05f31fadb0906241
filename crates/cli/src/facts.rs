//! Properties of a model that no shape shows, such as the number of attention heads.
//!
//! Weights with another value would fit the shapes but make another network. Weights that gpipe
//! wrote have these facts in their metadata. For weights from elsewhere, a `config.json` beside
//! them may have them.

use std::path::Path;

use gpipe_checkpoint::{Checkpoint, manifest, tensor_file::shown, weights::Facts};
use serde_json::Value;

use crate::{
    CliError,
    args::ConfigArguments,
    config::{Config, GeluChoice, Model, TransformerConfig},
    files::read_bounded,
};

/// Maximum size of a `config.json`.
const BYTES_MAX: u64 = 1 << 20;
/// The file beside weights from elsewhere.
const SOURCE: &str = "config.json";
/// Constant that all layer norms add to the variance.
const EPSILON: f64 = 1e-5;
/// Prefix of a fact's key, which is a configuration key.
const PREFIX: &str = "model.";
/// Prefix of the key of a fact about adapters.
const ADAPTERS: &str = "lora.";
/// Names of the exact GELU, and of approximations that differ from it by up to 5e-4.
const EXACT: [&str; 1] = ["gelu"];
const APPROXIMATE: [&str; 4] = ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_approx"];

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
    let Model::Transformer(model) = &config.model else { return Ok(None) };
    let path = from.with_file_name(SOURCE);
    if !path.exists() {
        let heads = model.heads;
        return Ok(Some(format!(
            "there is no {SOURCE} beside {}: not checked, because no shape shows it: model.heads \
            = {heads}, the epsilon of the norms ({EPSILON:e}), the activation (GELU, model.gelu = \
            {})",
            from.display(),
            model.gelu
        )));
    }
    let text = read_bounded(&path, BYTES_MAX)?;
    let source = Source::parse(&text).map_err(|reason| refusal(&path, &reason))?;
    source
        .compare(model)
        .map_err(|reason| refusal(&path, &reason))
        .map(|unsaid| source.note(&path, unsaid, model.gelu))
}

fn refusal(path: &Path, reason: &str) -> CliError {
    CliError::Usage(format!("{}: {reason}", path.display()))
}

/// The contents of a `config.json`.
struct Source(serde_json::Map<String, Value>);

impl Source {
    fn parse(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err("it is no JSON object: remove it, or bring the model's own".into()),
            Err(error) => {
                Err(format!("it is no JSON ({error}): remove it, or bring the model's own"))
            }
        }
    }

    /// The first of `keys` that is present.
    fn get<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &Value)> {
        let found = |key: &&'k str| Some((*key, self.0.get(*key).filter(|v| !v.is_null())?));
        keys.iter().find_map(found)
    }

    /// Compares the file with `model`. Returns the facts that the file does not state.
    ///
    /// # Errors
    /// Fails at the first contradiction.
    fn compare(&self, model: &TransformerConfig) -> Result<Vec<&'static str>, String> {
        let mut unsaid = Vec::new();
        let numbers: [(&[&str], f64, &str, Option<&'static str>); 4] = [
            (&["n_head", "num_attention_heads"], model.heads as f64, "model.heads", Some("heads")),
            (&["n_layer", "num_hidden_layers"], model.blocks as f64, "model.blocks", None),
            (&["n_embd", "hidden_size"], model.features as f64, "model.features", None),
            (&["layer_norm_epsilon", "layer_norm_eps"], EPSILON, "", Some("epsilon of the norms")),
        ];
        for (keys, own, setting, hidden) in numbers {
            match self.get(keys) {
                None => unsaid.extend(hidden),
                // Some programs write numbers rounded to float32.
                Some((_, value)) if value.as_f64().is_some_and(|v| v as f32 == own as f32) => {}
                Some((key, value)) => return Err(contradiction(key, value, own, setting)),
            }
        }
        match self.get(&["activation_function", "hidden_act"]) {
            None => unsaid.push("activation"),
            Some((key, value)) if !is_one_of(value, &[&EXACT[..], &APPROXIMATE].concat()) => {
                return Err(format!("{key} is {value}, and the model here has \"gelu\" alone"));
            }
            Some(_) => {}
        }
        for (key, wanted) in
            [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false)]
        {
            if self.get(&[key]).is_some_and(|(_, value)| *value != Value::Bool(wanted)) {
                return Err(format!(
                    "{key} is not {wanted}: attention here always divides by the root of the \
                    head's size, and by nothing else"
                ));
            }
        }
        let untied =
            self.get(&["tie_word_embeddings"]).map(|(_, value)| *value == Value::Bool(false));
        if untied == Some(true) && model.tied {
            return Err("tie_word_embeddings is false: use model.tied = false".into());
        }
        Ok(unsaid)
    }

    /// The message about facts that the file leaves open.
    fn note(&self, path: &Path, unsaid: Vec<&'static str>, gelu: GeluChoice) -> Option<String> {
        let mut notes = Vec::new();
        if !unsaid.is_empty() {
            notes.push(format!("does not say, and no shape shows, the {}", unsaid.join(", the ")));
        }
        if let Some((key, value)) = self.get(&["activation_function", "hidden_act"])
            && is_one_of(value, &APPROXIMATE) != (gelu == GeluChoice::Tanh)
        {
            notes.push(format!(
                "says {key} = {value}, which differs from model.gelu = {gelu} by up to 5e-4 of an \
                activation"
            ));
        }
        (!notes.is_empty()).then(|| format!("{} {}", path.display(), notes.join("; it ")))
    }
}

fn is_one_of(value: &Value, names: &[&str]) -> bool {
    value.as_str().is_some_and(|name| names.contains(&name))
}

fn contradiction(key: &str, value: &Value, own: f64, setting: &str) -> String {
    let value = shown(value);
    match setting {
        "" => format!("{key} is {value}, and it is {own:e} in the model here, and cannot be set"),
        setting => format!("{key} is {value}, and {setting} is {own}: set {setting} = {value}"),
    }
}
