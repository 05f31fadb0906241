//! The `gpipe` command: the only room that reads the environment and prints.
//!
//! - [`args`]: the command line
//! - [`config`]: the configuration file and its overrides, one validated struct
//! - [`setup`]: from a configuration to text, tokens, a model and a pipeline
//! - [`train`], [`verify`], [`eval`], [`generate`], [`trace`], [`plot`]: the commands
//! - [`run_folder`]: a trained model, as `train` wrote it
//! - [`sampling`]: which token comes next; [`utf8_stream`]: text from tokens that end within characters
//! - [`progress`], [`metrics`], [`summary`]: what a run shows and writes

mod args;
mod config;
mod eval;
mod generate;
mod metrics;
mod plot;
mod progress;
mod run_folder;
mod sampling;
mod setup;
mod summary;
mod trace;
mod train;
mod utf8_stream;
mod verify;

use std::process::ExitCode;

use clap::Parser;

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
    Pipeline(#[from] gpipe::Error),
    #[error(transparent)]
    Weights(#[from] gpipe_checkpoint::weights::WeightsError),
    #[error(transparent)]
    RunFolder(#[from] run_folder::RunFolderError),
    #[error(transparent)]
    Sampling(#[from] sampling::SamplingError),
    #[error(transparent)]
    Metrics(#[from] gpipe_observe::metrics::FileError),
    #[error(transparent)]
    Events(#[from] gpipe_observe::tensorboard::EventError),
    #[error(transparent)]
    Plot(#[from] gpipe_observe::plot::PlotError),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// `verify` found a difference; it has already been printed.
    #[error("results differ")]
    Differs,
}

impl From<tch::TchError> for CliError {
    fn from(error: tch::TchError) -> Self {
        CliError::Pipeline(error.into())
    }
}

fn main() -> ExitCode {
    gpipe::keep_freed_memory();
    let result = match args::Arguments::parse().command {
        args::Command::Train(arguments) => train::run(&arguments),
        args::Command::Verify(arguments) => verify::run(&arguments),
        args::Command::Eval(arguments) => eval::run(&arguments),
        args::Command::Generate(arguments) => generate::run(&arguments),
        args::Command::Trace(arguments) => trace::run(&arguments),
        args::Command::Plot(arguments) => plot::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpipe: {error}");
            ExitCode::FAILURE
        }
    }
}
