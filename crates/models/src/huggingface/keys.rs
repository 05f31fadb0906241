//! Reads the keys of a `config.json`.
//!
//! A key changes the model, or is known to change nothing, or is refused. None is ignored.

use serde_json::{Map, Value};

/// Why a `config.json` cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config.json: {0}")]
pub struct ConfigError(pub(super) String);

pub(super) type Result<T> = std::result::Result<T, ConfigError>;

/// Keys that say nothing about what is computed.
const SILENT: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "bos_token_id",
    "dtype",
    "id2label",
    "is_llama_config",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    // In which parts a product is computed by other programs.
    "pretraining_tp",
];

/// The most tokens that may end a text.
const ENDS_MAX: usize = 256;

/// The error for a key's value.
pub(super) fn wrong<T>(key: &str, value: &Value, remedy: &str) -> Result<T> {
    Err(ConfigError(format!("{key} is {value}: {remedy}")))
}

/// The keys of an object, and which of them were asked for.
pub(super) struct Keys {
    /// What the names of keys in messages begin with.
    prefix: String,
    keys: Map<String, Value>,
    used: Vec<&'static str>,
}

impl Keys {
    pub fn parse(text: &str) -> Result<Self> {
        let parsed: Value = serde_json::from_str(text)
            .map_err(|error| ConfigError(format!("it is not JSON ({error})")))?;
        match parsed {
            Value::Object(keys) => Ok(Self::of(keys, String::new())),
            _ => Err(ConfigError("it is not an object of keys".into())),
        }
    }

    pub fn of(keys: Map<String, Value>, prefix: String) -> Self {
        Self { prefix, keys, used: Vec::new() }
    }

    /// Whether a key is there, null or not.
    pub fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Marks keys as used, whatever they are.
    pub fn skip(&mut self, keys: &[&'static str]) {
        self.used.extend(keys);
    }

    /// The value of a key; `None` if it is missing or null.
    pub fn get(&mut self, key: &'static str) -> Option<Value> {
        self.used.push(key);
        self.keys.get(key).filter(|value| !value.is_null()).cloned()
    }

    pub fn wrong<T>(&self, key: &str, value: &Value, remedy: &str) -> Result<T> {
        wrong(&format!("{}{key}", self.prefix), value, remedy)
    }

    pub fn missing(&self, key: &str) -> ConfigError {
        ConfigError(format!("{}{key} is missing", self.prefix))
    }

    /// A whole number of at least 1.
    pub fn whole_or(&mut self, key: &'static str) -> Result<Option<i64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_i64() {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => self.wrong(key, &value, "it is a whole number of at least 1"),
        }
    }

    /// A whole number of at least 1 that must be there.
    pub fn whole(&mut self, key: &'static str) -> Result<i64> {
        self.whole_or(key)?.ok_or_else(|| self.missing(key))
    }

    /// A whole number of at least 0.
    pub fn count_or(&mut self, key: &'static str, default: u64) -> Result<u64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_u64().map_or_else(|| self.wrong(key, &value, "it is a whole number"), Ok)
    }

    pub fn number_or(&mut self, key: &'static str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().map_or_else(|| self.wrong(key, &value, "it is a number"), Ok)
    }

    /// A number above 0.
    pub fn positive_or(&mut self, key: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 => Ok(Some(number)),
            _ => self.wrong(key, &value, "it is a number above 0"),
        }
    }

    /// A number above 0 that must be there.
    pub fn positive(&mut self, key: &'static str) -> Result<f64> {
        self.positive_or(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn truth_or(&mut self, key: &'static str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().map_or_else(|| self.wrong(key, &value, "it is true or false"), Ok)
    }

    /// Refuses a key that has another value than the one supported.
    pub fn only(&mut self, key: &'static str, supported: Value) -> Result<()> {
        let is_same = |own: &Value| {
            *own == supported || own.is_number() && own.as_f64() == supported.as_f64()
        };
        match self.get(key).filter(|own| !is_same(own)) {
            Some(value) => self.wrong(key, &value, &format!("only {supported} is supported")),
            None => Ok(()),
        }
    }

    /// A token, or a list of tokens.
    pub fn tokens(&mut self, key: &'static str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let listed = match &value {
            Value::Array(listed) => listed.clone(),
            one => vec![one.clone()],
        };
        let token = |own: &Value| own.as_u64().and_then(|own| u32::try_from(own).ok());
        let tokens: Option<Vec<u32>> = listed.iter().map(token).collect();
        match tokens.filter(|tokens| tokens.len() <= ENDS_MAX) {
            Some(tokens) => Ok(tokens),
            None => self.wrong(key, &value, "it is a token's number, or a list of them"),
        }
    }

    /// Refuses an architecture that is no language model, such as a classifier.
    pub fn causal(&mut self) -> Result<()> {
        let Some(value) = self.get("architectures") else { return Ok(()) };
        let is_ours = |own: &Value| {
            own.as_str()
                .is_some_and(|name| name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel"))
        };
        match value.as_array() {
            Some(all) if all.iter().all(is_ours) => Ok(()),
            _ => self.wrong("architectures", &value, "only models ...ForCausalLM are supported"),
        }
    }

    /// Refuses the first key that nobody asked for.
    pub fn finish(&self) -> Result<()> {
        let is_known =
            |key: &str| self.used.contains(&key) || self.prefix.is_empty() && SILENT.contains(&key);
        let unknown = self.keys.iter().find(|(key, own)| !own.is_null() && !is_known(key));
        match unknown {
            None => Ok(()),
            Some((key, value)) => self.wrong(
                key,
                value,
                "this key is not supported: remove it only if it changes nothing in this model",
            ),
        }
    }
}
