//! Arguments of the commands that read, draw and convert files, and of those that write what a user
//! begins with.

use std::path::PathBuf;

use clap::Args;
use gpipe::Bytes;

use crate::values::Dtype;

/// Arguments of `gpipe inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// Folder of a checkpoint, of a run, of checkpoints or of a model, or a safetensors file
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Print JSON: one object, or for a run one line per checkpoint and per file of weights
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Folder of a checkpoint or of a run; a run exports its weights if it has ended, else its
    /// newest undamaged checkpoint. With --to, also a model's folder
    #[arg(value_name = "DIR")]
    pub from: PathBuf,
    /// Safetensors file to write
    #[arg(long, value_name = "FILE.safetensors", conflicts_with = "to")]
    pub out: Option<PathBuf>,
    /// Folder to write, which transformers, vLLM and others read: config.json, weights, tokenizer
    #[arg(long, value_name = "FOLDER", required_unless_present = "out")]
    pub to: Option<PathBuf>,
    /// With --to: write only the run's adapters, in the format of PEFT [default: add them to the
    /// weights]
    #[arg(long, requires = "to", conflicts_with = "shard_size")]
    pub adapter: bool,
    /// With --to: maximum size of a file of weights
    #[arg(long, value_name = "BYTES", default_value = "4GiB", requires = "to")]
    pub shard_size: Bytes,
    /// Dtype to convert to: float32, bfloat16, float16 or float64 [default: unchanged; with --to
    /// that of the model's config.json]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Export the moving averages of the weights instead of the weights
    #[arg(long)]
    pub averages: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// Safetensors file to read, or a model's folder with config.json
    #[arg(value_name = "FILE.safetensors|FOLDER")]
    pub from: PathBuf,
    /// Configuration of the model that the weights are for; may be omitted for a model's folder
    #[arg(long, value_name = "CONFIG.toml")]
    pub config: Option<PathBuf>,
    /// Override one key of the configuration; may be repeated
    ///
    /// model.vocabulary must be the number of tokens in the weights, unless the configuration is
    /// that of a run.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// File that maps tensors to parameters; without it, names must be gpipe's
    #[arg(long, value_name = "NAMES.toml", requires = "config")]
    pub names: Option<PathBuf>,
    /// Write the parameters that fit even if others are missing
    #[arg(long, requires = "config")]
    pub partial: bool,
    /// Weights file to write, for `gpipe train --init` and `gpipe eval --weights`
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct PlotArguments {
    /// Folders of runs, with their metrics.jsonl; several runs share one set of axes
    #[arg(value_name = "DIR", required = true)]
    pub runs: Vec<PathBuf>,
    /// SVG page to write [default: plot.svg in the first DIR]
    #[arg(long, value_name = "FILE.svg")]
    pub out: Option<PathBuf>,
}

/// Arguments of `gpipe init`.
#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    /// Folder of data, a JSONL file or a text file
    #[arg(long, value_name = "FOLDER|FILE")]
    pub data: PathBuf,
    /// Configuration to write, which must not exist yet [default: NAME.toml, with the NAME of the
    /// data]
    #[arg(long, value_name = "FILE.toml")]
    pub out: Option<PathBuf>,
}

/// Arguments of `gpipe completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}
