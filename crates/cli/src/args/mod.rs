//! The command line. Flags are shorthands for configuration keys. They take precedence over
//! `--set`, which takes precedence over the file.
//!
//! - [`config`]: arguments of all commands that read a configuration
//! - [`trained`]: arguments of the commands that use a trained model
//! - [`files`]: arguments of the commands that read and convert files
//! - here: all other arguments

mod config;
mod files;
mod trained;

use std::path::PathBuf;

use clap::{Arg, Args, Parser, Subcommand};
use gpipe::RematPolicies;

use crate::values::{Every, OnNan, ScheduleChoice, number, whole};

pub(crate) use self::config::ConfigArguments;
pub(crate) use self::files::{ExportArguments, ImportArguments, InspectArguments};
pub(crate) use self::trained::{
    EvalArguments, GenerateArguments, PredictArguments, RunArguments, SearchArguments,
    TranslateArguments,
};

/// Pipeline-parallel training: the number of stages never changes the result.
#[derive(Debug, Parser)]
#[command(name = "gpipe", version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the model that a configuration describes, then evaluate it on held-out data
    Train(TrainArguments),
    /// Train a few steps under every given combination and compare all losses, gradients and
    /// parameters bit by bit
    Verify(VerifyArguments),
    /// Run another gpipe command in several processes on this machine, each with its share of the
    /// stages
    ///
    /// If one process fails, all of them end. On several machines use torchrun instead, or set
    /// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process.
    Launch(LaunchArguments),
    /// Measure a trained model on held-out data
    ///
    /// A text model reports loss, perplexity, bits per byte and next-token accuracy. An image model
    /// reports loss, top-1 and top-5 accuracy, and the classes it confuses. For each language, a
    /// translation model reports its perplexity, the perplexity of a unigram model, its perplexity
    /// with shuffled sources, and BLEU and chrF of its translations.
    Eval(EvalArguments),
    /// Print the most likely classes of each image, with their probabilities
    Predict(PredictArguments),
    /// Continue texts with a trained model, or with a model's folder from Hugging Face
    ///
    /// Only the new text is printed: that of one prompt as it is made, those of several when they
    /// are ready. A transformer sees the last data.sequence tokens of the text so far, so it
    /// forgets the beginning of a longer text, and from there on each token costs a forward over
    /// that whole length. A model with rotary positions, such as a Llama, keeps keys and values of
    /// the whole text.
    Generate(GenerateArguments),
    /// Translate the lines of standard input into English, one line of output for each
    ///
    /// Translations are printed as lines arrive. An empty line stays empty. A sentence with more
    /// than data.length tokens is cut to that length, with a warning. A line that is not UTF-8 ends
    /// the command, after the lines before it are translated.
    Translate(TranslateArguments),
    /// Draw one training step, the measured timeline below the predicted one
    ///
    /// The step is drawn in the terminal, and on request as SVG, as an HTML page with zoom, or as
    /// Chrome trace JSON (chrome://tracing, ui.perfetto.dev).
    ///
    /// `gpipe trace RUN_DIR` draws the latest step that a run recorded in its folder (step.json,
    /// written after ten steps and at the end). `gpipe trace CONFIG.toml` trains a few steps, draws
    /// one of them and writes trace.json.
    Trace(TraceArguments),
    /// Measure the time and memory of each layer under real conditions, for `gpipe plan`
    ///
    /// The layers run on real data while all stages are at work.
    Profile(ProfileArguments),
    /// Train a few steps and show where their time goes: products, norms, copies, and so on
    ///
    /// Beside each kind of work is the least time that it would take on this machine: products at
    /// the speed of the largest of them alone, everything else at the speed of memory. Both are
    /// measured at the end.
    Ledger(LedgerArguments),
    /// Find the fastest way to run a model: cuts, micro-batches, schedule and re-materialization
    ///
    /// The plan predicts the time and memory of a step, and names what limits them and which
    /// alternatives were considered.
    Plan(PlanArguments),
    /// Print a schedule in the format that --schedule file:PATH reads
    ///
    /// Each device has one line of compute actions. Comments give the bubble and what each stage
    /// holds at most.
    Schedule(ScheduleArguments),
    /// Draw the loss, speed, bubble and memory of one or several runs as one SVG page
    Plot(PlotArguments),
    /// Show what a checkpoint, a run, a model's folder or a safetensors file holds, and verify its
    /// checksums
    ///
    /// Every file of a checkpoint is compared with its SHA-256. Every tensor of
    /// weights.safetensors, averages.safetensors and other files written by gpipe is compared with
    /// the digest in the file's metadata. A file from elsewhere has no digests, and the output says
    /// so. The other files of a run's folder are not checked.
    Inspect(InspectArguments),
    /// Write the parameters of a checkpoint or run to one safetensors file, named layer.parameter,
    /// or to a folder for Hugging Face's transformers
    Export(ExportArguments),
    /// Convert the weights of another program's safetensors file, such as a PyTorch state dict, or
    /// of a model's folder
    ///
    /// A folder with config.json needs neither --config nor --names.
    ///
    /// NAMES.toml maps tensors of the file to parameters. The first rule that
    /// matches a name wins:
    ///
    ///   prefix = "transformer."
    ///   reinit = ["*.scale"]
    ///
    ///   [[names]]
    ///   from = "h.*.attn.c_attn.weight"
    ///   to = "*.attention.qkv.weight"
    ///   transpose = true
    ///
    ///   [[names]]
    ///   from = "*.attn.bias"
    ///   ignore = true
    ///   optional = true
    ///
    ///   [[names]]
    ///   from = "lm_head.weight"
    ///   to = "head.weight"
    ///   copy_of = "wte.weight"
    ///
    /// A `*` matches any text. The n-th `*` of `to` stands for the text that the
    /// n-th `*` of `from` matched. `prefix` is removed from names that begin with
    /// it. Parameters that match `reinit` need not be in the file. `gpipe inspect`
    /// lists the names on either side.
    ///
    /// A rule that matches no tensor is an error, unless it is `optional`.
    /// `copy_of` names another tensor of the file. If the model has no parameter
    /// `to`, the matched tensor is left out. It must then equal the tensor that
    /// `copy_of` names, bit for bit. The number of attention heads is not visible
    /// in any shape, so it is compared with the config.json beside the file, if
    /// there is one.
    #[command(verbatim_doc_comment)] // its lines must fit a narrow terminal
    Import(ImportArguments),
}

/// Flags with which `train` and `trace` change the pipeline.
#[derive(Debug, Default, PartialEq, Args)]
pub(crate) struct PipelineArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Number of pipeline stages K, or of devices if the schedule puts several stages on each
    /// (pipeline.stages)
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Number of micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Option<usize>,
    /// Number of copies R of the whole pipeline, each training on its part of every mini-batch:
    /// threads of one process, or a multiple of R processes (pipeline.replicas)
    #[arg(long, value_name = "R", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub replicas: Option<usize>,
    /// Divide the optimizer state among the replicas: each stores and updates a part
    /// (pipeline.shard_optimizer)
    #[arg(long)]
    pub shard_optimizer: bool,
    /// Schedule: gpipe, 1f1b, zb-h1, zb-v, v-half, v-min, interleaved:V, interleaved-zb:V,
    /// breadth-first:V (V stages on each of K devices), file:PATH, or auto, an order made for
    /// measured costs (pipeline.schedule)
    #[arg(long)]
    pub schedule: Option<ScheduleChoice>,
    /// What to recompute: always, never, unless-adjacent, selective, keep:N, segments:N, or offload
    /// (move activations to a file and back instead); one policy for all stages, or one per stage
    /// such as keep:2,never (pipeline.remat)
    #[arg(long)]
    pub remat: Option<RematPolicies>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Run a plan written by `gpipe plan`, or make one (auto)
    ///
    /// auto plans for the configured stages (or --stages) and memory with the profile
    /// out/NAME.profile.json, where NAME is that of the configuration file, or of the folder of
    /// --from. If there is no profile, it is measured first.
    #[arg(
        long,
        value_name = "auto|FILE",
        conflicts_with_all = ["micro_batches", "schedule", "remat", "balance"]
    )]
    pub plan: Option<String>,
    /// Folder for the run's files, which must not hold another run [default: out/NAME, numbered]
    ///
    /// NAME is that of the configuration file, or of the folder of --from. With
    /// --resume, the default is the folder of the resumed run.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Resume from a checkpoint, or from the newest undamaged checkpoint of a run
    ///
    /// The run continues as if it had not been interrupted. CONFIG.toml may be omitted. auto
    /// resumes from the newest undamaged checkpoint in --out (or in the last out/NAME), or starts
    /// from the beginning if there is none. So one command both starts and restarts a run.
    #[arg(long, value_name = "auto|DIR")]
    pub resume: Option<String>,
    /// When to save checkpoints: every N steps, such as 50; after a time, such as 90s, 10min or 2h;
    /// or none (checkpoint.every)
    ///
    /// Except with none, a checkpoint is also saved at the end. A run that ends early saves one on
    /// Ctrl-C, on SIGTERM and, in a single process, on most errors.
    #[arg(long, value_name = "STEPS|TIME")]
    pub checkpoint_every: Option<Every>,
    /// Number of checkpoints to keep, the newest ones (checkpoint.keep)
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub keep: Option<usize>,
    /// Also keep the checkpoint with the lowest validation loss; needs train.validate_every
    /// (checkpoint.keep_best)
    #[arg(long)]
    pub keep_best: bool,
    /// What to do when a loss or gradient is not finite: stop the run, or skip that mini-batch
    /// (train.on_nan)
    #[arg(long, value_name = "stop|skip")]
    pub on_nan: Option<OnNan>,
    /// Start from the weights of a safetensors file, a run or a checkpoint
    ///
    /// With data.tokenizer = "auto", a model of text also takes over the tokenizer; for a file,
    /// that is the tokenizer.json beside it. Everything else starts anew: use --init to fine-tune,
    /// and --resume to continue a run. With --resume auto, the weights are used only if there is no
    /// checkpoint to resume from.
    #[arg(long, value_name = "FILE|DIR", conflicts_with = "from")]
    pub init: Option<PathBuf>,
    /// With --init: file that maps tensors to parameters (see `gpipe import --help`)
    #[arg(long, value_name = "NAMES.toml", requires = "init", conflicts_with = "from")]
    pub names: Option<PathBuf>,
    /// With --init: load the parameters that fit, report the others and start those from random
    /// values
    #[arg(long, requires = "init", conflicts_with = "from")]
    pub partial: bool,
    /// With --init: names of parameters that start from random values anyway; * matches any text
    ///
    /// The classifier and the auxiliary head of an image network start from random values without
    /// being named if the classes differ from those of the weights.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "init")]
    #[arg(conflicts_with = "from")]
    pub reinit: Vec<String>,
}

/// How many processes to start, and the command that they run.
#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    /// Number of processes; stages are divided among them in order, as evenly as possible
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub processes: usize,
    /// Restart all processes up to N times if one fails; training resumes from its last checkpoint
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = whole::<u32>, allow_negative_numbers = true)]
    pub restarts: u32,
    /// Do not prefix rank 0's standard output with its rank, so that it can be piped
    #[arg(long)]
    pub no_prefix: bool,
    /// Command to run, after --, such as: -- train configs/gpt.toml
    #[arg(value_name = "COMMAND", last = true, required = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Numbers of stages to compare
    #[arg(long, value_name = "K,..", value_delimiter = ',', default_value = "1,2,3,4")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Vec<usize>,
    /// Schedules to compare, separated by commas; interleaved:V creates V times as many stages, and
    /// zb-v twice as many
    #[arg(long, value_delimiter = ',', default_value = "gpipe,1f1b")]
    pub schedule: Vec<ScheduleChoice>,
    /// Re-materialization policies to compare, separated by commas, each for all stages [default:
    /// that of the configuration]
    #[arg(long, value_delimiter = ',')]
    pub remat: Vec<RematPolicies>,
    /// Numbers of micro-batches to compare [default: that of the configuration]; results for
    /// different M differ by rounding, and verify reports where
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Vec<usize>,
    /// Also test resuming: each combination but the first runs half of the steps under the settings
    /// of the previous one, saves, and resumes under its own
    #[arg(long)]
    pub resume: bool,
}

#[derive(Debug, Args)]
#[command(mut_arg("config", of_a_step))]
pub(crate) struct TraceArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Write an SVG drawing; without FILE, trace.svg in the run's folder if there is one
    #[arg(long, value_name = "FILE.svg", num_args = 0..=1)]
    pub svg: Option<Option<PathBuf>>,
    /// Write an HTML page with zoom and details under the pointer; without FILE, trace.html
    #[arg(long, value_name = "FILE.html", num_args = 0..=1)]
    pub html: Option<Option<PathBuf>>,
    /// Write a Chrome trace; without FILE, trace.json. With CONFIG.toml it is always written
    #[arg(long, value_name = "FILE.json", num_args = 0..=1)]
    pub chrome: Option<Option<PathBuf>>,
    /// Same as --chrome FILE.json
    #[arg(long, value_name = "FILE.json", conflicts_with = "chrome")]
    pub out: Option<PathBuf>,
    /// Width of the drawing, in characters [default: that of the terminal, or 120]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub width: Option<usize>,
}

/// What `gpipe trace` takes.
fn of_a_step(argument: Arg) -> Arg {
    argument.value_name("RUN_DIR|CONFIG.toml").help("Folder of a run, or a configuration file")
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

/// Arguments of `gpipe ledger`.
#[derive(Debug, Args)]
pub(crate) struct LedgerArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Also list the operations that take the most time, this many
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    pub operations: usize,
    /// Write all operations to a file
    #[arg(long, value_name = "FILE.json")]
    pub out: Option<PathBuf>,
}

/// Arguments of `gpipe profile`.
#[derive(Debug, Args)]
pub(crate) struct ProfileArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Number of stages at work while layers are measured (pipeline.stages)
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Numbers of micro-batches M per mini-batch to measure [default: 1, 2, 4 .. 32 and that of the
    /// configuration]
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Vec<usize>,
    /// Measure everything in N rounds of --steps steps each, so that on a shared machine all
    /// measurements see similar conditions
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub passes: usize,
    /// Profile to write [default: out/NAME.profile.json, with the NAME of the configuration file]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of `gpipe schedule`.
#[derive(Debug, Args)]
pub(crate) struct ScheduleArguments {
    /// Schedule: gpipe, 1f1b, zb-h1, zb-v, v-half, v-min, interleaved:V, interleaved-zb:V,
    /// breadth-first:V, or file:PATH, which is validated
    pub name: ScheduleChoice,
    /// Number of stages K, or of devices if the schedule puts several stages on each [default: that
    /// of the file]
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Number of micro-batches M [default: that of the file]
    #[arg(long, value_name = "M", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Option<usize>,
    /// Re-materialization policy; adds R actions to the lists
    #[arg(long, default_value = "never")]
    pub remat: RematPolicies,
    /// Also draw the timeline in characters, as comments
    #[arg(long)]
    pub draw: bool,
    /// Draw the timeline as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Write the schedule as torch.distributed.pipelining reads it, one row per device
    #[arg(long, value_name = "FILE.csv")]
    pub csv: Option<PathBuf>,
    /// With --svg: also draw the schedule NAME with the same K and M, below, on the same time axis
    #[arg(long, value_name = "NAME", requires = "svg")]
    pub beside: Vec<ScheduleChoice>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Number of devices N to plan for, which need not exist here; see --memory and --speed
    /// [default: pipeline.stages]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub devices: Option<usize>,
    /// Speed of the devices relative to the profiled one: one number for all devices, or one per
    /// device
    #[arg(long, value_name = "X,..", value_delimiter = ',')]
    #[arg(value_parser = number, allow_negative_numbers = true)]
    pub speed: Vec<f64>,
    /// Numbers of stages K to choose from, or of devices if the schedule puts several stages on
    /// each [default: the number of devices]
    #[arg(long, value_name = "K,..", value_delimiter = ',')]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Vec<usize>,
    /// Numbers of micro-batches M to choose from [default: that of the configuration, and the
    /// powers of two that the mini-batch can be divided into; with a profile, only an M whose
    /// micro-batch size was measured]
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Vec<usize>,
    /// Schedules to choose from [default: gpipe,1f1b]
    ///
    /// All named schedules are possible, but the search is exact only for these two. `auto` makes
    /// an order for the costs, and says how far it can be from the best one.
    #[arg(long, value_delimiter = ',')]
    pub schedule: Vec<ScheduleChoice>,
    /// Fix the re-materialization: one policy for all stages, or one per stage
    #[arg(long)]
    pub remat: Option<RematPolicies>,
    /// Profile to plan with [default: out/NAME.profile.json, or analytic costs if there is none]
    #[arg(long, value_name = "FILE", conflicts_with = "analytic")]
    pub profile: Option<PathBuf>,
    /// Plan with costs estimated from shapes, for devices of --flops and --bandwidth
    #[arg(long)]
    pub analytic: bool,
    /// Analytic costs: floating-point operations per second of a device [default: 1e11]
    #[arg(long, value_name = "FLOPS", value_parser = number, allow_negative_numbers = true)]
    pub flops: Option<f64>,
    /// Analytic costs: memory bandwidth of a device, in bytes per second [default: 2e10]
    #[arg(long, value_name = "BYTES", value_parser = number, allow_negative_numbers = true)]
    pub bandwidth: Option<f64>,
    /// Bandwidth of a link between two devices, in bytes per second [default: as profiled;
    /// analytic: unlimited]
    #[arg(long, value_name = "BYTES", value_parser = number, allow_negative_numbers = true)]
    pub link_bandwidth: Option<f64>,
    /// Latency of a message, in microseconds [default: as profiled; analytic: 0]
    #[arg(long, value_name = "US", value_parser = number, allow_negative_numbers = true)]
    pub link_latency: Option<f64>,
    /// Plan to write, for gpipe train --plan [default: out/NAME.plan.json]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Draw the planned step as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Draw the planned step as an HTML page, with details under the pointer
    #[arg(long, value_name = "FILE.html")]
    pub html: Option<PathBuf>,
}
