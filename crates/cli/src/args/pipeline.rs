//! Arguments of the commands that run, measure and plan a pipeline.

use std::path::PathBuf;

use clap::{Arg, Args};
use gpipe::RematPolicies;

use super::config::{ConfigArguments, PIPELINE, Typed, typed};
use crate::values::{ScheduleChoice, number, whole};

/// Flags with which `train`, `trace` and `ledger` change the pipeline.
#[derive(Debug, Default, Clone, PartialEq, Args)]
pub(crate) struct PipelineArguments {
    #[command(flatten)]
    pub config: ConfigArguments,
    /// Number of pipeline stages K, or of devices if the schedule puts several stages on each
    /// (pipeline.stages)
    #[arg(long, help_heading = PIPELINE, value_name = "K")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub stages: Option<usize>,
    /// Number of micro-batches M per mini-batch (pipeline.micro_batches)
    #[arg(long, help_heading = PIPELINE, value_name = "M")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub micro_batches: Option<usize>,
    /// Number of copies R of the whole pipeline, each training on its part of every mini-batch:
    /// threads of one process, or a multiple of R processes (pipeline.replicas)
    #[arg(long, help_heading = PIPELINE, value_name = "R")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub replicas: Option<usize>,
    /// Divide the optimizer state among the replicas: each stores and updates a part
    /// (pipeline.shard_optimizer)
    #[arg(long, help_heading = PIPELINE)]
    pub shard_optimizer: bool,
    /// Schedule: gpipe, 1f1b, zb-h1, zb-v, v-half, v-min, interleaved:V, interleaved-zb:V,
    /// breadth-first:V (V stages on each of K devices), file:PATH, or auto, an order made for
    /// measured costs (pipeline.schedule)
    #[arg(long, help_heading = PIPELINE)]
    pub schedule: Option<ScheduleChoice>,
    /// What to recompute: always, never, unless-adjacent, selective, keep:N, segments:N, or offload
    /// (move activations to a file and back instead); one policy for all stages, or one per stage
    /// such as keep:2,never (pipeline.remat)
    #[arg(long, help_heading = PIPELINE)]
    pub remat: Option<RematPolicies>,
}

impl PipelineArguments {
    /// The keys that were typed, as [`ConfigArguments::typed`].
    pub(crate) fn typed(&self) -> Vec<Typed> {
        let flags = [
            typed("pipeline.stages", "--stages", &self.stages),
            typed("pipeline.micro_batches", "--micro-batches", &self.micro_batches),
            typed("pipeline.replicas", "--replicas", &self.replicas),
            typed("pipeline.schedule", "--schedule", &self.schedule),
            typed("pipeline.remat", "--remat", &self.remat),
        ];
        flags.into_iter().flatten().chain(self.config.typed()).collect()
    }
}

/// The plan that `train`, `trace` and `ledger` follow.
#[derive(Debug, Args)]
pub(crate) struct PlanChoice {
    /// Run a plan written by `gpipe plan`, or make one (auto)
    ///
    /// auto plans for the configured devices (or --stages of them). It may use fewer stages with
    /// several threads each and, in train, replicas. The profile is out/NAME.profile.json, with the
    /// NAME of the configuration file or of the folder of --from. If there is none with sizes of
    /// this mini-batch's micro-batches, it is measured first.
    #[arg(
        long = "plan", help_heading = PIPELINE,
        value_name = "auto|FILE",
        conflicts_with_all = ["micro_batches", "schedule", "remat", "balance"]
    )]
    pub origin: Option<String>,
}

#[derive(Debug, Args)]
#[command(mut_arg("device", of_all_stages))]
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
    #[command(flatten)]
    pub plan: PlanChoice,
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

/// The arguments of a configuration that a ledger can use.
fn of_a_ledger(argument: Arg) -> Arg {
    match argument.get_id().as_str() {
        "device" => argument
            .value_name("cpu")
            .help("Devices of the stages, which are CPUs (pipeline.devices)"),
        "replicas" | "shard_optimizer" => argument.hide(true),
        _ => argument,
    }
}

/// The device of `gpipe verify`.
fn of_all_stages(argument: Arg) -> Arg {
    argument
        .value_name("DEVICE")
        .help("Device of all stages: cpu, cuda or cuda:1 (pipeline.devices)")
}

/// What `gpipe trace` takes.
fn of_a_step(argument: Arg) -> Arg {
    argument.value_name("RUN_DIR|CONFIG.toml").help("Folder of a run, or a configuration file")
}

/// Arguments of `gpipe ledger`.
#[derive(Debug, Args)]
#[command(mut_args(of_a_ledger))]
pub(crate) struct LedgerArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub plan: PlanChoice,
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
    /// Profile to write [default: out/NAME.profile.json, with the NAME of the configuration file;
    /// if N threads per stage are more than 1, out/NAME.threads-N.profile.json]
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
