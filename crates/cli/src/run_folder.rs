//! A trained model: the files that `gpipe train` wrote, read and checked against each other.
//!
//! `config.toml` describes the model, `tokenizer.json` or `classes.json` names its tokens or
//! classes, and `weights.safetensors` holds its parameters. The number of stages may differ from
//! training, because weights are stored by parameter, not by stage.

use std::path::{Path, PathBuf};

use gpipe::{Pipeline, Schedule, Sequence};
use gpipe_checkpoint::{
    Checkpoint, TensorSet, fit::Fit, folder, manifest, names::NameMap, tensor_file::TensorFile,
    weights::WeightsError,
};
use serde::{Deserialize, Serialize};

use crate::{
    CliError,
    args::{ConfigArguments, RunArguments, typed},
    config::Config,
    facts,
    model_folder::{self, CONFIG, ModelFolder},
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

/// Maximum number of entries of a folder that are looked at for runs, and of runs that are listed.
const ENTRIES_MAX: usize = 10_000;
const LISTED_MAX: usize = 5;

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
    #[error(
        "{folder}: it is no run, but holds some: give one of them, such as {}", runs.join(", ")
    )]
    Holds { folder: PathBuf, runs: Vec<String> },
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
    /// A model's folder as Hugging Face distributes it.
    Folder(PathBuf),
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
        let facts = facts.map(|(name, value)| (name.to_owned(), value));
        facts.into_iter().chain(self.beside.iter().cloned()).collect()
    }
}

impl RunFolder {
    /// Reads the configuration and the vocabulary, and checks that there are weights.
    ///
    /// Of several processes, one looks for them. So all use the same ones, even if something is
    /// saved meanwhile.
    pub(crate) fn open(arguments: &RunArguments, processes: &Processes) -> Result<Self, CliError> {
        Self::open_for(arguments, &[], processes)
    }

    /// Like [`RunFolder::open`], to evaluate on the JSONL files `samples`. A model's folder has no
    /// `[data]`, so its configuration takes these files.
    pub(crate) fn open_for(
        arguments: &RunArguments,
        samples: &[PathBuf],
        processes: &Processes,
    ) -> Result<Self, CliError> {
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
        let data = if let Source::Folder(_) = source { samples.to_vec() } else { Vec::new() };
        let overrides = ConfigArguments {
            set: arguments.set.clone(),
            data,
            device: arguments.device.clone(),
            dtype: arguments.dtype,
            ..ConfigArguments::default()
        };
        let (mut config, vocabulary) = source.read(&overrides)?;
        // Evaluation does not depend on the schedule. Its file may be gone, or it may be for one
        // number of stages only.
        let is_fixed = match &config.pipeline.schedule {
            ScheduleChoice::Named(schedule) => matches!(schedule, Schedule::Custom(_)),
            ScheduleChoice::File(_) | ScheduleChoice::Auto => true,
        };
        if is_fixed {
            config.pipeline.schedule = ScheduleChoice::Named(Schedule::OneFOneB);
            config.set_stages(config.pipeline.stages, arguments.device.is_some());
        }
        if let Some(stages) = arguments.stages {
            config.set_stages(stages, arguments.device.is_some());
        }
        let stages = typed("pipeline.stages", "--stages", &arguments.stages);
        let all: Vec<_> = stages.into_iter().chain(overrides.typed()).collect();
        config.check_typed(&all)?;
        Ok(Self { config, vocabulary, source, averages: arguments.averages })
    }

    /// Like [`RunFolder::open`], in one process and with the configuration as it was saved.
    pub(crate) fn read(arguments: &RunArguments) -> Result<Self, CliError> {
        let source = Source::find(arguments)?;
        let (config, vocabulary) = source.read(&ConfigArguments::default())?;
        Ok(Self { config, vocabulary, source, averages: arguments.averages })
    }

    /// The pipeline with the trained weights. In one of several processes, these are the weights of
    /// its stages.
    pub(crate) fn pipeline(&self, processes: &Processes) -> Result<Pipeline, CliError> {
        processes.agree_on(&self.config)?;
        self.with_weights(processes).map_err(|error| self.or_checkpoint(error))
    }

    /// Adds to an error of a damaged file the checkpoint that holds parameters of the same run.
    fn or_checkpoint(&self, error: CliError) -> CliError {
        let (CliError::Weights(WeightsError::Format { .. }), Source::Files { weights, .. }) =
            (&error, &self.source)
        else {
            return error;
        };
        let folder = weights.parent().map(|run| run.join(CHECKPOINTS)).unwrap_or_default();
        let newest = folder::newest(&folder).ok().and_then(|newest| newest.found);
        let Some(checkpoint) = newest.filter(|_| folder.is_dir()) else { return error };
        CliError::Usage(format!(
            "{error}; or use the run's checkpoint of step {}: give {} in place of the run",
            checkpoint.manifest().progress.batches,
            checkpoint.folder().display()
        ))
    }

    fn with_weights(&self, processes: &Processes) -> Result<Pipeline, CliError> {
        let model = task::model(&self.config, self.vocabulary.size())?;
        let (mut weights, fit) = self.fitting_weights(&model)?;
        let builder = setup::pipeline_among(&self.config, model, processes)?;
        let mut pipeline = builder.given_parameters().build()?;
        setup::read_weights(&mut pipeline, &fit, &mut weights)?;
        Ok(pipeline)
    }

    /// The weights, which are those of the configured model.
    pub(crate) fn check_weights(&self) -> Result<TensorSet, CliError> {
        let model = task::model(&self.config, self.vocabulary.size())?;
        Ok(self.fitting_weights(&model)?.0)
    }

    /// The weights, and how they fit `model`.
    fn fitting_weights(&self, model: &Sequence) -> Result<(TensorSet, Fit), CliError> {
        let (mut weights, config) = self.weights()?;
        if let Source::Folder(_) = self.source {
            let fit = model_folder::fit(&mut weights, &self.config.network()?)?;
            return Ok((weights, fit));
        }
        let fit = Fit::new(&model.parameters(), &weights, &NameMap::identity())?;
        match misfit(&fit) {
            None => Ok((weights, fit)),
            Some(reason) => {
                let weights = weights.path().to_owned();
                Err(RunFolderError::Mismatch { weights, config, reason }.into())
            }
        }
    }

    /// The weights, to be read one tensor at a time, and the path of the configuration.
    pub(crate) fn weights(&self) -> Result<(TensorSet, PathBuf), CliError> {
        match &self.source {
            Source::Files { config, weights } => {
                let file = TensorFile::open(weights)?;
                facts::check(weights, &facts::in_metadata(file.metadata()), &self.config)?;
                Ok((file.into(), config.clone()))
            }
            Source::Checkpoint(checkpoint) => {
                let folder = checkpoint.folder().to_owned();
                facts::check(&folder, &facts::of_checkpoint(checkpoint), &self.config)?;
                Ok((checkpoint.tensors(self.averages)?, folder))
            }
            Source::Folder(folder) => {
                Ok((gpipe_checkpoint::model_folder::open(folder)?, folder.join(CONFIG)))
            }
        }
    }
}

/// Why the weights of a run do not fit its model, if they do not.
fn misfit(fit: &Fit) -> Option<String> {
    if let Some(name) = fit.missing.first() {
        return Some(format!("it has no parameter '{name}'"));
    }
    if let Some(own) = fit.mismatched.first() {
        let (name, found, expected) = (&own.parameter, &own.found, &own.expected);
        return Some(format!("'{name}' is {found:?}, the model's is {expected:?}"));
    }
    let name = fit.unexpected.first()?;
    Some(format!("the model has no parameter '{name}'"))
}

/// The checkpoint in `folder`, or the newest undamaged one of the run in `folder`. `None` if there
/// is none.
pub(crate) fn checkpoint_in(folder: &Path) -> Result<Option<Checkpoint>, CliError> {
    if folder.join(manifest::NAME).exists() {
        return Ok(Some(Checkpoint::open(folder)?));
    }
    let own = folder.join(CHECKPOINTS);
    let newest = folder::newest(if own.is_dir() { &own } else { folder })?;
    tell_skipped(&newest.skipped);
    Ok(newest.found)
}

/// Warns of damaged checkpoints, in whose place an older one is used.
pub(crate) fn tell_skipped(skipped: &[folder::Skipped]) {
    for folder::Skipped { folder, reason } in skipped {
        complain!("gpipe: warning: skipped {}: {reason}", folder.display());
    }
}

/// The folders of runs in `folder`, by name, at most [`LISTED_MAX`].
pub(crate) fn runs_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().take(ENTRIES_MAX).flatten();
    let is_run = |path: &PathBuf| {
        path.join("config.toml").is_file()
            && [WEIGHTS, CHECKPOINTS].iter().any(|name| path.join(name).exists())
    };
    let mut runs: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_run).collect();
    runs.sort_unstable();
    runs.iter().take(LISTED_MAX).map(|path| path.display().to_string()).collect()
}

/// The location of a model's files, as processes send it to each other.
#[derive(Serialize, Deserialize)]
enum ModelFiles {
    Files { config: PathBuf, weights: PathBuf },
    Checkpoint(PathBuf),
    Folder(PathBuf),
}

impl Source {
    fn place(&self) -> ModelFiles {
        match self {
            Self::Files { config, weights } => {
                ModelFiles::Files { config: config.clone(), weights: weights.clone() }
            }
            Self::Checkpoint(checkpoint) => ModelFiles::Checkpoint(checkpoint.folder().to_owned()),
            Self::Folder(folder) => ModelFiles::Folder(folder.clone()),
        }
    }

    fn at(place: ModelFiles) -> Result<Self, CliError> {
        match place {
            ModelFiles::Files { config, weights } => Self::files(config, weights),
            ModelFiles::Checkpoint(folder) => {
                Ok(Self::Checkpoint(Box::new(Checkpoint::open(&folder)?)))
            }
            ModelFiles::Folder(folder) => Ok(Self::Folder(folder)),
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
            (Some(folder), _, _) if folder.join("adapter_config.json").is_file() => {
                return Err(CliError::Usage(format!(
                    "{}: it has adapters only, in PEFT's format: name the run of the adapters, or \
                    the folder that gpipe export RUN_DIR --to FOLDER writes without --adapter",
                    folder.display()
                )));
            }
            (Some(folder), _, _) if model_folder::is_model_folder(folder) => {
                if arguments.averages {
                    let path = folder.join(AVERAGES);
                    return Err(RunFolderError::NoAverages(path).into());
                }
                return Ok(Self::Folder(folder.clone()));
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
            let runs = runs_in(folder);
            return Err(match runs.is_empty() {
                true => RunFolderError::Missing { path: weights },
                false => RunFolderError::Holds { folder: folder.clone(), runs },
            }
            .into());
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
                let vocabulary = Vocabulary::load(&path, config.end())?;
                Ok((config, vocabulary))
            }
            Self::Folder(folder) => {
                let from = Some(folder.clone());
                let config = Config::read(&ConfigArguments { from, ..overrides.clone() })?;
                Ok((config, Vocabulary::of_folder(&ModelFolder::open(folder)?)?))
            }
            Self::Checkpoint(checkpoint) => {
                let origin = checkpoint.folder().join(manifest::NAME);
                let text = &checkpoint.manifest().config;
                let config = Config::from_text(text, &origin, overrides)?;
                let vocabulary = Vocabulary::of_checkpoint(checkpoint, config.end())?;
                Ok((config, vocabulary))
            }
        }
    }
}
