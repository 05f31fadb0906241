//! The `config.json` beside weights of a model like GPT-2 or BERT.

use std::path::Path;

use gpipe_checkpoint::tensor_file::shown;
use serde_json::Value;

use crate::config::{GeluChoice, TransformerConfig};

/// Constant that all layer norms add to the variance.
const EPSILON: f64 = 1e-5;
/// Names of the exact GELU, and of approximations that differ from it by up to 5e-4.
const EXACT: [&str; 1] = ["gelu"];
const APPROXIMATE: [&str; 4] = ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_approx"];

/// What no shape shows of the model.
pub(super) fn facts(model: &TransformerConfig) -> String {
    let TransformerConfig { heads, gelu, .. } = model;
    format!(
        "model.heads = {heads}, the epsilon of the norms ({EPSILON:e}), the activation (GELU, \
        model.gelu = {gelu})"
    )
}

/// Compares the `text` of the file `path` with the model. Returns what it leaves open.
///
/// # Errors
/// It is not JSON, or contradicts the model.
pub(super) fn compare(
    text: &str,
    model: &TransformerConfig,
    path: &Path,
) -> Result<Option<String>, String> {
    let source = Source::parse(text)?;
    let unsaid = source.compare(model)?;
    Ok(source.note(path, unsaid, model.gelu))
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
