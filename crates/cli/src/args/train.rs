//! Arguments of the commands that train, and that start processes.

use std::path::PathBuf;

use clap::Args;

use super::{
    PipelineArguments, PlanChoice,
    config::{CHECKPOINTS, Typed, WEIGHTS, typed},
};
use crate::values::{Every, OnNan, whole};

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    #[command(flatten)]
    pub plan: PlanChoice,
    /// Folder for the run's files, which must not hold another run [default: out/NAME, numbered]
    ///
    /// NAME is that of the configuration file, or of the folder of --from. With
    /// --resume, the default is the folder of the resumed run.
    #[arg(long, display_order = 4, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Resume from a checkpoint, or from the newest undamaged checkpoint of a run
    ///
    /// The run continues as if it had not been interrupted. CONFIG.toml may be omitted. auto
    /// resumes from the newest undamaged checkpoint in --out (or in the last out/NAME), or starts
    /// from the beginning if there is none. So one command both starts and restarts a run.
    #[arg(long, help_heading = CHECKPOINTS, value_name = "auto|DIR")]
    pub resume: Option<String>,
    /// When to save checkpoints: every N steps, such as 50; after a time, such as 90s, 10min or 2h;
    /// or none (checkpoint.every)
    ///
    /// Except with none, a checkpoint is also saved at the end. A run that ends early saves one on
    /// Ctrl-C, on SIGTERM, if its terminal closes and, in a single process, on most errors.
    #[arg(long, help_heading = CHECKPOINTS, value_name = "STEPS|TIME")]
    pub checkpoint_every: Option<Every>,
    /// Number of checkpoints to keep, the newest ones (checkpoint.keep)
    #[arg(long, help_heading = CHECKPOINTS, value_name = "N")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub keep: Option<usize>,
    /// Also keep the checkpoint with the lowest validation loss; needs train.validate_every
    /// (checkpoint.keep_best)
    #[arg(long, help_heading = CHECKPOINTS)]
    pub keep_best: bool,
    /// What to do when a loss or gradient is not finite: stop the run, or skip that mini-batch
    /// (train.on_nan)
    #[arg(long, value_name = "stop|skip")]
    pub on_nan: Option<OnNan>,
    /// Print a line about the loss every N steps; 0 prints about a dozen lines (train.log_every)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub log_every: Option<u64>,
    /// Start from the weights of a safetensors file, a run or a checkpoint
    ///
    /// With data.tokenizer = "auto", a model of text also takes over the tokenizer; for a file,
    /// that is the tokenizer.json beside it. Everything else starts anew: use --init to fine-tune,
    /// and --resume to continue a run. With --resume auto, the weights are used only if there is no
    /// checkpoint to resume from.
    #[arg(long, help_heading = WEIGHTS, value_name = "FILE|DIR", conflicts_with = "from")]
    pub init: Option<PathBuf>,
    /// With --init: file that maps tensors to parameters (see `gpipe import --help`)
    #[arg(long, help_heading = WEIGHTS, value_name = "NAMES.toml")]
    #[arg(requires = "init", conflicts_with = "from")]
    pub names: Option<PathBuf>,
    /// With --init: load the parameters that fit, report the others and start those from random
    /// values
    #[arg(long, help_heading = WEIGHTS, requires = "init", conflicts_with = "from")]
    pub partial: bool,
    /// With --init: names of parameters that start from random values anyway; * matches any text
    ///
    /// The classifier and the auxiliary head of an image network start from random values without
    /// being named if the classes differ from those of the weights.
    #[arg(long, help_heading = WEIGHTS, value_name = "NAME,..")]
    #[arg(value_delimiter = ',', requires = "init")]
    #[arg(conflicts_with = "from")]
    pub reinit: Vec<String>,
}

impl TrainArguments {
    /// The keys that were typed, as [`super::ConfigArguments::typed`].
    pub(crate) fn typed(&self) -> Vec<Typed> {
        let keep_best = ("checkpoint.keep_best".to_owned(), "--keep-best".to_owned());
        let flags = [
            typed("checkpoint.every", "--checkpoint-every", &self.checkpoint_every),
            typed("checkpoint.keep", "--keep", &self.keep),
            self.keep_best.then_some(keep_best),
            typed("train.on_nan", "--on-nan", &self.on_nan),
            typed("train.log_every", "--log-every", &self.log_every),
        ];
        flags.into_iter().flatten().chain(self.pipeline.typed()).collect()
    }
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
    /// Command to run with its flags, such as: train configs/gpt.toml
    #[arg(value_name = "COMMAND", trailing_var_arg = true, required = true)]
    pub command: Vec<String>,
}
