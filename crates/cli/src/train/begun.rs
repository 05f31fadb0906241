//! The files that describe a run before its first step, and the arguments that all its processes
//! must share.

use std::{io::ErrorKind, os::unix::ffi::OsStrExt, path::Path};

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    files::{io, write_aside},
    plan_file::PlanFile,
    processes::RUN_NOTE,
    run_folder::{EARLIER, PLAN},
    task::Vocabulary,
};

/// The arguments, besides the configuration, that must be the same in every process.
pub(super) fn told(arguments: &TrainArguments) -> Vec<(String, String)> {
    let TrainArguments { plan, out, resume, init, names, partial, reinit, .. } = arguments;
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string())
    };
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
    let facts = [
        ("--out", path(out)),
        ("--resume", text(resume)),
        ("--from", path(&arguments.pipeline.config.from)),
        ("--init", path(init)),
        ("--names", path(names)),
        ("--partial", partial.to_string()),
        ("--reinit", reinit.join(",")),
        ("--plan", text(&plan.origin)),
    ];
    facts.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Writes the files that describe a run. If there is a launcher, it is first told the run's folder.
pub(super) fn write_begun(
    out: &Path,
    config: &Config,
    plan: Option<&PlanFile>,
    vocabulary: &Vocabulary,
) -> Result<(), CliError> {
    if let Some(note) = std::env::var_os(RUN_NOTE) {
        // Processes that the launcher starts again have the same working folder.
        let note = Path::new(&note);
        std::fs::write(note, out.as_os_str().as_bytes()).map_err(io(note))?;
    }
    write_aside(&out.join("config.toml"), &config.resolved().to_commented()?)?;
    if let Some(plan) = plan {
        // Before the first step, because measurements are compared with the plan.
        plan.write(&out.join(PLAN))?;
    }
    for (name, bytes) in vocabulary.files()? {
        let path = out.join(name);
        gpipe_files::write(&path, &bytes).map_err(io(&path))?;
    }
    Ok(())
}

/// Renames a file that an earlier end of the run wrote.
pub(super) fn set_aside(out: &Path, name: &str) -> Result<(), CliError> {
    let path = out.join(name);
    match std::fs::rename(&path, out.join(format!("{EARLIER}{name}"))) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io(&path)(error)),
        _ => Ok(()),
    }
}
