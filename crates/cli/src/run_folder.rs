//! A trained model: the files that `gpipe train` wrote, read and checked against each other.
//!
//! `config.toml` says what the model is, `tokenizer.json` its vocabulary, `weights.safetensors` its parameters. The number
//! of stages may be another one than in training: weights are kept by parameter, not by stage.

use std::path::PathBuf;

use gpipe::{Balance, Pipeline};
use gpipe_data::Tokenizer;
use tch::Tensor;

use crate::{
    CliError,
    args::{ConfigArguments, RunArguments},
    config::Config,
    setup,
};

/// The file of the parameters after the last step, in a run's folder.
pub(crate) const WEIGHTS: &str = "weights.safetensors";
/// The file of their moving averages, if the run kept them.
pub(crate) const AVERAGES: &str = "averages.safetensors";

/// What is wrong with a trained model's files.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunFolderError {
    #[error("{0}: there is no such folder: give the one that `gpipe train` named after 'files:'")]
    NoFolder(PathBuf),
    #[error(
        "{0}: there is no such file: the run kept no averages of its weights: train with --set optimizer.average=0.999, or leave --averages out"
    )]
    NoAverages(PathBuf),
    #[error(
        "{path}: there is no such file: a run has it once it has ended; let the run end, or give another run's folder"
    )]
    Missing { path: PathBuf },
    #[error(
        "{weights} does not fit the model of {config} and the tokenizer beside it: {reason}: give the files of one run"
    )]
    Mismatch { weights: PathBuf, config: PathBuf, reason: String },
}

/// A trained model's configuration, tokenizer and weights.
pub(crate) struct RunFolder {
    pub config: Config,
    pub tokenizer: Tokenizer,
    config_path: PathBuf,
    weights_path: PathBuf,
}

impl RunFolder {
    /// Reads the configuration and the tokenizer, and sees that there are weights.
    pub(crate) fn open(arguments: &RunArguments) -> Result<Self, CliError> {
        let (config_path, weights_path) = paths(arguments)?;
        let tokenizer_path = weights_path.with_file_name("tokenizer.json");
        if arguments.averages && !weights_path.is_file() {
            return Err(RunFolderError::NoAverages(weights_path).into());
        }
        for path in [&config_path, &weights_path, &tokenizer_path] {
            if !path.is_file() {
                return Err(RunFolderError::Missing { path: path.clone() }.into());
            }
        }
        let mut config = Config::read(&ConfigArguments {
            config: config_path.clone(),
            set: arguments.set.clone(),
            device: arguments.device.clone(),
            dtype: arguments.dtype.clone(),
            ..ConfigArguments::default()
        })?;
        if let Some(stages) = arguments.stages {
            config.pipeline.stages = stages;
            // So are devices, unless they are one and the same, or were just named.
            let devices = &mut config.pipeline.devices.0;
            if arguments.device.is_none() && devices.iter().all(|device| *device == devices[0]) {
                devices.truncate(1);
            }
            // Layers per stage that were chosen for another K are of no use.
            let is_for_other = |balance: &Balance| matches!(balance, Balance::Layers(layers) if layers.len() != stages);
            if is_for_other(&config.pipeline.balance) {
                config.pipeline.balance = Balance::Cost;
            }
        }
        config.check()?;
        let tokenizer = Tokenizer::load(&tokenizer_path)?;
        Ok(Self { config, tokenizer, config_path, weights_path })
    }

    /// The pipeline with the trained weights: all of them, and nothing else.
    pub(crate) fn pipeline(&self) -> Result<Pipeline, CliError> {
        let weights = gpipe_checkpoint::weights::load(&self.weights_path)?;
        let model = setup::model(&self.config, self.tokenizer.vocabulary())?;
        let mut pipeline = setup::pipeline(&self.config, model).build()?;
        let mismatch = |reason| RunFolderError::Mismatch {
            weights: self.weights_path.clone(),
            config: self.config_path.clone(),
            reason,
        };
        let own = pipeline.parameters()?;
        let is_given = |name: &str| weights.iter().any(|(given, _)| given == name);
        if let Some((name, _)) = own.iter().find(|(name, _)| !is_given(name)) {
            return Err(mismatch(format!("it has no parameter '{name}'")).into());
        }
        pipeline.set_parameters(&weights).map_err(|error| match error {
            gpipe::Error::Setting(reason) => mismatch(reason).into(),
            other => CliError::Pipeline(other),
        })?;
        Ok(pipeline)
    }
}

/// Where the configuration and the weights are.
fn paths(arguments: &RunArguments) -> Result<(PathBuf, PathBuf), CliError> {
    match (&arguments.folder, &arguments.config, &arguments.weights) {
        (Some(folder), _, _) if folder.is_dir() => {
            let weights = if arguments.averages { AVERAGES } else { WEIGHTS };
            Ok((folder.join("config.toml"), folder.join(weights)))
        }
        (Some(folder), _, _) => Err(RunFolderError::NoFolder(folder.clone()).into()),
        (None, Some(config), Some(weights)) => Ok((config.clone(), weights.clone())),
        _ => Err(CliError::Usage("name a run: RUN_DIR, or --config CONFIG --weights FILE".into())),
    }
}

/// The model's outputs for tokens: int64 [samples, positions] -> [samples, positions, vocabulary], without dropout.
pub(crate) fn logits(pipeline: &mut Pipeline, tokens: Tensor) -> Result<Tensor, CliError> {
    let outputs = pipeline.predict(tokens)?;
    let only = outputs.into_iter().next();
    only.ok_or_else(|| CliError::Usage("the model has no output: it is no language model".into()))
}
