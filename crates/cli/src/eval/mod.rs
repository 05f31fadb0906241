//! `gpipe eval`, and the final evaluation of `gpipe train`.
//!
//! - [`text`]: text models; [`translation`]: translation models; [`images`]: image models, with
//!   their [`confusion`] matrix
//! - here: what they have in common
//!
//! The loss is the sum over all targets, divided once by their number. So all targets have the same
//! weight, whatever K is and however samples are batched. Another K does not change a bit; another
//! M changes the order of summation.

pub(crate) mod confusion;
mod images;
mod text;
mod translation;

use std::collections::BTreeMap;

use gpipe::Pipeline;

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::EvalArguments,
    config::Data,
    processes::Processes,
    progress::Work,
    run_folder::RunFolder,
    task::{Batch, NATS, Part, Vocabulary},
};

/// The results on held-out data.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// Mean over the targets, in nats.
    pub loss: f64,
    /// Means over the targets, by name: accuracy for text; top1 and top5 for images.
    pub metrics: BTreeMap<String, f64>,
    /// Number of targets.
    pub count: f64,
    /// The loss of each part by name, if there are several parts.
    pub parts: BTreeMap<String, f64>,
}

impl Measured {
    /// The result of a model whose loss is not finite.
    pub(crate) fn none() -> Self {
        let (metrics, parts) = (BTreeMap::new(), BTreeMap::new());
        Self { loss: f64::NAN, metrics, count: 0.0, parts }
    }
}

/// Evaluates a trained model and prints the results.
pub(crate) fn run(arguments: &EvalArguments, here: Option<&Environment>) -> Result<(), CliError> {
    Processes::among(here, arguments.run.timeout_s(), |processes| of(arguments, processes))
}

fn of(arguments: &EvalArguments, processes: &Processes) -> Result<(), CliError> {
    let mut run = RunFolder::open_for(&arguments.run, &arguments.data, processes)?;
    if let Some(micro_batches) = arguments.micro_batches {
        run.config.pipeline.micro_batches = micro_batches;
    }
    // Another setting may make other data, and it is the one to name.
    processes.agree_on(&run.config)?;
    match (&run.config.data, &run.vocabulary) {
        (Data::Parallel(data), _) => translation::run(arguments, &run, data, processes),
        (_, Vocabulary::Tokens(_)) => text::run(arguments, &mut run, processes),
        (_, Vocabulary::Classes(_)) => images::run(arguments, &run, processes),
    }
}

/// The number of batches of all `parts`, or 0 if it is not known.
pub(crate) fn batches_of(parts: &[Part]) -> u64 {
    let counts = parts.iter().map(|part| part.batches.size_hint().1);
    counts.sum::<Option<usize>>().unwrap_or(0) as u64
}

/// Loss and metrics over all `parts`.
///
/// # Errors
/// As [`measure`]. There is nothing to measure.
pub(crate) fn all(pipeline: &mut Pipeline, parts: Vec<Part>) -> Result<Measured, CliError> {
    let work = Work::new("evaluating", batches_of(&parts));
    measure(pipeline, parts, &work, &|| Ok(false))?.ok_or(CliError::NothingMeasured)
}

/// Loss and metrics over all `parts`, each batch of which advances `work`. `None` if `stop` asks to
/// stop before the last batch.
pub(crate) fn measure(
    pipeline: &mut Pipeline,
    parts: Vec<Part>,
    work: &Work,
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
            work.advance();
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
