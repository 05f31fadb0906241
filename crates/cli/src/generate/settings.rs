//! How texts are continued: the flags, and what a model's `generation_config.json` says where no
//! flag does.

use serde_json::{Map, Value};

use super::sampling::Sampling;
use crate::{CliError, args::GenerateArguments, config::Config, task::Vocabulary};

/// The file with a model's usual settings.
const FILE: &str = "generation_config.json";
/// Maximum number of tokens of one text.
pub(super) const TOKENS_MAX: usize = 1 << 20;
/// `top_k` of a file that does not say it (transformers' `GenerationConfig`).
const TOP_K: usize = 50;
/// The number of new tokens if nothing says it.
const TOKENS: usize = 128;
/// The number of new tokens of an answer in a chat if nothing says it.
const ANSWER_TOKENS: usize = 512;
/// Maximum number of strings that end a text.
const STOPS_MAX: usize = 64;

/// Keys of the file that say nothing about the text.
const SILENT: [&str; 9] = [
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "max_length",
    "pad_token_id",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "return_dict_in_generate",
];

/// Keys for which 1 changes nothing. For others it is 0.
const NEUTRAL_AT_ONE: [&str; 7] = [
    "encoder_repetition_penalty",
    "guidance_scale",
    "length_penalty",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "typical_p",
];

/// Settings that fit each other.
pub(super) struct Settings {
    pub sampling: Sampling,
    /// Maximum number of new tokens.
    pub tokens: usize,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Strings that end a text.
    pub stops: Vec<String>,
    /// Settings of the file that are not used.
    pub unused: Vec<String>,
}

impl Settings {
    /// The settings of `arguments`, for a model with these tokens.
    pub fn new(
        arguments: &GenerateArguments,
        config: &Config,
        vocabulary: &Vocabulary,
    ) -> Result<Self, CliError> {
        let mut file = File::read(vocabulary.companion(FILE))?;
        let mut settings = Self::with(arguments, &mut file)?;
        settings.ends.push(vocabulary.tokenizer()?.end_of_document());
        settings.ends.extend(config.ends());
        Ok(settings)
    }

    /// The settings of `arguments`, and of the contents of a `generation_config.json`.
    #[cfg(feature = "fuzzing")]
    pub fn of_file(arguments: &GenerateArguments, text: &[u8]) -> Result<Self, CliError> {
        Self::with(arguments, &mut File::read(Some(text))?)
    }

    fn with(arguments: &GenerateArguments, file: &mut File) -> Result<Self, CliError> {
        // Without a file, texts are sampled. With one, its model's makers say whether.
        let greedy = file.is_there && !file.truth("do_sample")?.unwrap_or(false);
        let (temperature, top_k) = (file.number("temperature")?, file.count("top_k")?);
        let (top_p, min_p) = (file.number("top_p")?, file.number("min_p")?);
        let penalty = file.number("repetition_penalty")?;
        let temperature = if greedy { Some(0.0) } else { temperature };
        let has_filter =
            arguments.top_k.is_some() || arguments.top_p.is_some() || arguments.min_p.is_some();
        if greedy && arguments.temperature.is_none() && has_filter {
            return Err(CliError::Usage(format!(
                "{FILE} asks for the most likely token, for which --top-k, --top-p and --min-p \
                mean nothing: add --temperature"
            )));
        }
        let recommended = Sampling {
            temperature: temperature.unwrap_or(1.0),
            // transformers takes 50 if the file does not say, and turns it off with 0.
            top_k: match top_k {
                None if file.is_there => Some(TOP_K),
                given => given.filter(|k| *k > 0),
            },
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            repetition_penalty: penalty.unwrap_or(1.0),
        };
        let recommended = Sampling::new(recommended).map_err(|error| {
            // Nobody typed the flag that the message names.
            CliError::Usage(format!("{FILE}: {}", error.to_string().trim_start_matches('-')))
        })?;
        let sampling = Sampling::new(Sampling {
            temperature: arguments.temperature.unwrap_or(recommended.temperature),
            top_k: arguments.top_k.or(recommended.top_k),
            top_p: arguments.top_p.unwrap_or(recommended.top_p),
            min_p: arguments.min_p.unwrap_or(recommended.min_p),
            repetition_penalty: arguments
                .repetition_penalty
                .unwrap_or(recommended.repetition_penalty),
        })?;
        let recommended = file.count("max_new_tokens")?;
        if recommended.is_some_and(|tokens| !(1..=TOKENS_MAX).contains(&tokens)) {
            return Err(CliError::Usage(format!(
                "{FILE}: max_new_tokens is not 1 to {TOKENS_MAX}: correct it, or give --tokens"
            )));
        }
        let usual = if arguments.chat { ANSWER_TOKENS } else { TOKENS };
        let tokens = arguments.tokens.or(recommended).unwrap_or(usual);
        if !(1..=TOKENS_MAX).contains(&tokens) {
            return Err(CliError::Usage(format!("--tokens {tokens}: use 1 to {TOKENS_MAX}")));
        }
        if arguments.stop.len() > STOPS_MAX || arguments.stop.iter().any(String::is_empty) {
            return Err(CliError::Usage(format!(
                "--stop: give at most {STOPS_MAX} texts, none of them empty"
            )));
        }
        let ends = file.tokens("eos_token_id")?;
        let unused = file.unused();
        Ok(Self { sampling, tokens, ends, stops: arguments.stop.clone(), unused })
    }
}

/// The keys of the file.
struct File {
    is_there: bool,
    keys: Map<String, Value>,
    used: Vec<&'static str>,
}

impl File {
    /// The keys of the file, of which there are none without one.
    fn read(text: Option<&[u8]>) -> Result<Self, CliError> {
        let keys = text.map_or_else(|| Ok(Map::new()), serde_json::from_slice);
        let keys = keys.map_err(|error| {
            CliError::Usage(format!("{FILE}: it is no object of keys ({error})"))
        })?;
        Ok(Self { is_there: text.is_some(), keys, used: Vec::new() })
    }

    fn get(&mut self, key: &'static str) -> Option<&Value> {
        self.used.push(key);
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// A value that `read` understands.
    fn of<T>(
        &mut self,
        key: &'static str,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, CliError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(CliError::Usage(format!("{FILE}: {key} is {value}: it is {what}"))),
        }
    }

    fn number(&mut self, key: &'static str) -> Result<Option<f64>, CliError> {
        self.of(key, "a number", Value::as_f64)
    }

    fn truth(&mut self, key: &'static str) -> Result<Option<bool>, CliError> {
        self.of(key, "true or false", Value::as_bool)
    }

    fn count(&mut self, key: &'static str) -> Result<Option<usize>, CliError> {
        let count = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.of(key, "a whole number", count)
    }

    fn tokens(&mut self, key: &'static str) -> Result<Vec<u32>, CliError> {
        let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let tokens = |value: &Value| match value.as_array() {
            Some(all) => all.iter().map(token).collect(),
            None => token(value).map(|one| vec![one]),
        };
        Ok(self.of(key, "a token, or a list of them", tokens)?.unwrap_or_default())
    }

    /// Keys that would change the text, and are not supported.
    fn unused(&self) -> Vec<String> {
        let is_known = |key: &str| self.used.contains(&key) || SILENT.contains(&key);
        // What is off or has its neutral value changes nothing.
        let is_off = |key: &str, value: &Value| {
            let neutral = if NEUTRAL_AT_ONE.contains(&key) { 1.0 } else { 0.0 };
            match value {
                Value::Null | Value::Bool(false) => true,
                Value::Number(number) => number.as_f64() == Some(neutral),
                Value::Array(all) => all.is_empty(),
                _ => false,
            }
        };
        let open = self.keys.iter().filter(|(key, value)| !is_known(key) && !is_off(key, value));
        open.map(|(key, value)| format!("{key} = {value}")).collect()
    }
}
