//! The `gpipe` command: the only room that reads the environment and prints. A library, so that
//! what it reads can be fuzzed.
//!
//! - [`args`]: the command line
//! - [`config`]: the configuration file and its overrides, one validated struct
//! - [`task`]: what is learned: data, network, measures; [`setup`]: from a configuration to a
//!   pipeline
//! - [`demand`]: what a run asks of the machine, held against what the [`machine`] has
//! - [`train`], [`verify`], [`eval`], [`generate`], [`translate`], [`predict`], [`trace`],
//!   [`plot`]: the commands
//! - [`profile`], [`plan`] and its [`plan_file`]: what layers cost, and how to run them
//! - [`schedule`]: schedules by name or from a file, and printed
//! - [`processes`]: a command in several of them, and [`processes::launch`], which starts them
//! - [`inspect`], [`interchange`] (export and import), [`init`] (from weights): what is on disk
//! - [`facts`]: what shapes do not show of a model, and who says it
//! - [`run_folder`]: a trained model, as `train` wrote it
//! - [`sampling`]: which token comes next; [`utf8_stream`]: text from tokens that end within
//!   characters
//! - [`progress`], [`metrics`], [`summary`]: what a run shows and writes; [`output`]: lines;
//!   [`files`]: whole or not at all
//! - [`faults`]: what tests ask for by the environment

mod args;
mod config;
mod demand;
mod eval;
mod facts;
#[cfg_attr(not(feature = "fault-injection"), path = "no_faults.rs")]
mod faults;
mod files;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generate;
mod init;
mod inspect;
mod interchange;
mod machine;
mod metrics;
mod output;
mod plan;
mod plan_file;
mod plot;
mod predict;
mod processes;
mod profile;
mod progress;
mod run_folder;
mod sampling;
mod schedule;
mod setup;
mod summary;
mod task;
mod trace;
mod train;
mod translate;
mod utf8_stream;
mod values;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use crate::{output::complain, processes::environment::Environment};

/// What ends a command: its message is for the user.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Data(#[from] gpipe_data::Error),
    #[error(transparent)]
    Model(#[from] gpipe_models::TransformerError),
    #[error(transparent)]
    Translation(#[from] gpipe_models::TranslationError),
    #[error(transparent)]
    ImageModel(#[from] gpipe_models::ImageError),
    #[error(transparent)]
    Pipeline(#[from] gpipe::Error),
    #[error(transparent)]
    Plan(#[from] gpipe_core::plan::PlanError),
    #[error(transparent)]
    Weights(#[from] gpipe_checkpoint::weights::WeightsError),
    #[error(transparent)]
    Checkpoint(#[from] gpipe_checkpoint::CheckpointError),
    #[error(transparent)]
    Names(#[from] gpipe_checkpoint::names::NamesError),
    #[error(transparent)]
    RunFolder(#[from] run_folder::RunFolderError),
    #[error(transparent)]
    Score(#[from] gpipe_score::Error),
    #[error(transparent)]
    Sampling(#[from] sampling::SamplingError),
    #[error(transparent)]
    Join(#[from] gpipe_distributed::JoinError),
    /// Another process's error, or one of what is between them.
    #[error(transparent)]
    Peer(#[from] gpipe::processes::PeerError),
    /// Of those that were launched.
    #[error(transparent)]
    Launch(#[from] processes::launch::LaunchError),
    #[error(transparent)]
    Metrics(#[from] gpipe_observe::metrics::FileError),
    #[error(transparent)]
    Events(#[from] gpipe_observe::tensorboard::EventError),
    #[error(transparent)]
    Plot(#[from] gpipe_observe::plot::PlotError),
    #[error(transparent)]
    StepFile(#[from] gpipe_observe::step_file::StepFileError),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// A mini-batch that is no number, where that is to stop the run.
    #[error("step {step}: {source}. To leave such mini-batches out: --on-nan skip")]
    Nan { step: u64, source: gpipe::Error },
    /// That is no accident.
    #[error(
        "{count} mini-batches in a row are not finite, which is no accident; the last: {source}"
    )]
    NanInARow { count: u64, source: gpipe::Error },
    /// The user or the system asked the run to stop.
    #[error("stopped by {signal_name} after step {step}")]
    Interrupted { signal: i32, signal_name: String, step: u64 },
    /// The folder of the run is not there any more, or another one is.
    #[error(
        "{}: the run's folder {became} while the run was training: what was not saved before is \
        lost{rest}",
        folder.display()
    )]
    FolderGone { folder: std::path::PathBuf, became: String, rest: String },
    /// Every image is left out.
    #[error("there is nothing to measure on: nothing that is held out can be read; check the data")]
    NothingMeasured,
    /// `verify` found a difference; it has already been printed.
    #[error("results differ")]
    Differs,
}

impl From<tch::TchError> for CliError {
    fn from(error: tch::TchError) -> Self {
        CliError::Pipeline(error.into())
    }
}

impl CliError {
    /// Whether every process of a command has come to it, at the same place: they can still do
    /// something together.
    fn is_of_all(&self) -> bool {
        matches!(
            self,
            Self::Nan { .. } | Self::NanInARow { .. } | Self::Interrupted { .. } | Self::Differs
        )
    }

    /// 128 and the signal's number after a signal, as shells have it; of what was launched, its
    /// own; 1 after an error.
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Launch(error) => error.exit_code().into(),
            Self::Interrupted { signal, .. } => {
                u8::try_from(128 + signal).map_or(ExitCode::FAILURE, ExitCode::from)
            }
            _ => ExitCode::FAILURE,
        }
    }
}

/// The command, with the arguments and the environment of this process.
pub fn main() -> ExitCode {
    gpipe::keep_freed_memory();
    files::limits_are_errors();
    processes::launch::end_with_launcher();
    match Environment::read().and_then(|here| run(args::Arguments::parse().command, here.as_ref()))
    {
        Ok(()) => match output::lost() {
            None => ExitCode::SUCCESS,
            Some(error) => {
                complain!("gpipe: not everything was printed: the standard output: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            output::last_words(format_args!("gpipe: {error}"));
            error.exit_code()
        }
    }
}

/// Runs a command in the process that `here` says; in the only one where it says nothing.
fn run(command: args::Command, here: Option<&Environment>) -> Result<(), CliError> {
    use args::Command;
    match command {
        Command::Launch(arguments) => processes::launch::run(&arguments),
        Command::Train(arguments) => train::run(&arguments, here),
        Command::Verify(arguments) => verify::run(&arguments, here),
        Command::Eval(arguments) => eval::run(&arguments, here),
        Command::Generate(arguments) => generate::run(&arguments, here),
        Command::Predict(arguments) => predict::run(&arguments, here),
        Command::Translate(arguments) => translate::run(&arguments, here),
        Command::Trace(arguments) => trace::run(&arguments, here),
        Command::Profile(arguments) => profile::run(&arguments, here),
        // One process is enough for what follows.
        _ if here.is_some_and(|here| here.rank > 0) => Ok(()),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Schedule(arguments) => schedule::run(&arguments),
        Command::Plot(arguments) => plot::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Export(arguments) => interchange::export(&arguments),
        Command::Import(arguments) => interchange::import(&arguments),
    }
}
