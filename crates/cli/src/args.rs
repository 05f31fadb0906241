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
    /// Draw the loss, speed, bubble and memory of one or several runs as one SVG page
    Plot(PlotArguments),
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Stages K, each on a CPU device of its own (pipeline.stages)
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

#[derive(Debug, Args)]
pub(crate) struct PlotArguments {
    /// Folders of runs, with their metrics.jsonl; several are drawn over one another
    #[arg(value_name = "DIR", required = true)]
    pub runs: Vec<PathBuf>,
    /// The page to write [default: plot.svg in the first DIR]
    #[arg(long, value_name = "FILE.svg")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Args)]
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
