//! `gpipe eval`, and the measure that `gpipe train` ends with.
//!
//! - [`text`]: of a text model; [`images`]: of an image model, with its [`confusion`] of classes
//! - here: what both have in common
//!
//! The loss is a sum over all targets divided once by their number, so neither K nor how samples fall into batches
//! weighs a target more. At another K it is the same to the last bit; another M adds in another order.

pub(crate) mod confusion;
mod images;
mod text;

use std::collections::BTreeMap;

use gpipe::Pipeline;

use crate::{
    CliError,
    args::EvalArguments,
    run_folder::RunFolder,
    task::{Batch, Batches, NATS, Vocabulary},
};

/// What a model makes of held-out data.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// The mean over the targets, in nats.
    pub loss: f64,
    /// Means over the targets, by name: accuracy of text; top1 and top5 of images.
    pub metrics: BTreeMap<String, f64>,
    /// How many targets there were.
    pub count: f64,
}

/// Measures a trained model and prints what it found.
pub(crate) fn run(arguments: &EvalArguments) -> Result<(), CliError> {
    let mut run = RunFolder::open(&arguments.run)?;
    if let Some(micro_batches) = arguments.micro_batches {
        run.config.pipeline.micro_batches = micro_batches;
    }
    match run.vocabulary {
        Vocabulary::Tokens(_) => text::run(arguments, &run),
        Vocabulary::Classes(_) => images::run(arguments, &run),
    }
}

/// Loss and metrics over all of `batches`; none if it was to `stop` before the last of them.
pub(crate) fn measure(
    pipeline: &mut Pipeline,
    batches: Batches,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Measured>, CliError> {
    let (mut sums, mut count) = (BTreeMap::<String, f64>::new(), 0.0);
    for batch in batches {
        if stop() {
            return Ok(None);
        }
        let Batch { inputs, targets, .. } = batch?;
        let evaluation = pipeline.evaluate(inputs, targets)?;
        for metric in evaluation.metrics {
            *sums.entry(metric.name).or_default() += metric.sum;
        }
        count += evaluation.count;
    }
    if count == 0.0 {
        return Err(CliError::NothingMeasured);
    }
    let loss = sums.remove(NATS).unwrap_or(f64::NAN) / count;
    let metrics = sums.into_iter().map(|(name, sum)| (name, sum / count)).collect();
    Ok(Some(Measured { loss, metrics, count }))
}
