//! The `gpipe` command: the only crate that reads the environment and prints. It is a library, so
//! that its readers can be fuzzed.
//!
//! - [`args`]: the command line
//! - [`config`]: the configuration file and its overrides, as one validated struct
//! - [`task`]: what is learned: data, network, metrics; [`setup`]: from a configuration to a
//!   pipeline
//! - [`demand`]: checks a run's threads and memory against what the [`machine`] has
//! - [`train`], [`verify`], [`eval`], [`generate`], [`translate`], [`predict`], [`trace`],
//!   [`plot`]: the commands
//! - [`ledger`]: where the time of a step goes
//! - [`profile`], [`plan`] and its [`plan_file`]: what layers cost, and how to run them
//! - [`schedule`]: prints schedules, built-in or from a file
//! - [`processes`]: a command in several processes; [`processes::launch`] starts them
//! - [`inspect`], [`export`], [`import`], [`initial_weights`]: files on disk
//! - [`init`]: a configuration for data
//! - [`facts`]: properties of a model that shapes do not show
//! - [`run_folder`]: a trained model, as `train` wrote it
//! - [`model_folder`]: a folder of Hugging Face's transformers
//! - [`progress`], [`metrics`], [`summary`]: what a run shows and records
//! - [`numbers`]: numbers and times as people write them
//! - [`output`]: lines for the user; [`files`]: small files, written whole or not at all
//! - [`faults`]: faults that tests inject through the environment

mod args;
mod config;
mod demand;
mod eval;
mod export;
mod facts;
#[cfg_attr(not(feature = "fault-injection"), path = "no_faults.rs")]
mod faults;
mod files;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generate;
mod import;
mod init;
mod initial_weights;
mod inspect;
mod ledger;
mod machine;
mod metrics;
mod model_folder;
mod numbers;
mod output;
mod plan;
mod plan_choices;
mod plan_costs;
mod plan_file;
mod plan_training;
mod plan_ways;
mod plot;
mod predict;
mod processes;
mod profile;
mod progress;
#[cfg(test)]
mod reference;
mod run_folder;
mod schedule;
mod setup;
mod signals;
mod summary;
mod task;
mod trace;
mod train;
mod translate;
mod values;
mod verify;

use std::process::ExitCode;

use gpipe_distributed::environment::Environment;

use crate::output::{complain, say};

/// The key of the timeout that a library's error asks to raise.
fn timeout_key(exceeded: bool) -> &'static str {
    if exceeded { " (pipeline.timeout_s)" } else { "" }
}

/// As `timeout_key`, of an error that has no kind but its text.
fn key_named_in(error: &gpipe::processes::PeerError) -> &'static str {
    timeout_key(error.reason.contains("raise the timeout"))
}

/// An error that ends a command. Its message is for the user.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Data(#[from] gpipe_data::Error),
    #[error("[model] {0}")]
    Model(#[from] gpipe_models::TransformerError),
    #[error("[model] {0}")]
    Llama(#[from] gpipe_models::LlamaError),
    #[error("[model] {0}")]
    Translation(#[from] gpipe_models::TranslationError),
    #[error("[model] {0}")]
    ImageModel(#[from] gpipe_models::ImageError),
    #[error("{}{}", .0, timeout_key(.0.is_timeout()))]
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
    Sampling(#[from] generate::sampling::SamplingError),
    #[error("{}{}", .0, timeout_key(matches!(.0, gpipe_distributed::JoinError::Missing(_))))]
    Join(#[from] gpipe_distributed::JoinError),
    /// An error of another process, or of the connection to it.
    #[error("{}{}", .0, key_named_in(.0))]
    Peer(#[from] gpipe::processes::PeerError),
    /// An error of the launcher or of the processes that it started.
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
    #[error(transparent)]
    Environment(#[from] gpipe_distributed::environment::EnvironmentError),
    #[error("{what}: {source}{}", files::remedy(source))]
    Io { what: String, source: std::io::Error },
    /// A mini-batch is not finite, and the run is configured to stop.
    #[error("step {step}: {source}. To leave such mini-batches out: --on-nan skip")]
    Nan { step: u64, source: gpipe::Error },
    /// Too many mini-batches in a row are not finite to be an accident.
    #[error(
        "{count} mini-batches in a row are not finite, which is no accident; the last: {source}"
    )]
    NanInARow { count: u64, source: gpipe::Error },
    /// The user or the system asked the run to stop.
    #[error("stopped by {signal_name} after step {step}")]
    Interrupted { signal: i32, signal_name: String, step: u64 },
    /// The run's folder has disappeared or was replaced.
    #[error(
        "{}: the run's folder {became} while the run was training: what was not saved before is \
        lost{rest}",
        folder.display()
    )]
    FolderGone { folder: std::path::PathBuf, became: String, rest: String },
    /// Every held-out image was left out.
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
    /// Whether all processes of a command reach this error at the same point, so that they can
    /// still communicate.
    fn is_of_all(&self) -> bool {
        matches!(
            self,
            Self::Nan { .. } | Self::NanInARow { .. } | Self::Interrupted { .. } | Self::Differs
        )
    }

    /// The exit code: after a signal 128 plus its number, as in shells; after `launch` that of the
    /// launched processes; otherwise 1.
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

/// Runs the command with the arguments and the environment of this process.
pub fn main() -> ExitCode {
    gpipe::keep_freed_memory();
    files::limits_are_errors();
    gpipe::compute_on_this_thread_alone();
    processes::launch::end_with_launcher();
    let here = Environment::read().map_err(CliError::from);
    match here.and_then(|here| run(args::Arguments::read().command, here.as_ref())) {
        Ok(()) => match output::lost() {
            None => ExitCode::SUCCESS,
            Some(error) => {
                complain!("gpipe: not everything was printed: the standard output: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            output::always_line(format_args!("gpipe: {error}"));
            error.exit_code()
        }
    }
}

/// Runs a command as the process that `here` describes, or in a single process if it is `None`.
fn run(command: args::Command, here: Option<&Environment>) -> Result<(), CliError> {
    use args::Command;
    match command {
        Command::Launch(arguments) => processes::launch::run(&arguments),
        Command::Train(arguments) => train::run(&arguments, here),
        Command::Verify(arguments) => verify::run(&arguments, here),
        Command::Eval(mut arguments) => {
            arguments.run.beside = arguments.told();
            eval::run(&arguments, here)
        }
        Command::Generate(mut arguments) => {
            arguments.run.beside = arguments.told();
            generate::run(&arguments, here)
        }
        Command::Predict(arguments) => predict::run(&arguments, here),
        Command::Translate(mut arguments) => {
            arguments.run.beside = arguments.told();
            translate::run(&arguments, here)
        }
        Command::Trace(arguments) => trace::run(&arguments, here),
        Command::Profile(arguments) => profile::run(&arguments, here),
        // The following commands run on rank 0 only.
        _ if here.is_some_and(|here| here.rank > 0) => Ok(()),
        Command::Ledger(arguments) => ledger::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Schedule(arguments) => schedule::run(&arguments),
        Command::Plot(arguments) => plot::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Export(arguments) => export::export(&arguments),
        Command::Import(arguments) => import::import(&arguments),
        Command::Init(arguments) => init::run(&arguments),
        Command::Completions(arguments) => {
            let mut command = args::Arguments::grouped();
            let mut text = Vec::new();
            clap_complete::generate(arguments.shell, &mut command, "gpipe", &mut text);
            say!("{}", String::from_utf8_lossy(&text).trim_end());
            Ok(())
        }
    }
}
