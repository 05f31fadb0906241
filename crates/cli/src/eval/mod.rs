//! `gpipe eval`, and the measure that `gpipe train` ends with.
//!
//! - [`text`]: of a text model; [`translation`]: of one that translates; [`images`]: of an image
//!   model, with its [`confusion`] of classes
//! - here: what both have in common
//!
//! The loss is a sum over all targets divided once by their number, so neither K nor how samples
//! fall into batches weighs a target more. At another K it is the same to the last bit; another M
//! adds in another order.

pub(crate) mod confusion;
mod images;
mod text;
mod translation;

use std::collections::BTreeMap;

use gpipe::Pipeline;

use crate::{
    CliError,
    args::EvalArguments,
    config::Data,
    processes::{Processes, environment::Environment},
    run_folder::RunFolder,
    task::{Batch, NATS, Part, Vocabulary},
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
    /// The loss of each part, where there are several, by name.
    pub parts: BTreeMap<String, f64>,
}

impl Measured {
    /// Of a model whose loss is no number.
    pub(crate) fn none() -> Self {
        let (metrics, parts) = (BTreeMap::new(), BTreeMap::new());
        Self { loss: f64::NAN, metrics, count: 0.0, parts }
    }
}

/// Measures a trained model and prints what it found.
pub(crate) fn run(arguments: &EvalArguments, here: Option<&Environment>) -> Result<(), CliError> {
    Processes::among(here, arguments.run.timeout_s(), |processes| of(arguments, processes))
}

fn of(arguments: &EvalArguments, processes: &Processes) -> Result<(), CliError> {
    let mut run = RunFolder::open(&arguments.run, processes)?;
    if let Some(micro_batches) = arguments.micro_batches {
        run.config.pipeline.micro_batches = micro_batches;
    }
    match (&run.config.data, &run.vocabulary) {
        (Data::Parallel(data), _) => translation::run(arguments, &run, data, processes),
        (_, Vocabulary::Tokens(_)) => text::run(arguments, &run, processes),
        (_, Vocabulary::Classes(_)) => images::run(arguments, &run, processes),
    }
}

/// Loss and metrics over all `parts`; none if it was to `stop` before the last batch of them.
pub(crate) fn measure(
    pipeline: &mut Pipeline,
    parts: Vec<Part>,
    stop: &dyn Fn() -> Result<bool, CliError>,
) -> Result<Option<Measured>, CliError> {
    let (mut sums, mut count) = (BTreeMap::<String, f64>::new(), 0.0);
    let mut losses = BTreeMap::new();
    for Part { name, batches } in parts {
        let (mut nats, mut own) = (0.0, 0.0);
        for batch in batches {
            if stop()? {
                return Ok(None);
            }
            let Batch { inputs, targets, .. } = batch?;
            let evaluation = pipeline.evaluate(inputs, targets)?;
            for metric in evaluation.metrics {
                nats += if metric.name == NATS { metric.sum } else { 0.0 };
                *sums.entry(metric.name).or_default() += metric.sum;
            }
            own += evaluation.count;
        }
        losses.extend(name.filter(|_| own > 0.0).map(|name| (name, nats / own)));
        count += own;
    }
    if count == 0.0 {
        return Err(CliError::NothingMeasured);
    }
    let loss = sums.remove(NATS).unwrap_or(f64::NAN) / count;
    let metrics = sums.into_iter().map(|(name, sum)| (name, sum / count)).collect();
    Ok(Some(Measured { loss, metrics, count, parts: losses }))
}
