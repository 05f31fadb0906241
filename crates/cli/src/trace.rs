//! `gpipe trace`: one step, measured and predicted, drawn in the terminal, as pictures and as
//! Chrome trace JSON.
//!
//! The step is the one that a run recorded in its folder, or it is measured in a few steps of a
//! configuration.

use std::{
    io::{BufWriter, IsTerminal},
    path::{Path, PathBuf},
};

use gpipe::StepReport;
use gpipe_core::{
    draw::{self, Look},
    simulate::Timeline,
};
use gpipe_observe::{
    picture::{self, Scene},
    step_file::{self, Predicted, StepFile},
    trace,
};

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::{ConfigArguments, PipelineArguments, TraceArguments},
    config::Config,
    demand,
    files::{write_aside, write_aside_with},
    output::{complain, prose, say},
    plan_training::{self, Following},
    processes::{self, Processes},
    setup,
    task::{self, Batch},
    train::step_trace,
};

/// Default number of steps to train. The first ones are warm-up.
const STEPS: u64 = 5;
/// Valid widths of the drawing, in characters.
const WIDTHS: std::ops::RangeInclusive<usize> = 40..=1000;
/// Width if there is no terminal.
const WIDTH: usize = 120;

/// A step to draw, and the folder for files without a given name.
struct Traced {
    title: String,
    step: StepFile,
    folder: PathBuf,
}

/// Draws the step of a run, or one that it trains.
pub(crate) fn run(arguments: &TraceArguments, here: Option<&Environment>) -> Result<(), CliError> {
    let look = look(arguments.width)?;
    check_names(arguments)?;
    let named = arguments.pipeline.config.config.as_deref();
    let remedy = "give the folder of a run, or a configuration such as configs/small.toml";
    match named {
        None if arguments.pipeline.config.from.is_some() => {}
        None => return Err(CliError::Usage(remedy.into())),
        Some(path) if !path.exists() => {
            let reason = format!("{}: there is no such file or folder: {remedy}", path.display());
            return Err(CliError::Usage(reason));
        }
        Some(_) => {}
    }
    if let Some(folder) = named.filter(|path| path.is_dir()) {
        if here.is_some_and(|here| here.rank > 0) {
            return Ok(()); // one process is enough
        }
        let traced = stored(folder, arguments)?;
        draw_in_terminal(&traced.step, look);
        return write_files(&traced, arguments, None);
    }
    Processes::among(here, processes::timeout_s(&arguments.pipeline.config), |processes| {
        let traced = trained(arguments, named, processes)?;
        draw_in_terminal(&traced.step, look);
        match processes.is_first() {
            true => write_files(&traced, arguments, Some("trace.json")),
            false => Ok(()),
        }
    })
}

/// Refuses a run's folder or a configuration after a flag whose file name was omitted, because clap
/// takes it for the file name.
fn check_names(arguments: &TraceArguments) -> Result<(), CliError> {
    let TraceArguments { svg, html, chrome, .. } = arguments;
    for (flag, file) in [("--svg", svg), ("--html", html), ("--chrome", chrome)] {
        let Some(Some(path)) = file else { continue };
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "toml") {
            let path = path.display();
            return Err(CliError::Usage(format!(
                "{flag} {path}: {flag} takes the file to write: put the run or the configuration \
                first, as in `gpipe trace {path} {flag}`"
            )));
        }
    }
    Ok(())
}

/// The width of the terminal, with colors if standard output is a terminal and colors are not
/// disabled.
fn look(width: Option<usize>) -> Result<Look, CliError> {
    let is_terminal = std::io::stdout().is_terminal();
    if let Some(width) = width.filter(|width| !WIDTHS.contains(width)) {
        let (least, most) = (WIDTHS.start(), WIDTHS.end());
        return Err(CliError::Usage(format!("--width {width}: use {least} to {most}")));
    }
    let own = || {
        let (terminal_size::Width(width), _) = terminal_size::terminal_size()?;
        is_terminal.then_some(usize::from(width).clamp(*WIDTHS.start(), *WIDTHS.end()))
    };
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    let color = is_terminal && !is_set("NO_COLOR") && !is_dumb;
    Ok(Look { width: width.or_else(own).unwrap_or(WIDTH), color })
}

/// Reads the step that the run in `folder` recorded.
fn stored(folder: &Path, arguments: &TraceArguments) -> Result<Traced, CliError> {
    let given = &arguments.pipeline;
    let config = ConfigArguments { config: given.config.config.clone(), ..Default::default() };
    let shown = folder.display();
    let is_changed = *given != (PipelineArguments { config, ..Default::default() });
    if is_changed || arguments.plan.origin.is_some() {
        return Err(CliError::Usage(format!(
            "{shown} is the folder of a run, whose step is as it was: leave out what changes the \
            configuration, or name a configuration, such as {shown}/config.toml"
        )));
    }
    let path = folder.join(step_file::NAME);
    if !path.exists() {
        return Err(CliError::Usage(format!(
            "there is no {}: a run has it after ten steps and at its end; name the folder of a \
            run, as `gpipe train` printed it, or a configuration to measure a step of",
            path.display()
        )));
    }
    let step = StepFile::read(&path)?;
    let title = format!("{shown}, step {}", step.step);
    Ok(Traced { title, step, folder: folder.to_owned() })
}

/// Trains a few steps and returns the one of median duration.
fn trained(
    arguments: &TraceArguments,
    named: Option<&Path>,
    processes: &Processes,
) -> Result<Traced, CliError> {
    let mut config = Config::load_for_training(&arguments.pipeline)?;
    if arguments.pipeline.config.steps.is_none() {
        config.train.steps = STEPS;
    }
    let following = Following::begin(&arguments.plan, &arguments.pipeline, &mut config)?;
    setup::check_images(&config, processes)?;
    processes.agree_on(&config)?;
    processes.replicate(config.pipeline.replicas)?;
    let task = plan_training::open(&arguments.plan, &config, None)?;
    processes.agree_on_data(&task.fingerprint())?;
    let make = task.training(0, 0, task::ALL)?;
    let model = task::model(&config, task.vocabulary().size())?;
    complain!("{}", task.summary());
    following.follow(&mut config, (task.as_ref(), &model), processes)?;
    demand::refuse(&config, &model, processes)?;
    let mut pipeline = setup::pipeline_among(&config, model, processes)?.build()?;
    let mut reports = Vec::new();
    for step in 0..config.train.steps {
        let Batch { inputs, targets, .. } = task::made(&make, step)?;
        reports.push(pipeline.train_step(inputs, targets)?);
    }
    // The first step also warms up caches and the allocator.
    let applied = reports.iter().filter(|report| !report.skipped);
    let mut warm: Vec<&StepReport> = applied.skip(usize::from(reports.len() > 1)).collect();
    warm.sort_by_key(|report| report.time);
    let Some(&median) = warm.get(warm.len() / 2) else {
        return Err(CliError::Usage("every step was skipped: give more --steps".into()));
    };
    let timelines: Vec<&Timeline> = warm.iter().map(|report| &report.timeline).collect();
    let peaks = median.devices.iter().map(|own| own.peak).collect();
    let step = StepFile {
        step: median.step,
        simulated_gpus: gpipe::Device::gpus_are_simulated(),
        measured: median.timeline.clone(),
        predicted: step_trace::predicted(&mut pipeline, &timelines),
        memory: step_trace::memory(peaks, median.bytes.clone(), &config.pipeline.memory.0),
    };
    let name = named.map_or("defaults".into(), |path| path.display().to_string());
    let title = format!("{name}, step {} of {}", median.step, reports.len());
    Ok(Traced { title, step, folder: PathBuf::new() })
}

/// The timelines by name, in drawing order.
fn timelines(step: &StepFile) -> Vec<(&'static str, &Timeline)> {
    let predicted = step.predicted.as_ref().map(|predicted| ("predicted", &predicted.timeline));
    predicted.into_iter().chain([("measured", &step.measured)]).collect()
}

fn draw_in_terminal(step: &StepFile, look: Look) {
    say!("{}", draw::panels(&timelines(step), look).trim_end());
    match &step.predicted {
        Some(Predicted { source, timeline }) => {
            let measured = step.measured.makespan.as_ms();
            let ratio = measured / timeline.makespan.as_ms();
            prose!(
                "step {}: {measured:.1} ms, {ratio:.3} times the prediction ({source})",
                step.step
            );
        }
        None => prose!("step {}; there is no prediction of it", step.step),
    }
}

/// Writes the requested files. The Chrome trace goes to `chrome_default` if no name was given.
fn write_files(
    traced: &Traced,
    arguments: &TraceArguments,
    chrome_default: Option<&str>,
) -> Result<(), CliError> {
    let Traced { title, step, folder } = traced;
    let scene = Scene::of_step(title.as_str(), step);
    let path = |file: &Option<PathBuf>, name: &str| match file {
        Some(path) => path.clone(),
        None => folder.join(name),
    };
    if let Some(file) = &arguments.svg {
        let path = path(file, "trace.svg");
        write_aside(&path, &picture::svg(&scene))?;
        prose!("{}", path.display());
    }
    if let Some(file) = &arguments.html {
        let path = path(file, "trace.html");
        write_aside(&path, &picture::html(&scene))?;
        prose!("{}: open it in a browser", path.display());
    }
    let chrome = match (&arguments.out, &arguments.chrome) {
        (Some(out), _) => Some(out.clone()),
        (None, Some(file)) => Some(path(file, "trace.json")),
        (None, None) => chrome_default.map(|name| folder.join(name)),
    };
    if let Some(path) = chrome {
        write_aside_with(&path, |file| trace::write(BufWriter::new(file), &timelines(step)))?;
        prose!("{}: open it in chrome://tracing or ui.perfetto.dev", path.display());
    }
    Ok(())
}
