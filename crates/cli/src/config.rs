//! The configuration: a TOML file, `--set` and flags become one struct, once, checked.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
    str::FromStr,
};

use gpipe::{Balance, Bytes, Remat, Schedule};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::args::{ConfigArguments, TrainArguments};

/// Largest configuration file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Everything that determines a run. Every key has a default, so a file names only what differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// Seed of initial values, dropout and data order.
    pub seed: u64,
    pub model: Model,
    pub data: Data,
    pub pipeline: PipelineConfig,
    pub optimizer: OptimizerConfig,
    pub train: Train,
}

/// The decoder transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Model {
    pub vocabulary: usize,
    pub features: i64,
    pub heads: i64,
    pub hidden: i64,
    pub blocks: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    pub tied: bool,
    pub split_blocks: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Data {
    /// Files or folders; none: the sources of the crates in `cargo_lock`, as cargo fetched them.
    pub text: Vec<PathBuf>,
    pub cargo_lock: PathBuf,
    /// Tokens of a sample.
    pub sequence: usize,
    /// Whether training documents are joined in an order that the seed chooses, and not by name.
    pub shuffle_documents: bool,
    #[serde(with = "as_text")]
    pub train_bytes: Bytes,
    #[serde(with = "as_text")]
    pub validation_bytes: Bytes,
    #[serde(with = "as_text")]
    pub crate_bytes: Bytes,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PipelineConfig {
    pub stages: usize,
    pub micro_batches: usize,
    #[serde(with = "as_text")]
    pub schedule: Schedule,
    #[serde(with = "as_text")]
    pub balance: Balance,
    #[serde(with = "as_text")]
    pub remat: Remat,
    pub threads_per_stage: usize,
    #[serde(with = "as_text")]
    pub memory: Cap,
    pub deadline_s: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OptimizerConfig {
    /// adam, adamw or sgd.
    pub name: String,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 for no clipping.
    pub clip_norm: f64,
    /// Steps over which the rate rises linearly.
    pub warmup_steps: u64,
    /// After the warm-up: constant, or cosine down to a tenth at the last step.
    pub decay: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Train {
    pub steps: u64,
    /// Samples of a mini-batch.
    pub mini_batch: usize,
    /// Most tokens of the validation text that are evaluated.
    pub validation_tokens: usize,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            vocabulary: 4096,
            features: 256,
            heads: 4,
            hidden: 1024,
            blocks: 4,
            dropout: 0.0,
            attention_dropout: 0.0,
            tied: true,
            split_blocks: true,
        }
    }
}

impl Default for Data {
    fn default() -> Self {
        Self {
            text: Vec::new(),
            cargo_lock: "Cargo.lock".into(),
            sequence: 128,
            shuffle_documents: false,
            train_bytes: Bytes(16 << 20),
            validation_bytes: Bytes(1 << 20),
            crate_bytes: Bytes(2 << 20),
        }
    }
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            stages: 2,
            micro_batches: 4,
            schedule: Schedule::OneFOneB,
            balance: Balance::Cost,
            remat: Remat::UnlessAdjacent,
            threads_per_stage: 1,
            memory: Cap(None),
            deadline_s: 300,
        }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: "adam".into(),
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            momentum: 0.0,
            weight_decay: 0.0,
            clip_norm: 1.0,
            warmup_steps: 20,
            decay: "cosine".into(),
        }
    }
}

impl Default for Train {
    fn default() -> Self {
        Self { steps: 300, mini_batch: 16, validation_tokens: 65_536 }
    }
}

/// A memory cap, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cap(pub Option<Bytes>);

impl Display for Cap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(Bytes(bytes)) => write!(f, "{bytes}"),
            None => f.write_str("none"),
        }
    }
}

impl FromStr for Cap {
    type Err = gpipe_core::units::ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(if text == "none" { None } else { Some(text.parse()?) }))
    }
}

/// Values that are written as text in TOML.
mod as_text {
    use super::*;

    pub(super) fn serialize<T: Display + AsPlainText, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.plain())
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        /// Numbers are welcome where text is meant: `memory = 1000`.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Plain {
            Text(String),
            Number(u64),
        }
        let text = match Plain::deserialize(deserializer)? {
            Plain::Text(text) => text,
            Plain::Number(number) => number.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A form that parses back to the same value.
trait AsPlainText {
    fn plain(&self) -> String;
}

impl AsPlainText for Bytes {
    fn plain(&self) -> String {
        let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let exact = units.iter().find(|(_, size)| self.0 > 0 && self.0.is_multiple_of(*size));
        match exact {
            Some((unit, size)) => format!("{}{unit}", self.0 / size),
            None => self.0.to_string(),
        }
    }
}

macro_rules! plain_is_display {
    ($($type:ty),*) => {
        $(impl AsPlainText for $type {
            fn plain(&self) -> String {
                self.to_string()
            }
        })*
    };
}

plain_is_display!(Schedule, Balance, Remat, Cap);

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{path}: {source}: give the path of a configuration such as configs/small.toml")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {reason}")]
    Parse { path: PathBuf, reason: String },
    #[error("{origin}: there is no key '{key}'{nearest}")]
    UnknownKey { origin: String, key: String, nearest: String },
    #[error("--set {text}: {reason}")]
    Set { text: String, reason: String },
    #[error("{key} = {value}: {reason}")]
    Value { key: &'static str, value: String, reason: String },
}

impl Config {
    /// Reads the file and applies `--set` and the flags, in this order.
    pub(crate) fn load(arguments: &ConfigArguments) -> Result<Self, ConfigError> {
        let path = &arguments.config;
        let text = read(path)?;
        let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            ConfigError::Parse { path: path.clone(), reason: error.to_string() }
        })?;
        check_keys(&table, &defaults()?, "", &path.display().to_string())?;
        for text in &arguments.set {
            set(&mut table, text)?;
        }
        let parse = |error: toml::de::Error| ConfigError::Parse {
            path: path.clone(),
            reason: error.to_string().trim_end().to_owned(),
        };
        let mut config: Config = table.try_into().map_err(parse)?;
        config.apply(arguments)?;
        config.check()?;
        Ok(config)
    }

    fn apply(&mut self, arguments: &ConfigArguments) -> Result<(), ConfigError> {
        let pipeline = &mut self.pipeline;
        if let Some(text) = &arguments.balance {
            pipeline.balance = flag("--balance", text)?;
        }
        if let Some(threads) = arguments.threads_per_stage {
            pipeline.threads_per_stage = threads;
        }
        if let Some(text) = &arguments.memory {
            pipeline.memory = flag("--memory", text)?;
        }
        if let Some(steps) = arguments.steps {
            self.train.steps = steps;
        }
        if let Some(seed) = arguments.seed {
            self.seed = seed;
        }
        if !arguments.text.is_empty() {
            self.data.text.clone_from(&arguments.text);
        }
        Ok(())
    }

    /// Applies the flags that only `train` has.
    pub(crate) fn apply_train(&mut self, arguments: &TrainArguments) -> Result<(), ConfigError> {
        let pipeline = &mut self.pipeline;
        if let Some(stages) = arguments.stages {
            pipeline.stages = stages;
        }
        if let Some(micro_batches) = arguments.micro_batches {
            pipeline.micro_batches = micro_batches;
        }
        if let Some(text) = &arguments.schedule {
            pipeline.schedule = flag("--schedule", text)?;
        }
        if let Some(text) = &arguments.remat {
            pipeline.remat = flag("--remat", text)?;
        }
        Ok(())
    }

    /// What no other room checks when it gets its part.
    fn check(&self) -> Result<(), ConfigError> {
        let refuse = |key, value: String, reason: &str| {
            Err(ConfigError::Value { key, value, reason: reason.into() })
        };
        if self.train.steps == 0 {
            return refuse("train.steps", "0".into(), "use at least 1");
        }
        if self.train.mini_batch == 0 {
            return refuse("train.mini_batch", "0".into(), "use at least 1");
        }
        let optimizer = &self.optimizer;
        if !["adam", "adamw", "sgd"].contains(&optimizer.name.as_str()) {
            return refuse("optimizer.name", optimizer.name.clone(), "use adam, adamw or sgd");
        }
        if !["constant", "cosine"].contains(&optimizer.decay.as_str()) {
            return refuse("optimizer.decay", optimizer.decay.clone(), "use constant or cosine");
        }
        if optimizer.clip_norm.is_nan() || optimizer.clip_norm < 0.0 {
            let value = optimizer.clip_norm.to_string();
            return refuse("optimizer.clip_norm", value, "use 0 (off) or a positive number");
        }
        Ok(())
    }

    /// As TOML, with every key.
    pub(crate) fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Parse {
            path: "config.toml".into(),
            reason: error.to_string(),
        })
    }
}

/// Parses a flag's value; its error says what is allowed.
pub(crate) fn flag<T: FromStr>(name: &'static str, text: &str) -> Result<T, ConfigError>
where
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| ConfigError::Value {
        key: name,
        value: text.to_owned(),
        reason: error.to_string(),
    })
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |source| ConfigError::Read { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(error)?.len();
    if size > FILE_BYTES_MAX {
        let reason = format!("it has {size} bytes, a configuration at most {FILE_BYTES_MAX}");
        return Err(ConfigError::Parse { path: path.to_owned(), reason });
    }
    std::fs::read_to_string(path).map_err(error)
}

/// All keys with their defaults: what a file may name.
fn defaults() -> Result<toml::Table, ConfigError> {
    toml::Table::try_from(Config::default())
        .map_err(|error| ConfigError::Parse { path: "defaults".into(), reason: error.to_string() })
}

fn check_keys(
    given: &toml::Table,
    known: &toml::Table,
    prefix: &str,
    origin: &str,
) -> Result<(), ConfigError> {
    for (key, value) in given {
        let full = format!("{prefix}{key}");
        match known.get(key) {
            None => return Err(unknown(&full, origin)),
            Some(toml::Value::Table(known)) => {
                if let toml::Value::Table(given) = value {
                    check_keys(given, known, &format!("{full}."), origin)?;
                }
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// The error for a key that does not exist, with the nearest one that does.
fn unknown(key: &str, origin: &str) -> ConfigError {
    let mut all = Vec::new();
    if let Ok(defaults) = defaults() {
        collect_keys(&defaults, "", &mut all);
    }
    let nearest = all
        .into_iter()
        .map(|known| {
            (strsim::jaro_winkler(&known, key).max(last_part_likeness(&known, key)), known)
        })
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, known)| format!(": did you mean '{known}'?"));
    let nearest = nearest.unwrap_or_else(|| {
        ": the tables are model, data, pipeline, optimizer and train".to_owned()
    });
    ConfigError::UnknownKey { origin: origin.to_owned(), key: key.to_owned(), nearest }
}

/// A key in the wrong table is likely meant, too.
fn last_part_likeness(known: &str, key: &str) -> f64 {
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    0.98 * strsim::jaro_winkler(&last(known), &last(key))
}

fn collect_keys(table: &toml::Table, prefix: &str, all: &mut Vec<String>) {
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => collect_keys(inner, &format!("{prefix}{key}."), all),
            _ => all.push(format!("{prefix}{key}")),
        }
    }
}

/// Applies one `a.b=c`; `c` is TOML, or text where that does not parse.
fn set(table: &mut toml::Table, text: &str) -> Result<(), ConfigError> {
    let error = |reason: &str| ConfigError::Set { text: text.to_owned(), reason: reason.into() };
    let (key, value) = text.split_once('=').ok_or_else(|| error("write it as KEY=VALUE"))?;
    let (key, value) = (key.trim(), value.trim());
    let mut known = defaults()?;
    let parts: Vec<&str> = key.split('.').collect();
    let (last, tables) = parts.split_last().ok_or_else(|| error("write it as KEY=VALUE"))?;
    let mut into = table;
    for part in tables {
        known = match known.remove(*part) {
            Some(toml::Value::Table(inner)) => inner,
            _ => return Err(unknown(key, "--set")),
        };
        let entry = into.entry((*part).to_owned());
        into = match entry.or_insert_with(|| toml::Value::Table(toml::Table::new())) {
            toml::Value::Table(inner) => inner,
            _ => return Err(error("the file has a value where a table should be")),
        };
    }
    match known.get(*last) {
        None => return Err(unknown(key, "--set")),
        Some(toml::Value::Table(_)) => return Err(error("that is a table: set one of its keys")),
        Some(_) => {}
    }
    let parsed = format!("value = {value}").parse::<toml::Table>().ok();
    let value = parsed.and_then(|mut table| table.remove("value"));
    let value = value.unwrap_or_else(|| {
        toml::Value::String(text.split_once('=').map_or("", |x| x.1).trim().into())
    });
    into.insert((*last).to_owned(), value);
    Ok(())
}
