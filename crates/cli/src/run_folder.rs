//! A trained model: the files that `gpipe train` wrote, read and checked against each other.
//!
//! `config.toml` describes the model, `tokenizer.json` or `classes.json` names its tokens or
//! classes, and `weights.safetensors` holds its parameters. The number of stages may differ from
//! training, because weights are stored by parameter, not by stage.

use std::path::{Path, PathBuf};

use gpipe::{Pipeline, Schedule};
use gpipe_checkpoint::{Checkpoint, folder, manifest, tensor_file::TensorFile};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::{
    CliError,
    args::{ConfigArguments, RunArguments},
    config::Config,
    facts,
    output::complain,
    processes::{Processes, timeout_s},
    setup,
    task::{self, Vocabulary},
    values::ScheduleChoice,
};

/// File of the final parameters in a run's folder.
pub(crate) const WEIGHTS: &str = "weights.safetensors";
/// File of the moving averages of the parameters, if the run keeps them.
pub(crate) const AVERAGES: &str = "averages.safetensors";
/// Prefix that those two files get when a finished run is resumed.
pub(crate) const EARLIER: &str = "earlier-";
/// File of the plan that the run follows, if any.
pub(crate) const PLAN: &str = "plan.json";
/// Folder of the run's checkpoints.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// Errors of a trained model's files.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunFolderError {
    #[error("{0}: there is no such folder: give the one that `gpipe train` named after 'files:'")]
    NoFolder(PathBuf),
    #[error(
        "{0}: there is no such file: the run kept no averages of its weights: train with --set \
        optimizer.average=0.999, or leave --averages out"
    )]
    NoAverages(PathBuf),
    #[error(
        "{path}: there is no such file, and no checkpoint: a run has it once it has ended; let \
        the run end, or give another run's folder"
    )]
    Missing { path: PathBuf },
    #[error("{path}: there is no such file: {remedy}")]
    NoFile { path: PathBuf, remedy: &'static str },
    #[error(
        "{weights} does not fit the model of {config} and the vocabulary beside it: {reason}: \
        give the files of one run"
    )]
    Mismatch { weights: PathBuf, config: PathBuf, reason: String },
}

/// A trained model's configuration, vocabulary and weights.
pub(crate) struct RunFolder {
    pub config: Config,
    pub vocabulary: Vocabulary,
    source: Source,
    averages: bool,
}

/// The source of a trained model.
enum Source {
    /// The files of a finished run, or the files named by flags.
    Files { config: PathBuf, weights: PathBuf },
    /// A checkpoint.
    Checkpoint(Box<Checkpoint>),
}

/// The configuration file of a run, where `folder` is the run's folder or one of its checkpoints.
pub(crate) fn config_of(folder: &Path) -> Option<PathBuf> {
    let run = folder.parent().and_then(Path::parent);
    let folders = [Some(folder), run].into_iter().flatten();
    folders.map(|folder| folder.join("config.toml")).find(|path| path.is_file())
}

impl RunArguments {
    /// The process timeout, in seconds, as far as the command line determines it.
    pub(crate) fn timeout_s(&self) -> u64 {
        let of_run = self.folder.as_ref().and_then(|folder| config_of(folder));
        let config = of_run.or_else(|| self.config.clone());
        timeout_s(&ConfigArguments { config, set: self.set.clone(), ..ConfigArguments::default() })
    }
}

impl RunArguments {
    /// The arguments that must be the same in every process.
    fn told(&self) -> Vec<(String, String)> {
        let path = |path: &Option<PathBuf>| {
            path.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string())
        };
        let facts = [
            ("RUN_DIR", path(&self.folder)),
            ("--config", path(&self.config)),
            ("--weights", path(&self.weights)),
            ("--averages", self.averages.to_string()),
        ];
        facts.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

impl RunFolder {
    /// Reads the configuration and the vocabulary, and checks that there are weights.
    ///
    /// Of several processes, one looks for them. So all use the same ones, even if something is
    /// saved meanwhile.
    pub(crate) fn open(arguments: &RunArguments, processes: &Processes) -> Result<Self, CliError> {
        processes.agree_on_facts(&arguments.told())?; // the first process's arguments are followed
        let mut own = None;
        let place = processes.decided(|| {
            let found = Source::find(arguments)?;
            let place = found.place();
            own = Some(found);
            Ok(place)
        })?;
        let source = match own {
            Some(own) => own,
            None => Source::at(place)?,
        };
        let overrides = ConfigArguments {
            set: arguments.set.clone(),
            device: arguments.device.clone(),
            dtype: arguments.dtype,
            ..ConfigArguments::default()
        };
        let (mut config, vocabulary) = source.read(&overrides)?;
        // Evaluation does not depend on the schedule, and its file may be gone.
        if matches!(config.pipeline.schedule, ScheduleChoice::File(_)) {
            config.pipeline.schedule = ScheduleChoice::Named(Schedule::OneFOneB);
            config.set_stages(config.pipeline.stages, arguments.device.is_some());
        }
        if let Some(stages) = arguments.stages {
            config.set_stages(stages, arguments.device.is_some());
        }
        config.check()?;
        Ok(Self { config, vocabulary, source, averages: arguments.averages })
    }

    /// The pipeline with the trained weights. In one of several processes, these are the weights of
    /// its stages.
    pub(crate) fn pipeline(&self, processes: &Processes) -> Result<Pipeline, CliError> {
        processes.agree_on(&self.config)?;
        let (weights, from, config) = match &self.source {
            Source::Files { config, weights } => {
                let said = facts::in_metadata(TensorFile::open(weights)?.metadata());
                facts::check(weights, &said, &self.config)?;
                (gpipe_checkpoint::weights::load(weights)?, weights.clone(), config.clone())
            }
            Source::Checkpoint(checkpoint) => {
                let folder = checkpoint.folder().to_owned();
                facts::check(&folder, &facts::of_checkpoint(checkpoint), &self.config)?;
                (checkpoint_weights(checkpoint, self.averages)?, folder.clone(), folder)
            }
        };
        let model = task::model(&self.config, self.vocabulary.size())?;
        let mut pipeline = setup::pipeline_among(&self.config, model, processes)?.build()?;
        let mismatch = |reason| RunFolderError::Mismatch {
            weights: from.clone(),
            config: config.clone(),
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

/// A checkpoint's parameters, or their averages.
pub(crate) fn checkpoint_weights(
    checkpoint: &Checkpoint,
    averages: bool,
) -> Result<Vec<(String, Tensor)>, CliError> {
    Ok(if averages { checkpoint.averages()? } else { checkpoint.parameters()? })
}

/// The checkpoint in `folder`, or the newest undamaged one of the run in `folder`. `None` if there
/// is none.
pub(crate) fn checkpoint_in(folder: &Path) -> Result<Option<Checkpoint>, CliError> {
    if folder.join(manifest::NAME).exists() {
        return Ok(Some(Checkpoint::open(folder)?));
    }
    let own = folder.join(CHECKPOINTS);
    let newest = folder::newest(if own.is_dir() { &own } else { folder })?;
    for folder::Skipped { folder, reason } in &newest.skipped {
        complain!("gpipe: warning: skipped {}: {reason}", folder.display());
    }
    Ok(newest.found)
}

/// The location of a model's files, as processes send it to each other.
#[derive(Serialize, Deserialize)]
enum ModelFiles {
    Files { config: PathBuf, weights: PathBuf },
    Checkpoint(PathBuf),
}

impl Source {
    fn place(&self) -> ModelFiles {
        match self {
            Self::Files { config, weights } => {
                ModelFiles::Files { config: config.clone(), weights: weights.clone() }
            }
            Self::Checkpoint(checkpoint) => ModelFiles::Checkpoint(checkpoint.folder().to_owned()),
        }
    }

    fn at(place: ModelFiles) -> Result<Self, CliError> {
        match place {
            ModelFiles::Files { config, weights } => Self::files(config, weights),
            ModelFiles::Checkpoint(folder) => {
                Ok(Self::Checkpoint(Box::new(Checkpoint::open(&folder)?)))
            }
        }
    }

    fn find(arguments: &RunArguments) -> Result<Self, CliError> {
        let (folder, weights) = match (&arguments.folder, &arguments.config, &arguments.weights) {
            (None, Some(config), Some(weights)) => {
                return Self::files(config.clone(), weights.clone());
            }
            (Some(folder), _, _) if !folder.is_dir() => {
                return Err(RunFolderError::NoFolder(folder.clone()).into());
            }
            (Some(folder), _, _) => {
                (folder, folder.join(if arguments.averages { AVERAGES } else { WEIGHTS }))
            }
            _ => {
                let what = "name a run: RUN_DIR, or --config CONFIG --weights FILE";
                return Err(CliError::Usage(what.into()));
            }
        };
        if folder.join(WEIGHTS).is_file() {
            if !weights.is_file() {
                return Err(RunFolderError::NoAverages(weights).into());
            }
            return Self::files(folder.join("config.toml"), weights);
        }
        let Some(checkpoint) = checkpoint_in(folder)? else {
            return Err(RunFolderError::Missing { path: weights }.into());
        };
        if !folder.join(manifest::NAME).exists() {
            complain!(
                "gpipe: the run has not ended: this is its checkpoint {}",
                checkpoint.folder().display()
            );
        }
        Ok(Self::Checkpoint(Box::new(checkpoint)))
    }

    fn files(config: PathBuf, weights: PathBuf) -> Result<Self, CliError> {
        for path in [&config, &weights] {
            if !path.is_file() {
                let remedy = "correct the path";
                return Err(RunFolderError::NoFile { path: path.clone(), remedy }.into());
            }
        }
        Ok(Self::Files { config, weights })
    }

    fn read(&self, overrides: &ConfigArguments) -> Result<(Config, Vocabulary), CliError> {
        match self {
            Self::Files { config, weights } => {
                let path = Some(config.clone());
                let config = Config::read(&ConfigArguments { config: path, ..overrides.clone() })?;
                let path = weights.with_file_name(Vocabulary::file_of(&config));
                if !path.is_file() {
                    let remedy = "put the one of the model's run there";
                    return Err(RunFolderError::NoFile { path, remedy }.into());
                }
                Ok((config, Vocabulary::load(&path)?))
            }
            Self::Checkpoint(checkpoint) => {
                let origin = checkpoint.folder().join(manifest::NAME);
                let text = &checkpoint.manifest().config;
                let config = Config::from_text(text, &origin, overrides)?;
                Ok((config, Vocabulary::of_checkpoint(checkpoint)?))
            }
        }
    }
}
