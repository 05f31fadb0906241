//! The arguments of all commands that read a configuration.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use clap::Args;
use gpipe::Balance;

use crate::values::{Caps, Devices, Dtype, whole};

/// Headings of groups of flags in the help. What everybody needs has none, and comes first.
pub(super) const PIPELINE: &str = "Pipeline";
pub(super) const CHECKPOINTS: &str = "Checkpoints";
pub(super) const WEIGHTS: &str = "Start from weights";

/// A key of the configuration, and what was typed for it, such as `--steps 0`.
pub(crate) type Typed = (String, String);

/// What was typed for `key`: a flag with its value.
pub(crate) fn typed(key: &str, flag: &str, value: &Option<impl Display>) -> Option<Typed> {
    Some((key.to_owned(), format!("{flag} {}", value.as_ref()?)))
}

#[derive(Debug, Default, Clone, PartialEq, Args)]
pub(crate) struct ConfigArguments {
    /// Configuration file
    #[arg(value_name = "CONFIG.toml")]
    pub config: Option<PathBuf>,
    /// Files or folders of UTF-8 text to train on [default: the sources of the crates pinned in
    /// configs/text] (data.text)
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// JSONL files to train on: each line has a text, a prompt with its completion, or the messages
    /// of a conversation (data.kind = "jsonl", data.files)
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "text")]
    pub data: Vec<PathBuf>,
    /// Take model, tokenizer and weights of a folder as Hugging Face distributes it: config.json,
    /// tokenizer.json, model.safetensors or shards with their index
    ///
    /// CONFIG.toml may be omitted. It must not have a [model].
    #[arg(long, value_name = "FOLDER")]
    pub from: Option<PathBuf>,
    /// Number of training steps [default: as configured; verify: 3, profile: 4, trace: 5,
    /// ledger: 3] (train.steps)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Freeze the model and train low-rank adapters of rank R (lora.rank)
    #[arg(long, value_name = "R", value_parser = whole::<u32>, allow_negative_numbers = true)]
    pub lora: Option<u32>,
    /// Override one key, such as model.blocks=4; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// How to assign layers to stages: cost, uniform, or layers per stage such as 3,5
    /// (pipeline.balance)
    #[arg(long, help_heading = PIPELINE)]
    pub balance: Option<Balance>,
    /// Number of CPU threads of each stage (pipeline.threads_per_stage)
    #[arg(long, help_heading = PIPELINE, value_name = "N")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub threads_per_stage: Option<usize>,
    /// Dtype of the arithmetic: float32, float64, bfloat16 or float16 (pipeline.dtype)
    #[arg(long, help_heading = PIPELINE, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Devices of the stages: cpu, cuda or cuda:1 for all stages, or one per stage such as
    /// cuda:0,cuda:1, which also sets the number of stages (pipeline.devices)
    #[arg(long, help_heading = PIPELINE, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Maximum memory of a device's tensors, such as 512MiB: one size for all devices, or one per
    /// device such as 1GiB,512MiB (pipeline.memory)
    #[arg(long, help_heading = PIPELINE, value_name = "BYTES,..")]
    pub memory: Option<Caps>,
    /// Seed of all randomness (seed)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

impl ConfigArguments {
    /// The keys that were typed. A flag takes precedence over `--set`.
    pub(crate) fn typed(&self) -> Vec<Typed> {
        let flags = [
            typed("pipeline.balance", "--balance", &self.balance),
            typed("pipeline.threads_per_stage", "--threads-per-stage", &self.threads_per_stage),
            typed("pipeline.dtype", "--dtype", &self.dtype),
            typed("pipeline.devices", "--device", &self.device),
            typed("pipeline.memory", "--memory", &self.memory),
            typed("train.steps", "--steps", &self.steps),
            typed("lora.rank", "--lora", &self.lora),
            typed("seed", "--seed", &self.seed),
        ];
        let set = self.set.iter().rev().filter_map(|text| {
            let (key, _) = text.split_once('=')?;
            Some((key.trim().to_owned(), format!("--set {text}")))
        });
        flags.into_iter().flatten().chain(set).collect()
    }

    /// The base name for files written for this configuration: that of its file or folder.
    pub(crate) fn name(&self) -> String {
        let stem = self.config.as_deref().and_then(Path::file_stem);
        let folder = || {
            // `..` and `.` have no file name.
            let folder = self.from.as_deref()?;
            Some(std::path::absolute(folder).ok()?.file_name()?.to_owned())
        };
        let name = stem.map(ToOwned::to_owned).or_else(folder);
        name.unwrap_or_default().to_string_lossy().into_owned()
    }
}
