//! What commands are given that use a trained model.

use std::path::PathBuf;

use clap::Args;

use crate::values::{Devices, Dtype};

/// A trained model: the folder of a run, or a configuration and weights.
#[derive(Debug, Default, Args)]
pub(crate) struct RunArguments {
    /// The folder that `gpipe train` wrote: config.toml, tokenizer.json or classes.json,
    /// weights.safetensors; or a checkpoint in it
    #[arg(value_name = "RUN_DIR", required_unless_present = "config", conflicts_with = "config")]
    pub folder: Option<PathBuf>,
    /// Instead of RUN_DIR: the configuration file
    #[arg(long, value_name = "CONFIG.toml", requires = "weights")]
    pub config: Option<PathBuf>,
    /// Weights to use with --config; the tokenizer.json beside them is used, too
    #[arg(long, value_name = "FILE", requires = "config")]
    pub weights: Option<PathBuf>,
    /// Override one key of the configuration; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Stages K (pipeline.stages); the result is the same for every K
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Where the stages run: one device for all, or one for each (pipeline.devices); default: as in
    /// training
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Dtype of the arithmetic (pipeline.dtype); default: as in training
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Use the moving averages of the weights (averages.safetensors), if the run kept them
    #[arg(long, conflicts_with = "config")]
    pub averages: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Text to measure on, all of it: files or folders, UTF-8; without it, the text that the run
    /// held out
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// Measure on the first N tokens at most [default: train.validation_tokens; with --text all]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Images to measure on, all of them: a folder with a folder for each class; without it, those
    /// that the run held out
    #[arg(long, value_name = "DIR")]
    pub images: Option<PathBuf>,
    /// Write how often which class was taken for which, as tab-separated values: a row per true
    /// class
    #[arg(long, value_name = "FILE.tsv")]
    pub confusion: Option<PathBuf>,
    /// Of a translation: so many held-out sentences of each language are translated, for BLEU and
    /// chrF; 0: none
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub translate: usize,
    #[command(flatten)]
    pub search: SearchArguments,
    /// Of a translation: write the table of languages as tab-separated values
    #[arg(long, value_name = "FILE.tsv")]
    pub table: Option<PathBuf>,
    /// Of a translation: draw the size of each language's data against its BLEU and chrF
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M")]
    pub micro_batches: Option<usize>,
    /// Print one line of JSON, with every digit
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PredictArguments {
    /// The folder that `gpipe train` wrote: config.toml, classes.json, weights.safetensors; or a
    /// checkpoint in it
    #[arg(value_name = "RUN_DIR")]
    pub run: PathBuf,
    /// JPEG and PNG files
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<PathBuf>,
    /// How many classes to name for each
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub top: usize,
    /// Stages K (pipeline.stages); the result is the same for every K
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Where the stages run: one device for all, or one for each (pipeline.devices); default: as in
    /// training
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Use the moving averages of the weights, if the run kept them
    #[arg(long)]
    pub averages: bool,
    /// Print one JSON object per image, a line each
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// The text to continue; an empty one starts a new document. Without this and --prompt-file it
    /// is read from the standard input
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    pub prompt: Option<String>,
    /// A file with the text to continue, UTF-8
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Stop after N tokens, or earlier at the end of a document
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// 0: always the likeliest token; 1: as the model has it; above: more even
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Choose among the K likeliest tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Choose among the fewest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f64,
    /// Seed of the choices: the same seed gives the same text, for every K
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// How translations are searched.
#[derive(Debug, Args)]
pub(crate) struct SearchArguments {
    /// Hypotheses that are kept of each sentence; 1: the likeliest token each time
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub beam: usize,
    /// 0: short translations are preferred; larger: longer ones
    #[arg(long, value_name = "ALPHA", default_value_t = 0.6, allow_negative_numbers = true)]
    pub length_penalty: f64,
}

#[derive(Debug, Args)]
pub(crate) struct TranslateArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// The language of the sentences, such as de or pt_BR; a wrong one is answered with those that
    /// the model knows
    #[arg(long, value_name = "LANGUAGE")]
    pub from: String,
    #[command(flatten)]
    pub search: SearchArguments,
    /// Most lines that are translated together
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub batch: usize,
}
