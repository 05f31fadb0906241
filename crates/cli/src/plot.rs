//! `gpipe plot`: draws the metrics of runs.

use std::path::Path;

use gpipe_observe::{
    metrics::{self, Run},
    plot,
};

use crate::{
    CliError,
    args::{ConfigArguments, PlotArguments},
    config::Config,
    files::write_aside,
    output::say,
    run_folder::{RunFolderError, config_of, runs_in},
    task,
};

/// Reads the runs' records and writes one page.
pub(crate) fn run(arguments: &PlotArguments) -> Result<(), CliError> {
    let runs: Vec<Run> = arguments.runs.iter().map(|run| read(run)).collect::<Result<_, _>>()?;
    let page = plot::svg(&runs)?;
    let out = match (&arguments.out, arguments.runs.first()) {
        (Some(out), _) => out.clone(),
        (None, Some(first)) => first.join("plot.svg"),
        (None, None) => return Err(plot::PlotError::NoRuns.into()),
    };
    write_aside(&out, &page)?;
    say!("{}", out.display());
    Ok(())
}

/// Reads the records in a run's folder.
fn read(folder: &Path) -> Result<Run, CliError> {
    let path = folder.join("metrics.jsonl");
    if !path.exists() {
        let runs = runs_in(folder);
        if !runs.is_empty() {
            return Err(RunFolderError::Holds { folder: folder.to_owned(), runs }.into());
        }
        return Err(CliError::Usage(format!(
            "there is no {}: name the folder of a run, as `gpipe train` printed it",
            path.display()
        )));
    }
    let records = metrics::read(&path)?;
    if records.is_empty() {
        let path = path.display();
        return Err(CliError::Usage(format!("{path} has no records: plot after the first step")));
    }
    let run = Run::new(folder.display().to_string(), records);
    // A run whose configuration cannot be read is drawn all the same.
    let config = ConfigArguments { config: config_of(folder), ..ConfigArguments::default() };
    Ok(match Config::read(&config) {
        Ok(config) => run.counting(task::unit(&config)),
        Err(_) => run,
    })
}
