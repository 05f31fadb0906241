//! The metrics of a resumed run: which records are kept, and whether any are missing.

use gpipe_checkpoint::manifest::TrainPosition;
use gpipe_observe::metrics::{Record, scan};

use super::{start::Start, steps::due};
use crate::{
    CliError,
    files::io,
    metrics::{METRICS, Metrics},
    output::say,
};

/// Refuses metrics that end before the checkpoint, because the run's curves would have a gap.
pub(super) fn check(start: &Start) -> Result<(), CliError> {
    let Some(checkpoint) = &start.checkpoint else { return Ok(()) };
    let own = start.out.path().join(METRICS);
    let path = start.earlier_metrics.as_ref().unwrap_or(&own);
    let progress = &checkpoint.manifest().progress;
    if !path.exists() {
        say!("there is no {}: it begins after step {}", path.display(), progress.batches);
        return Ok(());
    }
    let mut found: u64 = 0;
    scan(path, |record| {
        found += u64::from(is_step_until(record, progress.samples));
    })?;
    // An older checkpoint has no number of records. At least one is expected.
    let wanted = progress.records.unwrap_or(progress.batches.min(1));
    if found >= wanted {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{}: it has records of {found} steps up to step {}, not of the {wanted} that were written \
        before {}: it was cut or emptied; bring it back, or remove it: a new one then begins \
        after that step",
        path.display(),
        progress.batches,
        checkpoint.folder().display()
    )))
}

/// Opens the run's metrics: new ones, or those of the run that resumes at `position` and whose next
/// update is number `step`.
pub(super) fn open(
    start: &Start,
    position: &TrainPosition,
    step: u64,
) -> Result<Metrics, CliError> {
    let out = start.out.path();
    if start.checkpoint.is_none() {
        return Metrics::create(out);
    }
    if let Some(earlier) = &start.earlier_metrics {
        // The curves of the earlier run are part of this one.
        let copy = out.join(METRICS);
        std::fs::copy(earlier, &copy).map_err(io(&copy))?;
    }
    // Steps after the checkpoint are trained and recorded again. So is an evaluation at the very
    // end, because it comes before the files that it describes.
    let again = position.batches >= start.config.train.steps || due(&start.config, position);
    // Samples up to the last record. The tokens of an evaluation do not show skipped steps.
    let mut samples = 0;
    Metrics::resume(out, step, |record| match record {
        Record::Step(step) => {
            samples = step.samples_total;
            is_step_until(record, position.samples)
        }
        Record::Evaluation(_) => {
            samples < position.samples || samples == position.samples && !again
        }
    })
}

/// Whether a record is that of a step within the first `samples` samples.
fn is_step_until(record: &Record, samples: u64) -> bool {
    matches!(record, Record::Step(step) if step.samples_total <= samples)
}
