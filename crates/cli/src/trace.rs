//! `gpipe trace`: one measured step beside the simulator's.

use std::{fs::File, io::BufWriter};

use gpipe::StepReport;
use gpipe_core::draw;
use gpipe_observe::trace;

use crate::{
    CliError,
    args::TraceArguments,
    config::Config,
    metrics::io,
    output::say,
    setup,
    task::{self, Batch},
};

/// Steps that are trained unless --steps says otherwise: the first ones are warm-up.
const STEPS: u64 = 5;
/// Lines shorter or longer than this show nothing.
const WIDTHS: std::ops::RangeInclusive<usize> = 40..=1000;

/// Trains, takes the step of median length, simulates it, and shows both.
pub(crate) fn run(arguments: &TraceArguments) -> Result<(), CliError> {
    let mut config = Config::load_for_training(&arguments.pipeline)?;
    if arguments.pipeline.config.steps.is_none() {
        config.train.steps = STEPS;
    }
    if !WIDTHS.contains(&arguments.width) {
        let (width, least, most) = (arguments.width, WIDTHS.start(), WIDTHS.end());
        return Err(CliError::Usage(format!("--width {width}: use {least} to {most}")));
    }
    let task = task::open(&config, None)?;
    let make = task.training(0, 0)?;
    let model = task::model(&config, task.vocabulary().size())?;
    let mut pipeline = setup::pipeline(&config, model).build()?;
    let mut reports = Vec::new();
    for step in 0..config.train.steps {
        let Batch { inputs, targets, .. } = task::made(&make, step)?;
        reports.push(pipeline.train_step(inputs, targets)?);
    }
    // The first step also warms up caches and the allocator.
    let applied = reports.iter().filter(|report| !report.skipped);
    let warm: Vec<&StepReport> = applied.skip(usize::from(reports.len() > 1)).collect();
    let mut by_time = warm.clone();
    by_time.sort_by_key(|report| report.time);
    let Some(median) = by_time.get(by_time.len() / 2) else {
        return Err(CliError::Usage("every step was skipped: give more --steps".into()));
    };
    let timelines: Vec<_> = warm.iter().map(|report| &report.timeline).collect();
    let simulated = pipeline.simulate(&timelines)?;

    let both = [("measured", &median.timeline), ("simulated", &simulated)];
    let look = draw::Look { width: arguments.width, color: false };
    let drawing = draw::panels(&both, look);
    say!("{}", drawing.trim_end());
    let (measured_ms, simulated_ms) = (median.time.as_ms(), simulated.makespan.as_ms());
    say!(
        "measured:  {measured_ms:.1} ms, bubble {:.1}% (step {} of {})",
        100.0 * median.bubble,
        median.step,
        reports.len()
    );
    say!(
        "simulated: {simulated_ms:.1} ms, bubble {:.1}%, from the median time of each kind of action on each stage in {} steps",
        100.0 * simulated.bubble(),
        warm.len()
    );
    say!("the measured step takes {:.3} of the simulated one", measured_ms / simulated_ms);
    let path = &arguments.out;
    let file = BufWriter::new(File::create(path).map_err(io(path))?);
    trace::write(file, &both).map_err(io(path))?;
    say!("{}: open it in chrome://tracing or ui.perfetto.dev", path.display());
    Ok(())
}
