//! The command line. Flags are shorthands for configuration keys; they win over the file and over --set.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Pipeline-parallel training: the number of stages never changes the result.
#[derive(Debug, Parser)]
#[command(name = "gpipe", version, about, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the model that a configuration describes, then evaluate it on held-out text
    Train(TrainArguments),
    /// Train a few steps under every combination given, and compare every loss, gradient and parameter bit by
    /// bit
    Verify(VerifyArguments),
    /// Measure a trained model on held-out text: loss, perplexity, bits per byte, accuracy of the next
    /// token
    Eval(EvalArguments),
    /// Continue a text with a trained model, and print it as it is made
    ///
    /// Only the new text is printed. The model sees the last data.sequence tokens of what there is so far:
    /// of a longer text it forgets the beginning. Each token costs a forward of that whole length, for
    /// nothing is kept between tokens.
    Generate(GenerateArguments),
    /// Train a few steps and draw the timeline of one beside what the simulator makes of its costs: as text, and
    /// as Chrome trace JSON (chrome://tracing, ui.perfetto.dev)
    Trace(TraceArguments),
    /// Draw the loss, speed, bubble and memory of one or several runs as one SVG page
    Plot(PlotArguments),
}

/// What `train` and `trace` can change of the pipeline.
#[derive(Debug, Args)]
pub(crate) struct PipelineArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Stages K, each with a thread of its own (pipeline.stages)
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M")]
    pub micro_batches: Option<usize>,
    /// gpipe or 1f1b (pipeline.schedule)
    #[arg(long)]
    pub schedule: Option<String>,
    /// always, never, unless-adjacent or segments:N (pipeline.remat)
    #[arg(long)]
    pub remat: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Folder for the run's files; it must not hold another run; default: out/NAME of the
    /// config, numbered
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Numbers of stages to compare
    #[arg(long, value_name = "K,..", value_delimiter = ',', default_value = "1,2,3,4")]
    pub stages: Vec<usize>,
    /// Schedules to compare
    #[arg(long, value_delimiter = ',', default_value = "gpipe,1f1b")]
    pub schedule: Vec<String>,
    /// Re-materialization to compare [default: the configuration's]
    #[arg(long, value_delimiter = ',')]
    pub remat: Vec<String>,
    /// Micro-batches to compare [default: the configuration's]; between different M results differ by
    /// rounding, and verify says where
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    pub micro_batches: Vec<usize>,
}

/// A trained model: the folder of a run, or a configuration and weights.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The folder that `gpipe train` wrote: config.toml, tokenizer.json, weights.safetensors
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
    /// Where the stages run: one device for all, or one for each (pipeline.devices); default: as in training
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<String>,
    /// Dtype of the arithmetic (pipeline.dtype); default: as in training
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// Use the moving averages of the weights (averages.safetensors), if the run kept them
    #[arg(long, conflicts_with = "config")]
    pub averages: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Text to measure on, all of it: files or folders, UTF-8; without it, the text that the run held out
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// Measure on the first N tokens at most [default: train.validation_tokens; with --text all]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M")]
    pub micro_batches: Option<usize>,
    /// Print one line of JSON, with every digit
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// The text to continue; an empty one starts a new document. Without this and --prompt-file it is read
    /// from the standard input
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

#[derive(Debug, Args)]
pub(crate) struct TraceArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// The JSON file to write
    #[arg(long, value_name = "FILE.json", default_value = "trace.json")]
    pub out: PathBuf,
    /// Characters of a line of the drawing
    #[arg(long, value_name = "N", default_value_t = 120)]
    pub width: usize,
}

#[derive(Debug, Args)]
pub(crate) struct PlotArguments {
    /// Folders of runs, with their metrics.jsonl; several are drawn over one another
    #[arg(value_name = "DIR", required = true)]
    pub runs: Vec<PathBuf>,
    /// The page to write [default: plot.svg in the first DIR]
    #[arg(long, value_name = "FILE.svg")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Default, Args)]
pub(crate) struct ConfigArguments {
    /// The configuration file
    #[arg(value_name = "CONFIG.toml")]
    pub config: PathBuf,
    /// Override one key, such as model.blocks=4; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Layers per stage such as 3,5, or uniform, or cost (pipeline.balance)
    #[arg(long)]
    pub balance: Option<String>,
    /// CPU threads of each stage (pipeline.threads_per_stage)
    #[arg(long, value_name = "N")]
    pub threads_per_stage: Option<usize>,
    /// Dtype of the arithmetic: float32, float64, bfloat16 or float16 (pipeline.dtype)
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// Where the stages run: cpu, cuda or cuda:1 for all of them, or one for each, such as cuda:0,cuda:1,
    /// which also says how many stages there are (pipeline.devices)
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<String>,
    /// Most memory of a stage's tensors, such as 512MiB (pipeline.memory)
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Training steps (train.steps; verify: 3)
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Seed of everything random (seed)
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Text to train on: files or folders, UTF-8 (data.text); without it, the sources of
    /// this workspace's crates
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
}
