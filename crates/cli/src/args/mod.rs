//! The command line. Flags are shorthands for configuration keys; they win over the file and over
//! --set.
//!
//! - [`trained`]: what commands are given that use a trained model
//! - here: the others

mod trained;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use gpipe::{Balance, RematPolicies};

use crate::values::{Caps, Devices, Dtype, Every, OnNan, ScheduleChoice};

pub(crate) use self::trained::{
    EvalArguments, GenerateArguments, PredictArguments, RunArguments, SearchArguments,
    TranslateArguments,
};

/// Pipeline-parallel training: the number of stages never changes the result.
#[derive(Debug, Parser)]
#[command(name = "gpipe", version, about, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the model that a configuration describes, then evaluate it on held-out data
    Train(TrainArguments),
    /// Train a few steps under every combination given, and compare every loss, gradient and
    /// parameter bit by bit
    Verify(VerifyArguments),
    /// Run another command in several processes of this machine, each with its share of the stages;
    /// all end when one fails
    ///
    /// torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand, do the same on several
    /// machines.
    Launch(LaunchArguments),
    /// Measure a trained model on held-out data. Of text: loss, perplexity, bits per byte, accuracy
    /// of the next token. Of images: loss, top-1 and top-5 accuracy, and which classes are taken
    /// for which
    Eval(EvalArguments),
    /// Say what is on images: the likeliest classes of each, with their probabilities
    Predict(PredictArguments),
    /// Continue a text with a trained model, and print it as it is made
    ///
    /// Only the new text is printed. The model sees the last data.sequence tokens of what there is
    /// so far: of a longer text it forgets the beginning. Each token costs a forward of that whole
    /// length, for nothing is kept between tokens.
    Generate(GenerateArguments),
    /// Translate sentences into English, a line for each line, as they come
    ///
    /// An empty line stays empty. A sentence of more than data.length tokens is translated up to
    /// there, with a warning. A line that is not UTF-8 ends it, after the lines before.
    Translate(TranslateArguments),
    /// Draw one step, measured below predicted, in the terminal, as a picture (SVG, or HTML to zoom
    /// in) or as Chrome trace JSON (chrome://tracing, ui.perfetto.dev)
    ///
    /// `gpipe trace RUN_DIR` draws the latest step that a run left in its folder (step.json: after
    /// ten steps, and at its end). `gpipe trace CONFIG.toml` trains a few steps and draws one, and
    /// writes trace.json.
    Trace(TraceArguments),
    /// Measure what each layer takes and holds where it really runs: real data, all stages at work.
    /// For `gpipe plan`
    Profile(ProfileArguments),
    /// Say how to run a model before running it: where to cut, how many micro-batches, which
    /// schedule, what to re-materialize; what a step will take and hold, what limits it, and what
    /// else was considered
    Plan(PlanArguments),
    /// Print a schedule in the form that --schedule file:PATH reads: one line of compute actions
    /// for each device, with its bubble and what it holds as comments
    Schedule(ScheduleArguments),
    /// Draw the loss, speed, bubble and memory of one or several runs as one SVG page
    Plot(PlotArguments),
    /// Say what a checkpoint, a run or a safetensors file holds, and whether it is as it was
    /// written
    ///
    /// Every file of a checkpoint is compared with its SHA-256, and every tensor of
    /// weights.safetensors, averages.safetensors and other files of gpipe's own with the digest in
    /// their metadata. A file from elsewhere has no digests, which is said. The other files of a
    /// run's folder are not checked.
    Inspect(InspectArguments),
    /// Write the parameters of a checkpoint or run to one safetensors file, named layer.parameter
    Export(ExportArguments),
    /// Make weights of a safetensors file from elsewhere, such as a PyTorch state dict
    ///
    /// NAMES.toml lists which tensor of the file becomes which parameter; the first rule that
    /// matches a name holds:
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
    /// A `*` stands for any text; the n-th of `to` is what the n-th of `from` stood for. The prefix
    /// is taken off names that begin with it; parameters that match `reinit` need not be in the
    /// file. `gpipe inspect` lists the names on either side.
    ///
    /// A rule that matches no tensor is an error, unless it is `optional`. With `copy_of` a tensor
    /// is left out where the model has no parameter `to`, and must then equal the other tensor to
    /// the bit. No shape shows the number of attention heads: it is compared with the config.json
    /// beside the file, if there is one.
    #[command(verbatim_doc_comment)]
    Import(ImportArguments),
}

/// What `train` and `trace` can change of the pipeline.
#[derive(Debug, Default, PartialEq, Args)]
pub(crate) struct PipelineArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Stages K, each with a thread of its own (pipeline.stages)
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, value_name = "M")]
    pub micro_batches: Option<usize>,
    /// Replicas R of the whole pipeline, each on its part of every mini-batch; they need R times as
    /// many processes (pipeline.replicas)
    #[arg(long, value_name = "R")]
    pub replicas: Option<usize>,
    /// gpipe, 1f1b, interleaved:V (V stages on each of K devices), zb-h1, or file:PATH
    /// (pipeline.schedule)
    #[arg(long)]
    pub schedule: Option<ScheduleChoice>,
    /// always, never, unless-adjacent, selective, keep:N or segments:N: one for all stages, or one
    /// for each, such as keep:2,never (pipeline.remat)
    #[arg(long)]
    pub remat: Option<RematPolicies>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Run a plan of `gpipe plan`; or auto: plan with the profile out/NAME.profile.json, which is
    /// measured first if there is none, for the configured stages and memory
    #[arg(long, value_name = "auto|FILE", conflicts_with_all = ["stages", "micro_batches", "schedule", "remat", "balance"])]
    pub plan: Option<String>,
    /// Folder for the run's files; it must not hold another run; default: out/NAME of the
    /// config, numbered; with --resume that of the run which goes on
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on from a checkpoint, as if nothing had happened: the one named, or the newest complete
    /// one of the run named; CONFIG.toml may be left out. Or auto: from the newest complete one in
    /// --out (or in the last out/NAME), and from the beginning if there is none, so that one
    /// command starts a run and restarts it
    #[arg(long, value_name = "auto|DIR")]
    pub resume: Option<String>,
    /// Save a checkpoint after so many steps (50), or so much time (10min, 90s, 2h), or none; one
    /// at the end (not with none) and one on Ctrl-C, SIGTERM or an error besides (checkpoint.every)
    #[arg(long, value_name = "STEPS|TIME")]
    pub checkpoint_every: Option<Every>,
    /// Checkpoints that are kept: the newest N (checkpoint.keep)
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Keep the one of the lowest validation loss besides (checkpoint.keep_best; it needs
    /// train.validate_every)
    #[arg(long)]
    pub keep_best: bool,
    /// What a loss or gradient that is not a number does: stop the run, or skip that mini-batch
    /// (train.on_nan)
    #[arg(long, value_name = "stop|skip")]
    pub on_nan: Option<OnNan>,
    /// Start from these weights, and not from random ones: a safetensors file, a run or a
    /// checkpoint. A text model's tokenizer (a file's: the tokenizer.json beside it) is used, too.
    /// Everything else starts anew: this is for fine-tuning, --resume is for going on; with
    /// --resume auto they are used where there is nothing to go on from
    #[arg(long, value_name = "FILE|DIR")]
    pub init: Option<PathBuf>,
    /// With --init: which tensor of the file is which parameter (see `gpipe import --help`)
    #[arg(long, value_name = "NAMES.toml", requires = "init")]
    pub names: Option<PathBuf>,
    /// With --init: load what fits, and say what does not, which starts from random values
    #[arg(long, requires = "init")]
    pub partial: bool,
    /// With --init: parameters that start from random values all the same, by name, in which * is
    /// any text. The softmax of an image network whose classes are others is one of these without
    /// being named
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "init")]
    pub reinit: Vec<String>,
}

/// How many processes, and what they run.
#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    /// Processes; stages are shared out among them in order, as evenly as can be
    #[arg(long, value_name = "N")]
    pub processes: usize,
    /// When one has failed, start all of them again, up to N times; a training goes on from its
    /// last checkpoint
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub restarts: u32,
    /// Leave rank 0's standard output as it is, for a pipe; otherwise every line begins with its
    /// rank
    #[arg(long)]
    pub no_prefix: bool,
    /// The command, after --, such as: -- train configs/gpt.toml
    #[arg(value_name = "COMMAND", last = true, required = true)]
    pub command: Vec<String>,
}

/// A checkpoint, a run or a safetensors file.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A checkpoint's folder, a run's folder, a folder of checkpoints, or a safetensors file
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Print one JSON object; of a run one for each checkpoint and each file of weights, a line
    /// each
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A checkpoint's folder, or a run's: its weights if it has ended, else its newest complete
    /// checkpoint
    #[arg(value_name = "DIR")]
    pub from: PathBuf,
    /// The safetensors file to write
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
    /// float32, bfloat16, float16 or float64 [default: as they are]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// The moving averages of the weights, and not the weights
    #[arg(long)]
    pub averages: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// The safetensors file to read
    #[arg(value_name = "FILE.safetensors")]
    pub from: PathBuf,
    /// The configuration of the model that it is for
    #[arg(long, value_name = "CONFIG.toml")]
    pub config: PathBuf,
    /// Override one key of the configuration; may be given several times. model.vocabulary must be
    /// the exact size, but for the configuration of a run
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Which tensor of the file is which parameter; without it, names must be gpipe's own
    #[arg(long, value_name = "NAMES.toml")]
    pub names: Option<PathBuf>,
    /// Write what fits, though some parameters are missing
    #[arg(long)]
    pub partial: bool,
    /// The weights to write, for `gpipe train --init` and `gpipe eval --weights`
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Numbers of stages to compare
    #[arg(long, value_name = "K,..", value_delimiter = ',', default_value = "1,2,3,4")]
    pub stages: Vec<usize>,
    /// Schedules to compare; interleaved:V makes V times as many stages
    #[arg(long, value_delimiter = ',', default_value = "gpipe,1f1b")]
    pub schedule: Vec<ScheduleChoice>,
    /// Re-materialization to compare [default: the configuration's]
    #[arg(long, value_delimiter = ',')]
    pub remat: Vec<RematPolicies>,
    /// Micro-batches to compare [default: the configuration's]; between different M results differ
    /// by rounding, and verify says where
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    pub micro_batches: Vec<usize>,
    /// Begin each combination but the first as the one before it, save a checkpoint after half of
    /// the steps, and resume from its files
    #[arg(long)]
    pub resume: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Write a picture; without a name trace.svg, in the run's folder if there is one
    #[arg(long, value_name = "FILE.svg", num_args = 0..=1)]
    pub svg: Option<Option<PathBuf>>,
    /// Write a page in which one can zoom, and which says what is under the pointer; without a name
    /// trace.html
    #[arg(long, value_name = "FILE.html", num_args = 0..=1)]
    pub html: Option<Option<PathBuf>>,
    /// Write a Chrome trace; without a name trace.json. With CONFIG.toml it is always written
    #[arg(long, value_name = "FILE.json", num_args = 0..=1)]
    pub chrome: Option<Option<PathBuf>>,
    /// The same as --chrome FILE.json
    #[arg(long, value_name = "FILE.json", conflicts_with = "chrome")]
    pub out: Option<PathBuf>,
    /// Characters of a line of the drawing [default: the terminal's, or 120]
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
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

#[derive(Debug, Default, Clone, PartialEq, Args)]
pub(crate) struct ConfigArguments {
    /// The configuration file
    #[arg(value_name = "CONFIG.toml")]
    pub config: Option<PathBuf>,
    /// Override one key, such as model.blocks=4; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Layers per stage such as 3,5, or uniform, or cost (pipeline.balance)
    #[arg(long)]
    pub balance: Option<Balance>,
    /// CPU threads of each stage (pipeline.threads_per_stage)
    #[arg(long, value_name = "N")]
    pub threads_per_stage: Option<usize>,
    /// Dtype of the arithmetic: float32, float64, bfloat16 or float16 (pipeline.dtype)
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Where the stages run: cpu, cuda or cuda:1 for all of them, or one for each, such as
    /// cuda:0,cuda:1, which also says how many stages there are (pipeline.devices)
    #[arg(long, value_name = "DEVICE,..")]
    pub device: Option<Devices>,
    /// Most memory of a stage's tensors, such as 512MiB: one for all stages, or one for each, such
    /// as 1GiB,512MiB (pipeline.memory)
    #[arg(long, value_name = "BYTES,..")]
    pub memory: Option<Caps>,
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

/// What a profile and a plan are of, and where the profile is kept.
#[derive(Debug, Args)]
pub(crate) struct ProfileArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Stages that work at the same time while layers are measured (pipeline.stages)
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Micro-batches M per mini-batch for which to measure [default: the configuration's, and 1, 2,
    /// 4 .. 32]
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    pub micro_batches: Vec<usize>,
    /// Measure everything N times, one thing after the other, each time --steps steps: on a machine
    /// that others disturb, what is compared is then of the same moments
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub passes: usize,
    /// The file to write [default: out/NAME.profile.json, NAME of the configuration's file]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// What a plan may use, and what it is made from.
#[derive(Debug, Args)]
pub(crate) struct ScheduleArguments {
    /// gpipe, 1f1b, interleaved:V, zb-h1, or file:PATH, which is then checked
    pub name: ScheduleChoice,
    /// Stages K, or devices where the schedule puts several stages on each [default: the file's]
    #[arg(long, value_name = "K")]
    pub stages: Option<usize>,
    /// Micro-batches M [default: the file's]
    #[arg(long, value_name = "M")]
    pub micro_batches: Option<usize>,
    /// What is discarded and recomputed: adds R to the lists
    #[arg(long, default_value = "never")]
    pub remat: RematPolicies,
    /// Draw it in characters, too, as comments
    #[arg(long)]
    pub draw: bool,
    /// Draw it
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Devices N to plan for, which need not be here; --memory says what each has, --speed how fast
    /// it is [default: pipeline.stages]
    #[arg(long, value_name = "N")]
    pub devices: Option<usize>,
    /// How many times as fast as the one that was profiled each device is: one number for all, or
    /// one for each
    #[arg(long, value_name = "X,..", value_delimiter = ',')]
    pub speed: Vec<f64>,
    /// Numbers of stages K to choose from; stage k is on device k [default: as many as devices]
    #[arg(long, value_name = "K,..", value_delimiter = ',')]
    pub stages: Vec<usize>,
    /// Numbers of micro-batches M to choose from [default: the powers of two that the mini-batch
    /// can be cut into, and the configuration's]
    #[arg(long, value_name = "M,..", value_delimiter = ',')]
    pub micro_batches: Vec<usize>,
    /// Schedules to choose from; beside gpipe and 1f1b also interleaved:V, with K devices, and
    /// zb-h1, for which the search is not exact [default: gpipe,1f1b]
    #[arg(long, value_delimiter = ',')]
    pub schedule: Vec<ScheduleChoice>,
    /// Leaves no choice of what to re-materialize: one policy for all stages, or one for each
    #[arg(long)]
    pub remat: Option<RematPolicies>,
    /// The profile to plan with [default: out/NAME.profile.json, or analytic costs if there is
    /// none]
    #[arg(long, value_name = "FILE", conflicts_with = "analytic")]
    pub profile: Option<PathBuf>,
    /// Plan with costs from shapes alone, for devices of --flops and --bandwidth
    #[arg(long)]
    pub analytic: bool,
    /// Analytic costs: floating-point operations per second of a device [default: 1e11]
    #[arg(long, value_name = "FLOPS")]
    pub flops: Option<f64>,
    /// Analytic costs: bytes per second of a device's memory [default: 2e10]
    #[arg(long, value_name = "BYTES")]
    pub bandwidth: Option<f64>,
    /// Bytes per second of a link between two devices [default: as profiled; analytic: no limit]
    #[arg(long, value_name = "BYTES")]
    pub link_bandwidth: Option<f64>,
    /// Microseconds that a message takes besides [default: as profiled; analytic: 0]
    #[arg(long, value_name = "US")]
    pub link_latency: Option<f64>,
    /// The plan to write, for gpipe train --plan [default: out/NAME.plan.json]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Draw the planned step
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Draw it as a page, with what is under the pointer in words
    #[arg(long, value_name = "FILE.html")]
    pub html: Option<PathBuf>,
}
