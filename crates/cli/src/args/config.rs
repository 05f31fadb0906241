//! The arguments of all commands that read a configuration.

use std::path::{Path, PathBuf};

use clap::Args;
use gpipe::Balance;

use crate::values::{Caps, Devices, Dtype, whole};

#[derive(Debug, Default, Clone, PartialEq, Args)]
pub(crate) struct ConfigArguments {
    /// Configuration file
    #[arg(value_name = "CONFIG.toml")]
    pub config: Option<PathBuf>,
    /// Take model, tokenizer and weights of a folder as Hugging Face distributes it: config.json,
    /// tokenizer.json, model.safetensors or shards with their index
    ///
    /// CONFIG.toml may be omitted. It must not have a [model].
    #[arg(long, value_name = "FOLDER")]
    pub from: Option<PathBuf>,
    /// Override one key, such as model.blocks=4; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// How to assign layers to stages: cost, uniform, or layers per stage such as 3,5
    /// (pipeline.balance)
    #[arg(long)]
    pub balance: Option<Balance>,
    /// Number of CPU threads of each stage (pipeline.threads_per_stage)
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub threads_per_stage: Option<usize>,
    /// Dtype of the arithmetic: float32, float64, bfloat16 or float16 (pipeline.dtype)
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Devices of the stages: cpu, cuda or cuda:1 for all stages, or one per stage such as
    /// cuda:0,cuda:1, which also sets the number of stages (pipeline.devices)
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Maximum memory of a device's tensors, such as 512MiB: one size for all devices, or one per
    /// device such as 1GiB,512MiB (pipeline.memory)
    #[arg(long, value_name = "BYTES,..")]
    pub memory: Option<Caps>,
    /// Number of training steps [default: as configured; verify: 3, profile: 4, trace: 5,
    /// ledger: 3] (train.steps)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Seed of all randomness (seed)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Files or folders of UTF-8 text to train on [default: the sources of the crates pinned in
    /// configs/text] (data.text)
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// JSONL files to train on: each line has a text, a prompt with its completion, or the messages
    /// of a conversation (data.kind = "jsonl", data.files)
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "text")]
    pub data: Vec<PathBuf>,
    /// Freeze the model and train low-rank adapters of rank R (lora.rank)
    #[arg(long, value_name = "R", value_parser = whole::<u32>, allow_negative_numbers = true)]
    pub lora: Option<u32>,
}

impl ConfigArguments {
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
