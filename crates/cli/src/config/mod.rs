//! The configuration: one checked struct made from a TOML file, `--set` and flags.
//!
//! - [`tables`]: the keys and their defaults; [`model`], [`data`]: those that depend on a [`kind`]
//! - [`keys`]: unknown keys, and `--set`; [`unreadable`]: values that cannot be read
//! - [`check`]: checks before anything is read
//! - [`commented`]: the file of a run, with comments
//! - [`changes`]: what a resumed run may change

mod changes;
mod check;
mod commented;
mod data;
mod keys;
mod kind;
mod model;
mod tables;
mod taken;
mod unreadable;

use std::path::{Path, PathBuf};

pub(crate) use crate::values::{
    CropChoice, Decays, Dtype, Every, GeluChoice, JsonChoice, KernelChoice, MomentsChoice,
    OnBadLineChoice, OnNan, OnUnreadableChoice, OptimizerName, PackingChoice, TokenizerChoice,
    VariantName,
};
pub(crate) use changes::{Effect, changes};
pub(crate) use commented::COMPLETE;
pub(crate) use data::{
    Data, ImageFolderConfig, ImagesConfig, JsonlConfig, ParallelConfig, TextConfig,
};
use gpipe::{Balance, Kernels, RematPolicies, Schedule};
use gpipe_files::ReadError;
use gpipe_models::huggingface::Network;
use keys::{check_keys, defaults, flatten, set};
#[cfg(test)]
pub(crate) use kind::{DATA, MODELS};
pub(crate) use model::{LlamaConfig, Model, TransformerConfig};
pub(crate) use tables::{Config, GroupConfig, OptimizerConfig};
use taken::{take_adapters, take_data, take_folder};
use unreadable::{refused, unparsable};

use crate::{
    args::{ConfigArguments, PipelineArguments, TrainArguments, Typed},
    values::ScheduleChoice,
};

/// The defaults of all keys, for the kinds that `text` chooses.
#[cfg(test)]
pub(crate) fn defaults_of(text: &str) -> toml::Table {
    let given: toml::Table = text.parse().unwrap();
    defaults(&given, "reference").unwrap()
}

/// The configuration of `--from FOLDER` without a file.
const FROM: &str = include_str!("from.toml");

/// Maximum size of a configuration file.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Errors of a configuration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error(
        "name a configuration file, such as configs/small.toml, or a model's folder with --from \
        FOLDER"
    )]
    None,
    #[error("{path}: {source}: give the path of a configuration such as configs/small.toml")]
    Read { path: PathBuf, source: std::io::Error },
    /// `--data` and `--text` take all that follows, even the configuration.
    #[error(
        "{flag} ... {path}: name the configuration before {flag}, which takes all that follows"
    )]
    Swallowed { flag: &'static str, path: PathBuf },
    #[error("{path}: {reason}")]
    Parse { path: PathBuf, reason: String },
    #[error("{origin}: there is no key '{key}'{nearest}")]
    UnknownKey { origin: String, key: String, nearest: String },
    /// A value from the command line. `typed` is the flag with its value.
    #[error("{typed}: {reason}")]
    Typed { typed: String, reason: String },
    #[error("{key} = {value}: {reason}")]
    Value { key: &'static str, value: String, reason: String },
    #[error(
        "model.kind = {model} does not fit data.kind = {data}: a transformer, a llama and a \
        huggingface model learn from text or jsonl, a \
        translation from parallel, an image network from image-folder, cifar10 or cifar100"
    )]
    Kinds { model: String, data: String },
    #[error("--from {0}")]
    From(String),
    #[error("--text {path}: {reason}")]
    Text { path: PathBuf, reason: &'static str },
    #[error("--data {path}: {reason}")]
    Data { path: PathBuf, reason: String },
}

impl Config {
    /// The number of samples of a mini-batch that one pipeline receives: all of them, or with
    /// several replicas the largest part.
    pub(crate) fn samples_of_a_pipeline(&self) -> usize {
        self.train.mini_batch.div_ceil(self.pipeline.replicas.max(1))
    }

    /// The number of samples of a pipeline's largest micro-batch.
    pub(crate) fn samples_of_a_micro_batch(&self) -> usize {
        self.samples_of_a_pipeline().div_ceil(self.pipeline.micro_batches.max(1))
    }

    /// This configuration without memory caps.
    pub(crate) fn uncapped(&self) -> Self {
        let mut uncapped = self.clone();
        uncapped.pipeline.memory.0.clear();
        uncapped
    }

    /// The number of replicas among which the optimizer state is divided; 1 if each keeps all.
    pub(crate) fn optimizer_shards(&self) -> usize {
        if self.pipeline.shard_optimizer { self.pipeline.replicas.max(1) } else { 1 }
    }

    /// The network of a model's folder.
    pub(crate) fn network(&self) -> Result<Network, ConfigError> {
        let reason = match &self.model {
            Model::HuggingFace(model) => match model.described() {
                Ok(described) => return Ok(described.network),
                Err(reason) => reason,
            },
            _ => "the model is not that of a folder".into(),
        };
        Err(ConfigError::Value { key: "model.config", value: "...".into(), reason })
    }

    /// The token that ends a document, if the model's description names one.
    pub(crate) fn end(&self) -> Option<u32> {
        self.ends().first().copied()
    }

    /// The tokens that end a text, as far as the model's description names them.
    pub(crate) fn ends(&self) -> Vec<u32> {
        self.model.ends()
    }

    /// How samples are packed into rows, with `auto` resolved. `None` unless the data are JSONL.
    pub(crate) fn packing(&self) -> Option<PackingChoice> {
        let Data::Jsonl(data) = &self.data else { return None };
        Some(match (data.packing, self.separates_documents()) {
            (PackingChoice::Auto, true) => PackingChoice::Separate,
            (PackingChoice::Auto, false) => PackingChoice::None,
            (chosen, _) => chosen,
        })
    }

    /// Gives each document a separate row, as evaluation and generation need: the rows have any
    /// length.
    pub(crate) fn one_document_per_row(&mut self) {
        if let Data::Jsonl(data) = &mut self.data {
            (data.packing, data.texts_only) = (PackingChoice::None, true);
        }
    }

    /// Whether the model can keep the documents of a row from attending to each other.
    fn separates_documents(&self) -> bool {
        match &self.model {
            Model::Llama(_) => true,
            Model::HuggingFace(_) => matches!(self.network(), Ok(Network::Llama(_))),
            _ => false,
        }
    }

    /// The choice of tokenizer, for data that are text.
    pub(crate) fn tokenizer(&self) -> Option<&TokenizerChoice> {
        match &self.data {
            Data::Text(data) => Some(&data.tokenizer),
            Data::Jsonl(data) => Some(&data.tokenizer),
            Data::Parallel(data) => Some(&data.tokenizer),
            _ => None,
        }
    }

    /// Reads the file, applies `--set` and then the flags, and checks the result.
    pub(crate) fn load(arguments: &ConfigArguments) -> Result<Self, ConfigError> {
        let config = Self::read(arguments)?;
        config.check_typed(&arguments.typed())?;
        Ok(config)
    }

    /// Like [`Config::load`], but without the check, because more flags follow.
    pub(crate) fn read(arguments: &ConfigArguments) -> Result<Self, ConfigError> {
        Self::check_order(arguments)?;
        match (&arguments.config, &arguments.from) {
            (Some(path), _) => Self::from_text(&read(path)?, path, arguments),
            (None, Some(_)) => Self::from_text(FROM, Path::new("--from"), arguments),
            (None, None) => Err(ConfigError::None),
        }
    }

    /// Refuses a configuration that was named behind a flag that takes all that follows.
    fn check_order(arguments: &ConfigArguments) -> Result<(), ConfigError> {
        // TOML may be text to train on, where no configuration is needed.
        let text = if arguments.from.is_none() { &arguments.text[..] } else { &[] };
        let lists = [("--data", &arguments.data[..]), ("--text", text)];
        let is_toml = |path: &&PathBuf| path.extension() == Some("toml".as_ref());
        let swallowed = |(flag, paths): (&'static str, &[PathBuf])| {
            let path = paths.iter().find(is_toml)?.clone();
            Some(ConfigError::Swallowed { flag, path })
        };
        match lists.into_iter().find_map(swallowed).filter(|_| arguments.config.is_none()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Parses `text`, which was read from `origin`, and applies `--set` and the flags. The result
    /// is not checked.
    pub(crate) fn from_text(
        text: &str,
        origin: &Path,
        arguments: &ConfigArguments,
    ) -> Result<Self, ConfigError> {
        let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            ConfigError::Parse { path: origin.to_owned(), reason: unparsable(text, &error) }
        })?;
        let file = origin.display().to_string();
        if let Some(folder) = &arguments.from {
            take_folder(&mut table, folder, &file, arguments.config.is_none())?;
        }
        take_data(&mut table, &arguments.data)?;
        let begins = arguments.config.is_none() && arguments.from.is_some();
        if begins && arguments.lora.is_some_and(|rank| rank > 0) {
            take_adapters(&mut table);
        }
        let known = defaults(&table, &file)?;
        check_keys(&table, &known, &known, "", &file)?;
        // Kinds first, because other keys depend on them.
        let is_kind = |text: &&String| {
            text.split_once('=').is_some_and(|(key, _)| key.trim().ends_with(".kind"))
        };
        for text in arguments.set.iter().filter(is_kind) {
            set(&mut table, text)?;
            // The keys of the file must be valid for the new kind, too.
            let known = defaults(&table, &format!("--set {text}"))?;
            check_keys(&table, &known, &known, "", &format!("{file} with --set {text}"))?;
        }
        for text in arguments.set.iter().filter(|text| !is_kind(text)) {
            set(&mut table, text)?;
        }
        let read: Result<Config, toml::de::Error> = table.clone().try_into();
        let mut config = read.map_err(|error| refused(&error, &table, origin, &arguments.set))?;
        config.apply(arguments)?;
        Ok(config)
    }

    fn apply(&mut self, arguments: &ConfigArguments) -> Result<(), ConfigError> {
        let pipeline = &mut self.pipeline;
        if let Some(balance) = &arguments.balance {
            pipeline.balance = balance.clone();
        }
        if let Some(threads) = arguments.threads_per_stage {
            pipeline.threads_per_stage = threads;
        }
        if let Some(dtype) = arguments.dtype {
            pipeline.dtype = dtype;
        }
        if let Some(devices) = &arguments.device {
            pipeline.devices = devices.clone();
            if pipeline.devices.0.len() > 1 {
                pipeline.stages = pipeline.devices.0.len();
            }
        }
        if let Some(caps) = &arguments.memory {
            pipeline.memory = caps.clone();
        }
        if let Some(steps) = arguments.steps {
            self.train.steps = steps;
        }
        if let Some(rank) = arguments.lora {
            self.lora.rank = rank.into();
        }
        if let Some(seed) = arguments.seed {
            self.seed = seed;
        }
        if let Some(odd) = arguments.text.iter().find(|path| path.to_str().is_none()) {
            let reason = "its name is no UTF-8, which a configuration cannot hold: rename it, or \
                name its folder";
            return Err(ConfigError::Text { path: odd.clone(), reason });
        }
        if let Some(path) = arguments.text.first() {
            match &mut self.data {
                Data::Text(data) => data.text.clone_from(&arguments.text),
                _ => {
                    let reason =
                        "the configuration does not learn from plain text: leave --text out";
                    return Err(ConfigError::Text { path: path.clone(), reason });
                }
            }
        }
        Ok(())
    }

    /// Reads the file and applies `--set`, the flags and the pipeline's flags, without the check.
    pub(crate) fn load_for_training(arguments: &PipelineArguments) -> Result<Self, ConfigError> {
        let mut config = Self::read(&arguments.config)?;
        config.apply_pipeline(arguments);
        config.check_typed(&arguments.typed())?;
        Ok(config)
    }

    /// The configuration for measurements and estimates: 1F1B stands for an order that is still to
    /// be made, and for one that was made for another plan.
    pub(crate) fn before_order(&self) -> Self {
        let mut config = self.clone();
        let is_order = match &config.pipeline.schedule {
            ScheduleChoice::Auto => true,
            ScheduleChoice::Named(Schedule::Custom(own)) => own.is_made(),
            ScheduleChoice::Named(_) | ScheduleChoice::File(_) => false,
        };
        if is_order {
            config.pipeline.schedule = ScheduleChoice::Named(Schedule::OneFOneB);
            // Cuts and policies may be for more stages than devices.
            config.set_stages(config.pipeline.stages, true);
        }
        config
    }

    /// The configuration to check before a plan is made, which chooses the rest.
    pub(crate) fn before_plan(&self) -> Self {
        let mut config = self.clone();
        let pipeline = &mut config.pipeline;
        pipeline.schedule = ScheduleChoice::Named(Schedule::OneFOneB);
        pipeline.balance = Balance::Cost;
        pipeline.remat = RematPolicies::default();
        (pipeline.stages, pipeline.micro_batches) = (1, 1);
        pipeline.devices.0.truncate(1);
        pipeline.memory.0.clear();
        config
    }

    /// Changes the number of stages, and resets settings that only fit another number.
    pub(crate) fn set_stages(&mut self, stages: usize, devices_were_named: bool) {
        let pipeline = &mut self.pipeline;
        pipeline.stages = stages;
        // Devices are kept if they are all the same or were just named.
        let devices = &mut pipeline.devices.0;
        if !devices_were_named && devices.iter().all(|device| *device == devices[0]) {
            devices.truncate(1);
        }
        // A schedule may put several stages on a device. A schedule that does not fit is refused
        // later.
        let all = pipeline.schedule.stages(stages);
        if matches!(&pipeline.balance, Balance::Layers(layers) if layers.len() != all) {
            pipeline.balance = Balance::Cost;
        }
        if pipeline.remat.check(all).is_err() {
            pipeline.remat = RematPolicies::default();
        }
    }

    /// Applies the flags of training, and checks the result.
    pub(crate) fn apply_training(&mut self, arguments: &TrainArguments) -> Result<(), ConfigError> {
        if let Some(every) = arguments.checkpoint_every {
            self.checkpoint.every = every;
        }
        if let Some(keep) = arguments.keep {
            self.checkpoint.keep = keep;
        }
        self.checkpoint.keep_best |= arguments.keep_best;
        if let Some(every) = arguments.log_every {
            self.train.log_every = every;
        }
        if let Some(on_nan) = arguments.on_nan {
            self.train.on_nan = on_nan;
        }
        self.apply_pipeline(&arguments.pipeline);
        self.check_typed(&arguments.typed())
    }

    fn apply_pipeline(&mut self, arguments: &PipelineArguments) {
        let pipeline = &mut self.pipeline;
        if let Some(stages) = arguments.stages {
            pipeline.stages = stages;
        }
        if let Some(micro_batches) = arguments.micro_batches {
            pipeline.micro_batches = micro_batches;
        }
        if let Some(replicas) = arguments.replicas {
            pipeline.replicas = replicas;
        }
        if arguments.shard_optimizer {
            pipeline.shard_optimizer = true;
        }
        if let Some(schedule) = &arguments.schedule {
            pipeline.schedule = schedule.clone();
        }
        if let Some(remat) = &arguments.remat {
            pipeline.remat = remat.clone();
        }
    }

    /// Checks every key. An error names what was typed for the key, if anything was.
    pub(crate) fn check_typed(&self, typed: &[Typed]) -> Result<(), ConfigError> {
        self.check().map_err(|error| match error {
            ConfigError::Value { key, value, reason } => {
                match typed.iter().find(|(own, _)| own == key) {
                    Some((_, typed)) => ConfigError::Typed { typed: typed.clone(), reason },
                    None => ConfigError::Value { key, value, reason },
                }
            }
            other => other,
        })
    }

    /// The configuration with every machine-dependent choice resolved.
    pub(crate) fn resolved(&self) -> Self {
        let mut config = self.clone();
        if config.pipeline.kernels == KernelChoice::Fastest {
            config.pipeline.kernels = match Kernels::fastest() {
                Kernels::Aten => KernelChoice::Aten,
                Kernels::ChannelsLast => KernelChoice::ChannelsLast,
                Kernels::OneDnn => KernelChoice::OneDnn,
            };
        }
        config
    }

    /// Every key with its value, such as `pipeline.stages`.
    pub(crate) fn keys(&self) -> Result<Vec<(String, String)>, ConfigError> {
        let table = toml::Table::try_from(self).map_err(|error| ConfigError::Parse {
            path: "config.toml".into(),
            reason: error.to_string(),
        })?;
        Ok(flatten(&table).into_iter().map(|(key, value)| (key, value.to_string())).collect())
    }

    /// The value of a key as a configuration writes it.
    pub(crate) fn shown(&self, key: &str) -> Result<String, ConfigError> {
        let found = self.keys()?.into_iter().find(|(own, _)| own == key);
        Ok(found.map_or(String::new(), |(_, value)| value))
    }

    /// The configuration as TOML, with every key.
    pub(crate) fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Parse {
            path: "config.toml".into(),
            reason: error.to_string(),
        })
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let refused = |reason| ConfigError::Parse { path: path.to_owned(), reason };
    let bytes = gpipe_files::read(path, FILE_BYTES_MAX).map_err(|error| match error {
        ReadError::Io(source) => ConfigError::Read { path: path.to_owned(), source },
        ReadError::NotAFile if path.is_dir() => refused(
            "it is a folder: name a configuration. gpipe init --data FOLDER writes one for a \
            folder of data, and --resume FOLDER goes on with a run"
                .into(),
        ),
        other => refused(other.to_string()),
    })?;
    String::from_utf8(bytes).map_err(|error| {
        refused(format!("it is no UTF-8 text, from byte {} on", error.utf8_error().valid_up_to()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task;

    /// Checks the recipes in `configs`; otherwise the first user would find one that cannot be read
    /// or whose network cannot be built.
    #[test]
    fn oracle_every_recipe_of_ours_is_read_checked_and_makes_a_network() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let arguments = ConfigArguments { config: Some(path.clone()), ..Default::default() };
            let config = Config::load(&arguments).unwrap_or_else(|error| panic!("{error}"));
            let model = task::model(&config, 1000).unwrap();
            let inputs = task::inputs(&config, 2);
            let costs = model.costs(&inputs, task::kind(&config)).unwrap();
            assert!(costs.len() >= config.pipeline.stages, "{}", path.display());
            // The written file must parse back to the same configuration.
            let text = config.to_toml().unwrap();
            let again = Config::from_text(&text, &path, &ConfigArguments::default()).unwrap();
            assert_eq!(again, config, "{}", path.display());
            let text = config.to_commented().unwrap();
            let again = Config::from_text(&text, &path, &ConfigArguments::default()).unwrap();
            assert_eq!(again, config, "{text}");
            seen += 1;
        }
        assert!(seen >= 5, "{seen}");
    }
}
