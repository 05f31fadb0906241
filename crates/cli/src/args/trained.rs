//! Arguments of the commands that use a trained model.

use std::path::PathBuf;

use clap::Args;

use crate::values::{Devices, Dtype, number, whole};

/// A trained model: the folder of a run, or a configuration and weights.
#[derive(Debug, Default, Args)]
pub(crate) struct RunArguments {
    /// Folder that `gpipe train` wrote (config.toml, tokenizer.json or classes.json,
    /// weights.safetensors), or a checkpoint in it, or a model's folder from Hugging Face
    #[arg(value_name = "RUN_DIR", required_unless_present = "config", conflicts_with = "config")]
    pub folder: Option<PathBuf>,
    /// Configuration file, instead of RUN_DIR
    #[arg(long, value_name = "CONFIG.toml", requires = "weights")]
    pub config: Option<PathBuf>,
    /// Weights to use with --config; the tokenizer.json beside them is used too
    #[arg(long, value_name = "FILE", requires = "config", conflicts_with = "folder")]
    pub weights: Option<PathBuf>,
    /// Override one key of the configuration; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Number of stages K; the result is the same for every K (pipeline.stages)
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Devices of the stages: one for all stages, or one per stage [default: as in training]
    /// (pipeline.devices)
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Dtype of the arithmetic [default: as in training] (pipeline.dtype)
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Use the moving averages of the weights (averages.safetensors), if the run kept them
    #[arg(long, conflicts_with = "config")]
    pub averages: bool,
    /// The command's other arguments that must be the same in every process, by flag
    #[arg(skip)]
    pub beside: Vec<(String, String)>,
}

fn named<const N: usize>(facts: [(&str, String); N]) -> Vec<(String, String)> {
    facts.map(|(flag, value)| (flag.to_owned(), value)).into()
}

fn given(value: &Option<impl ToString>) -> String {
    value.as_ref().map_or_else(|| "none".to_owned(), ToString::to_string)
}

fn path(path: &Option<PathBuf>) -> String {
    given(&path.as_ref().map(|path| path.display()))
}

#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Files or folders of UTF-8 text to measure on, all of it [default: the text that the run held
    /// out]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// JSONL files to evaluate on [default: the held-out samples of a run on JSONL]
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "text")]
    pub data: Vec<PathBuf>,
    /// Measure about N tokens: the first of a text, or rows spread evenly over samples
    /// [default: train.validation_tokens; all tokens if --text or --data is given]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub tokens: Option<usize>,
    /// Folder with a folder of images for each class, to measure on all of them [default: the
    /// images that the run held out]
    #[arg(long, value_name = "DIR")]
    pub images: Option<PathBuf>,
    /// Write the confusion matrix as tab-separated values, with a row per true class
    #[arg(long, value_name = "FILE.tsv")]
    pub confusion: Option<PathBuf>,
    /// Translation models: number of held-out sentences per language to translate for BLEU and
    /// chrF; 0 translates none
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub translate: usize,
    #[command(flatten)]
    pub search: SearchArguments,
    /// Translation models: write the table of languages as tab-separated values
    #[arg(long, value_name = "FILE.tsv")]
    pub table: Option<PathBuf>,
    /// Translation models: plot BLEU and chrF of each language against the size of its data
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Number of micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Option<usize>,
    /// Print one line of JSON, with all digits
    #[arg(long)]
    pub json: bool,
}

impl EvalArguments {
    /// The arguments besides those of the run that must be the same in every process. Data are
    /// compared by content.
    pub(crate) fn told(&self) -> Vec<(String, String)> {
        let own = named([
            ("--tokens", given(&self.tokens)),
            ("--confusion", path(&self.confusion)),
            ("--translate", self.translate.to_string()),
            ("--table", path(&self.table)),
            ("--svg", path(&self.svg)),
        ]);
        [own, self.search.told()].concat()
    }
}

#[derive(Debug, Args)]
pub(crate) struct PredictArguments {
    /// Folder that `gpipe train` wrote (config.toml, classes.json, weights.safetensors), or a
    /// checkpoint in it
    #[arg(value_name = "RUN_DIR")]
    pub run: PathBuf,
    /// JPEG and PNG files
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<PathBuf>,
    /// Number of classes to print for each image
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub top: usize,
    /// Number of stages K; the result is the same for every K (pipeline.stages)
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Devices of the stages: one for all stages, or one per stage [default: as in training]
    /// (pipeline.devices)
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Use the moving averages of the weights, if the run kept them
    #[arg(long)]
    pub averages: bool,
    /// Print one line of JSON per image
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Default, Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Text to continue; an empty text starts a new document; may be repeated [default: standard
    /// input, unless a file is given]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompt_file", "prompts"])]
    pub prompt: Vec<String>,
    /// UTF-8 file with the text to continue
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    pub prompt_file: Option<PathBuf>,
    /// UTF-8 file with a text to continue on each line
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Chat with the model: it answers each line of standard input. The model's chat template
    /// renders the conversation
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file", "prompts", "json", "batch"])]
    pub chat: bool,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Maximum number of texts to continue at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub batch: usize,
    /// Stop after N tokens, or earlier at the end of a document [default: max_new_tokens of the
    /// model's generation_config.json, or 128, or 512 for each answer of --chat]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub tokens: Option<usize>,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Sampling temperature: 0 always takes the most likely token, 1 samples from the model's
    /// distribution, higher values flatten it [default: as in generation_config.json, or 1]
    #[arg(long, value_name = "T")]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Sample only from the K most likely tokens [default: that of generation_config.json, or 50 if
    /// it names none; without that file, all]
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Sample only from the smallest set of tokens with a total probability of at least P [default:
    /// as in generation_config.json, or 1]
    #[arg(long, value_name = "P")]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Sample only from tokens with at least P times the probability of the most likely one
    /// [default: as in generation_config.json, or 0]
    #[arg(long, value_name = "P")]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Divide the logits of tokens that are in the text already by X (multiply negative ones)
    /// [default: as in generation_config.json, or 1]
    #[arg(long, value_name = "X")]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f64>,
    /// Seed of the sampling: the same seed gives the same text for every number of stages
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: u64,
    /// Print a line of JSON for each text: prompt, text, new tokens, and why it ended (end, stop or
    /// length)
    #[arg(long)]
    pub json: bool,
}

impl GenerateArguments {
    /// The arguments besides those of the run that must be the same in every process. Rank 0 alone
    /// reads the prompts.
    pub(crate) fn told(&self) -> Vec<(String, String)> {
        named([
            ("--batch", self.batch.to_string()),
            ("--tokens", given(&self.tokens)),
            ("--stop", format!("{:?}", self.stop)),
            ("--temperature", given(&self.temperature)),
            ("--top-k", given(&self.top_k)),
            ("--top-p", given(&self.top_p)),
            ("--min-p", given(&self.min_p)),
            ("--repetition-penalty", given(&self.repetition_penalty)),
            ("--seed", self.seed.to_string()),
        ])
    }
}

/// How translations are searched.
#[derive(Debug, Args)]
pub(crate) struct SearchArguments {
    /// Number of hypotheses kept per sentence; 1 always takes the most likely token
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub beam: usize,
    /// Length penalty: 0 prefers short translations, higher values longer ones
    #[arg(long, value_name = "ALPHA", default_value_t = 0.6)]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub length_penalty: f64,
}

impl SearchArguments {
    fn told(&self) -> Vec<(String, String)> {
        named([
            ("--beam", self.beam.to_string()),
            ("--length-penalty", self.length_penalty.to_string()),
        ])
    }
}

#[derive(Debug, Args)]
pub(crate) struct TranslateArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Language of the sentences, such as de or pt_BR; an unknown one is an error that lists the
    /// model's languages
    #[arg(long, value_name = "LANGUAGE")]
    pub from: String,
    #[command(flatten)]
    pub search: SearchArguments,
    /// Maximum number of lines to translate at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub batch: usize,
}

impl TranslateArguments {
    /// The arguments besides those of the run that must be the same in every process.
    pub(crate) fn told(&self) -> Vec<(String, String)> {
        let own = named([("--from", self.from.clone()), ("--batch", self.batch.to_string())]);
        [own, self.search.told()].concat()
    }
}
