//! What a run's folder says of it before the first step, and what all its processes must have been
//! told alike.

use std::{io::ErrorKind, path::Path};

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    files::{io, write_aside},
    plan_file::PlanFile,
    processes::environment::RUN_NOTE,
    run_folder::{EARLIER, PLAN},
    task::Vocabulary,
};

/// What every process must have been told alike, beside the configuration.
pub(super) fn told(arguments: &TrainArguments) -> Vec<(String, String)> {
    let TrainArguments { plan, out, resume, init, names, partial, reinit, .. } = arguments;
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string())
    };
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
    let facts = [
        ("--out", path(out)),
        ("--resume", text(resume)),
        ("--init", path(init)),
        ("--names", path(names)),
        ("--partial", partial.to_string()),
        ("--reinit", reinit.join(",")),
        ("--plan", text(plan)),
    ];
    facts.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Writes what a run's folder says of it from the start. Where a launcher asks which folder it is,
/// it is told first.
pub(super) fn write_begun(
    out: &Path,
    config: &Config,
    plan: Option<&PlanFile>,
    vocabulary: &Vocabulary,
) -> Result<(), CliError> {
    if let Some(note) = std::env::var_os(RUN_NOTE) {
        let absolute = std::path::absolute(out).map_err(io(out))?;
        let note = Path::new(&note);
        std::fs::write(note, absolute.display().to_string()).map_err(io(note))?;
    }
    write_aside(&out.join("config.toml"), &config.resolved().to_toml()?)?;
    if let Some(plan) = plan {
        plan.write(&out.join(PLAN))?; // before the first step: what is measured is held against it
    }
    write_aside(&out.join(vocabulary.file()), &vocabulary.to_json()?)
}

/// Gives a file of an earlier end of the run another name.
pub(super) fn set_aside(out: &Path, name: &str) -> Result<(), CliError> {
    let path = out.join(name);
    match std::fs::rename(&path, out.join(format!("{EARLIER}{name}"))) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io(&path)(error)),
        _ => Ok(()),
    }
}
