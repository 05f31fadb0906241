//! Evaluates an image model on held-out images.

use std::sync::Arc;

use super::confusion::Confusion;
use crate::{
    CliError,
    args::EvalArguments,
    files::{check_writable, write_aside},
    output::say,
    processes::Processes,
    progress::Work,
    run_folder::RunFolder,
    task::{
        Batch,
        classification::{self, Classification, tell_unreadable},
        kind,
    },
};
use gpipe_data::images::{ImageFolder, ImageSet};

/// Maximum number of classes for which the whole table is printed.
const TABLE_CLASSES_MAX: usize = 40;
/// Maximum number of confusions that are listed.
const LISTED_MAX: usize = 10;

pub(super) fn run(
    arguments: &EvalArguments,
    run: &RunFolder,
    processes: &Processes,
) -> Result<(), CliError> {
    if !arguments.text.is_empty() || !arguments.data.is_empty() || arguments.tokens.is_some() {
        return Err(CliError::Usage(
            "the model classifies images: leave --text and --tokens out; --images DIR names others"
                .into(),
        ));
    }
    let classes = run.vocabulary.classes()?;
    if let Some(path) = &arguments.confusion {
        processes.decided(|| check_writable(path))?; // before any work
    }
    // A wrong path is told before the weights are read, and wrong weights before the run's images.
    let named = arguments.images.is_some().then(|| images(arguments, run)).transpose()?;
    let mut pipeline = run.pipeline(processes)?;
    let (set, what) = named.map_or_else(|| images(arguments, run), Ok)?;
    processes.agree_on_held_out(&classification::fingerprint(set.as_ref()))?;
    let images = classification::evaluation(&run.config, set, None)?;
    let mut confusion = Confusion::new(classes.len());
    let work = Work::new("evaluating", images.batches() as u64);
    for batch in classification::readable(&images, &run.config, pipeline.is_fed())? {
        let Batch { inputs, targets, .. } = classification::tensors(batch?, kind(&run.config))?;
        let logits = classification::logits(&mut pipeline, inputs)?;
        confusion.add(&logits, &targets)?;
        work.advance();
    }
    drop(work);
    tell_unreadable(&images.unreadable());
    if confusion.count() == 0 {
        return Err(CliError::NothingMeasured);
    }
    if let Some(path) = &arguments.confusion {
        let tsv = confusion.tsv(classes);
        processes.decided(|| write_aside(path, &tsv))?;
    }
    let (loss, top1, top5) = (confusion.loss(), confusion.top(1), confusion.top(5));
    if arguments.json {
        let line = serde_json::json!({
            "loss": loss,
            "top1": top1,
            "top5": top5,
            "images": confusion.count(),
            "unreadable": images.unreadable().len(),
        });
        say!("{line}");
        return Ok(());
    }
    let uniform = (classes.len() as f64).ln();
    say!("images         {what}: {}", confusion.count());
    say!("loss           {loss:.6} nats/image (a uniform guess: {uniform:.6})");
    say!("top-1          {:.2}%", 100.0 * top1);
    if run.vocabulary.is_telling("top5") {
        say!("top-5          {:.2}%", 100.0 * top5);
    }
    let worst = confusion.worst(LISTED_MAX);
    if !worst.is_empty() {
        say!("taken for another most often (true class, as what, how many of its images):");
        for (class, other, count, of) in worst {
            say!("  {:<20} {:<20} {count} of {of}", classes[class], classes[other]);
        }
    }
    if classes.len() <= TABLE_CLASSES_MAX {
        say!("rows: true classes; columns: what they were taken for, in the same order");
        say!("{}", confusion.table(classes).trim_end());
    }
    if let Some(path) = &arguments.confusion {
        say!("confusions     {}", path.display());
    }
    Ok(())
}

/// The images to measure on, with a description.
fn images(
    arguments: &EvalArguments,
    run: &RunFolder,
) -> Result<(Arc<dyn ImageSet>, String), CliError> {
    let classes = run.vocabulary.classes()?;
    match &arguments.images {
        Some(folder) => {
            let set = ImageFolder::with_classes(folder, classes)?;
            let what = format!("{}{}", folder.display(), classification::left_out(&set));
            Ok((Arc::new(set), what))
        }
        None => {
            let held_out = Classification::held_out(&run.config).map_err(|error| match error {
                CliError::Data(source @ gpipe_data::Error::MissingPath { .. }) => {
                    CliError::Usage(format!(
                        "{source}: it is the run's own; run where you trained, or name others \
                        with --images DIR"
                    ))
                }
                other => other,
            });
            let (set, what) = held_out?;
            let own = set.classes();
            if own != classes {
                return Err(CliError::Usage(format!(
                    "{what}: its {} classes are not the {} of the model: bring its data back, or \
                    name others with --images DIR",
                    own.len(),
                    classes.len()
                )));
            }
            Ok((set, what))
        }
    }
}
