//! Where a run starts: from the beginning in a new folder, or from a checkpoint.

use std::path::{Path, PathBuf};

use gpipe_checkpoint::{Checkpoint, folder, manifest::Best};
use serde::{Deserialize, Serialize};

use super::{
    records,
    run_lock::{RunLock, check_files, last_numbered},
};
use crate::{
    CliError,
    args::TrainArguments,
    config::{Config, Effect, changes},
    files::io,
    metrics::METRICS,
    output::prose,
    processes::Processes,
    run_folder::{CHECKPOINTS, WEIGHTS, tell_skipped},
    task,
    values::ScheduleChoice,
};

/// The key of the kind of network.
const MODEL_KIND: &str = "model.kind";

/// Everything that is decided before the data are read.
pub(crate) struct Start {
    pub config: Config,
    pub out: RunLock,
    /// The checkpoint to resume from.
    pub checkpoint: Option<Checkpoint>,
    /// The best evaluation so far, with which later ones are compared.
    pub best: Option<Best>,
    /// The metrics of an earlier run that is continued in `out`.
    pub earlier_metrics: Option<PathBuf>,
}

/// What rank 0 decides for all processes.
#[derive(Serialize, Deserialize)]
struct AgreedStart {
    out: PathBuf,
    checkpoint: Option<PathBuf>,
    best: Option<Best>,
}

impl Start {
    fn new(config: Config, out: RunLock) -> Self {
        Self { config, out, checkpoint: None, best: None, earlier_metrics: None }
    }

    /// Where the run starts. Of several processes, rank 0 determines it with `first`, such as
    /// [`Start::first`], and the others follow it.
    pub(crate) fn find(
        arguments: &TrainArguments,
        processes: &Processes,
        first: impl FnOnce() -> Result<Self, CliError>,
    ) -> Result<Self, CliError> {
        let mut own = None;
        let place = processes.decided(|| {
            let found = first()?;
            records::check(&found)?;
            let place = found.place()?;
            own = Some(found);
            Ok(place)
        })?;
        match own {
            Some(own) => Ok(own),
            None => Self::follow(arguments, place),
        }
    }

    /// Reads the configuration, finds the checkpoint to resume from, and locks the folder.
    pub(crate) fn first(arguments: &TrainArguments) -> Result<Self, CliError> {
        match arguments.resume.as_deref() {
            None => {
                let config = configuration(arguments)?;
                Ok(Self::new(config, RunLock::new_run(arguments)?))
            }
            Some("auto") => Self::automatic(arguments),
            Some(path) => Self::from(arguments, Path::new(path)),
        }
    }

    /// What the other processes need to know.
    fn place(&self) -> Result<AgreedStart, CliError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(io(path));
        let checkpoint = self.checkpoint.as_ref().map(Checkpoint::folder);
        Ok(AgreedStart {
            out: absolute(self.out.path())?,
            checkpoint: checkpoint.map(absolute).transpose()?,
            best: self.best,
        })
    }

    /// Starts as rank 0 decided.
    fn follow(arguments: &TrainArguments, place: AgreedStart) -> Result<Self, CliError> {
        let AgreedStart { out, checkpoint, best } = place;
        if !out.is_dir() {
            return Err(CliError::Usage(format!(
                "{}: rank 0 writes the run there, and this process does not see it: all of them \
                need the same folder, on a file system that they share",
                out.display()
            )));
        }
        let checkpoint = checkpoint.map(|folder| Checkpoint::open(&folder)).transpose()?;
        let given = &arguments.pipeline.config;
        let is_given = given.config.is_some() || given.from.is_some();
        let config = match (is_given, &checkpoint) {
            (false, Some(checkpoint)) => saved_configuration(checkpoint, arguments)?,
            _ => configuration(arguments)?,
        };
        let out = RunLock::followed(out);
        Ok(Self { checkpoint, best, ..Self::new(config, out) })
    }

    /// Starts from the newest undamaged checkpoint of the run's folder, or from the beginning.
    fn automatic(arguments: &TrainArguments) -> Result<Self, CliError> {
        let config = configuration(arguments)?;
        let path = match &arguments.out {
            Some(out) => Some(out.clone()).filter(|out| out.exists()),
            None => last_numbered(arguments),
        };
        let Some(path) = path else {
            prose!("no earlier run: starting from the beginning");
            return Ok(Self::new(config, RunLock::new_run(arguments)?));
        };
        if ![METRICS, CHECKPOINTS].iter().any(|name| path.join(name).exists()) {
            check_files(&path)?;
        }
        let out = RunLock::existing(&path)?;
        let newest = folder::newest(&path.join(CHECKPOINTS))?;
        tell_skipped(&newest.skipped);
        if let Some(checkpoint) = newest.found {
            let best = compare(&checkpoint, &config)?;
            let best = kept(best, &config, &path.join(CHECKPOINTS));
            return Ok(Self { checkpoint: Some(checkpoint), best, ..Self::new(config, out) });
        }
        let shown = path.display();
        if !newest.skipped.is_empty() {
            return Err(CliError::Usage(format!(
                "no checkpoint in {shown} is complete: repair one, or remove {shown} to start \
                from the beginning"
            )));
        }
        if path.join(WEIGHTS).exists() {
            return Err(CliError::Usage(format!(
                "{shown} holds a run that has ended and has no checkpoints: give another --out, \
                or remove it"
            )));
        }
        prose!("no checkpoint in {shown}: starting from the beginning");
        Ok(Self::new(config, out))
    }

    /// Starts from the checkpoint or run at `path`.
    fn from(arguments: &TrainArguments, path: &Path) -> Result<Self, CliError> {
        let checkpoints = path.join(CHECKPOINTS);
        let found = folder::find(if checkpoints.is_dir() { &checkpoints } else { path })?;
        tell_skipped(&found.skipped);
        let checkpoint = found.checkpoint;
        let config = match &arguments.pipeline.config.config {
            Some(_) => configuration(arguments)?,
            None => saved_configuration(&checkpoint, arguments)?,
        };
        let best = compare(&checkpoint, &config)?;

        let own = checkpoint.folder().canonicalize().map_err(io(checkpoint.folder()))?;
        let own_checkpoints = own.parent().unwrap_or(&own).to_owned();
        let run = own_checkpoints.parent().unwrap_or(&own_checkpoints);
        let in_run = own_checkpoints.file_name().is_some_and(|name| name == CHECKPOINTS);
        let out = match &arguments.out {
            Some(out) => out.clone(),
            None if in_run => relative(run),
            None => {
                return Err(CliError::Usage(format!(
                    "{} lies in no run's folder: say with --out where the run goes on",
                    own.display()
                )));
            }
        };
        let is_own = in_run && out.canonicalize().is_ok_and(|out| out == run);
        if !is_own {
            let best = kept(best, &config, &out.join(CHECKPOINTS));
            let metrics = Some(run.join(METRICS)).filter(|path| in_run && path.is_file());
            let start = Self::new(config, RunLock::other_run(&out)?);
            let checkpoint = Some(checkpoint);
            return Ok(Self { checkpoint, best, earlier_metrics: metrics, ..start });
        }
        let claim = RunLock::existing(&out)?;
        let batches = checkpoint.manifest().progress.batches;
        let later = folder::list(&own_checkpoints)?.into_iter().find(|(number, path)| {
            *number > batches && Checkpoint::open(path).and_then(|c| c.verify()).is_ok()
        });
        if let Some((_, later)) = later {
            return Err(CliError::Usage(format!(
                "{} holds a later checkpoint, {}: give another --out to go on from {} there, or \
                remove what is later",
                out.display(),
                later.display(),
                checkpoint.folder().display()
            )));
        }
        let best = kept(best, &config, &own_checkpoints);
        Ok(Self { checkpoint: Some(checkpoint), best, ..Self::new(config, claim) })
    }
}

/// The best validation that later ones have to surpass. If the run keeps the best checkpoint, one
/// that is not in its folder does not count: otherwise none might ever be kept.
fn kept(best: Option<Best>, config: &Config, checkpoints: &Path) -> Option<Best> {
    let is_there = |best: &Best| checkpoints.join(folder::name(best.batches)).is_dir();
    best.filter(|best| !config.checkpoint.keep_best || is_there(best))
}

fn configuration(arguments: &TrainArguments) -> Result<Config, CliError> {
    let mut config = Config::read(&arguments.pipeline.config)?;
    config.apply_training(arguments)?;
    check_schedule(&config)?;
    Ok(config)
}

/// Reads a schedule's file before any work.
fn check_schedule(config: &Config) -> Result<(), CliError> {
    match &config.pipeline.schedule {
        ScheduleChoice::Auto => Ok(()), // made later
        choice => choice.schedule().map(drop),
    }
}

/// The configuration in a checkpoint, with the flags applied.
fn saved_configuration(
    checkpoint: &Checkpoint,
    arguments: &TrainArguments,
) -> Result<Config, CliError> {
    let origin = checkpoint.folder().join(gpipe_checkpoint::manifest::NAME);
    let text = &checkpoint.manifest().config;
    let mut config = Config::from_text(text, &origin, &arguments.pipeline.config)?;
    let own = &arguments.pipeline;
    if let Some(schedule) = &own.schedule {
        config.pipeline.schedule = schedule.clone();
    }
    if own.stages.is_some() || own.schedule.is_some() {
        let stages = own.stages.unwrap_or(config.pipeline.stages);
        config.set_stages(stages, own.config.device.is_some());
    }
    config.apply_training(arguments)?;
    check_schedule(&config)?;
    Ok(config)
}

/// Reports changes of the configuration, and refuses those for which the saved state is unusable.
/// Returns the best evaluation so far, if later ones are comparable.
fn compare(checkpoint: &Checkpoint, config: &Config) -> Result<Option<Best>, CliError> {
    let manifest = checkpoint.manifest();
    let origin = checkpoint.folder().join(gpipe_checkpoint::manifest::NAME);
    let old = Config::from_text(&manifest.config, &origin, &Default::default())?;
    prose!(
        "resuming {}: step {}, {} {}s",
        checkpoint.folder().display(),
        manifest.progress.batches,
        manifest.progress.tokens,
        task::unit(config)
    );
    let mut all = changes(&old, &config.resolved())?;
    if all.iter().any(|change| change.key == MODEL_KIND) {
        // Every other key of the model follows from it.
        all.retain(|change| change.key == MODEL_KIND);
    }
    if all.is_empty() {
        return Ok(manifest.best);
    }
    prose!("the configuration differs from the checkpoint's:");
    for change in &all {
        prose!("  {}: {} -> {} ({})", change.key, change.old, change.new, change.effect.text());
    }
    let refused: Vec<String> = all
        .iter()
        .filter(|change| matches!(change.effect, Effect::Refused(_)))
        .map(|change| {
            format!(
                "{} cannot change from {} to {}: {}",
                change.key,
                change.old,
                change.new,
                change.effect.text()
            )
        })
        .collect();
    if refused.is_empty() {
        let is_other = all
            .iter()
            .any(|change| matches!(change.effect, Effect::Evaluations | Effect::Presentation));
        return Ok(manifest.best.filter(|_| !is_other));
    }
    // The weights of adapters fit no other rank.
    let has_adapters = all.iter().any(|change| change.key == "lora.rank" && change.old != "0");
    let remedy = match has_adapters {
        true => {
            "set the key back, or merge the adapters with gpipe export RUN --to FOLDER, and start \
            another run with gpipe train --from FOLDER (--lora N for new ones)"
        }
        false => "start another run (--init takes its weights), or set the key back",
    };
    Err(CliError::Usage(format!("{}: {remedy}", refused.join("; "))))
}

/// The path relative to the current folder, if it lies inside.
fn relative(path: &Path) -> PathBuf {
    let here = std::env::current_dir().and_then(|here| here.canonicalize());
    let inside = here.ok().and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    inside.filter(|path| !path.as_os_str().is_empty()).unwrap_or_else(|| path.to_owned())
}
