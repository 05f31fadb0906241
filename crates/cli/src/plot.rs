//! `gpipe plot`: draws the metrics of runs.

use std::path::Path;

use gpipe_observe::{
    metrics::{self, Run},
    plot,
};

use crate::{CliError, args::PlotArguments, files::io, output::say};

/// Reads the runs' records and writes one page.
pub(crate) fn run(arguments: &PlotArguments) -> Result<(), CliError> {
    let runs: Vec<Run> = arguments.runs.iter().map(|run| read(run)).collect::<Result<_, _>>()?;
    let page = plot::svg(&runs)?;
    let out = match (&arguments.out, arguments.runs.first()) {
        (Some(out), _) => out.clone(),
        (None, Some(first)) => first.join("plot.svg"),
        (None, None) => return Err(plot::PlotError::NoRuns.into()),
    };
    std::fs::write(&out, page).map_err(io(&out))?;
    say!("{}", out.display());
    Ok(())
}

/// Reads the records in a run's folder.
fn read(folder: &Path) -> Result<Run, CliError> {
    let path = folder.join("metrics.jsonl");
    if !path.exists() {
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
    Ok(Run::new(folder.display().to_string(), records))
}
