//! Checks a run's threads and the memory of a step against what this machine has, before the first
//! step, and says how long the run may take.
//!
//! Without this check, the system kills a run whose mini-batch does not fit, without a message or a
//! checkpoint.

use gpipe::{
    Bytes, Device, Nanos, Sequence,
    estimate::Rate,
    ledger::limits::{self, Busy},
};
use gpipe_core::{
    cost::ModelCosts,
    partition,
    plan::{Plan, PlanDevice, PlanError, Prediction, predict},
};

use crate::{
    CliError,
    config::{Config, Data},
    machine::{self, Available},
    numbers::{counted, seconds, time},
    output::{complain, prose},
    processes::Processes,
    setup, task,
    values::PackingChoice,
};

/// Maximum number of threads of a stage per core. Nobody asks for more on purpose.
const THREADS_PER_CORE_MAX: usize = 4;
/// Maximum number of actions of a step whose memory is simulated; a longer simulation takes too
/// much time.
const ACTIONS_MAX: usize = 1 << 21;
/// Maximum number of micro-batches of all stages for which a run's time is estimated.
const ESTIMATED_ACTIONS_MAX: usize = 1 << 14;
/// How to run anyway.
const INSIST: &str = "or insist with --set pipeline.oversubscribe=true";

/// Reports settings that cannot take effect as given, and refuses those that would end the run
/// midway: see `pipeline.oversubscribe`.
///
/// `steps` are those that the run still has. How long they may take is printed, and how much memory
/// a step needs.
pub(crate) fn check(
    config: &Config,
    model: &Sequence,
    processes: &Processes,
    steps: u64,
) -> Result<(), CliError> {
    tell_micro_batches(config);
    tell_turns(config, processes);
    refuse(config, model, processes)?;
    if processes.is_first() && steps > 0 {
        tell_estimate(config, model, processes, steps);
    }
    Ok(())
}

/// Only refuses, as [`check`] does, and reports nothing.
pub(crate) fn refuse(
    config: &Config,
    model: &Sequence,
    processes: &Processes,
) -> Result<(), CliError> {
    check_threads(config)?;
    check_memory(config, model, processes)
}

/// Reports if a mini-batch has fewer samples than micro-batches, since it is then cut into one
/// micro-batch per sample. The number of sentences in a translation mini-batch is not known in
/// advance.
fn tell_micro_batches(config: &Config) {
    let (asked, samples) = (config.pipeline.micro_batches, config.samples_of_a_pipeline());
    if asked > samples && !matches!(config.data, Data::Parallel(_)) {
        prose!(
            "pipeline.micro_batches = {asked} is more than the {samples} samples of a mini-batch: \
            it is cut into {samples}"
        );
    }
}

/// The largest number of CPU stages in one process.
fn stages_here(config: &Config, processes: &Processes) -> usize {
    let devices = &config.pipeline.devices.0;
    let stages = config.pipeline.stages;
    let cpus = match &devices[..] {
        [Device::Cpu] => stages,
        [_] => 0,
        several => several.iter().filter(|device| **device == Device::Cpu).count(),
    };
    let in_a_pipeline = (processes.count() / config.pipeline.replicas.max(1)).max(1);
    cpus.min(stages.div_ceil(in_a_pipeline))
}

/// Reports if there are more threads than cores.
fn tell_turns(config: &Config, processes: &Processes) {
    let (each, cores) = (config.pipeline.threads_per_stage, machine::cores());
    let stages = stages_here(config, processes).saturating_mul(processes.replicas_here());
    let all = stages.saturating_mul(each);
    if all > cores {
        prose!(
            "{stages} stages of {each} threads are {all} threads on {cores} cores: they take turns"
        );
    }
    let is_text = matches!(config.data, Data::Text(_) | Data::Jsonl(_) | Data::Parallel(_));
    let threads = config.images.threads;
    if !is_text && threads > cores {
        prose!("images.threads = {threads} on {cores} cores: they take turns");
    }
}

/// Prints how long `steps` steps may take and how much memory they need, from shapes and a short
/// measurement of this machine. Nothing is known of GPUs. What cannot be estimated is not printed.
fn tell_estimate(config: &Config, model: &Sequence, processes: &Processes, steps: u64) {
    let here = stages_here(config, processes);
    let is_here = config.pipeline.devices.0.iter().all(|device| *device == Device::Cpu);
    let micro_batches = config.pipeline.micro_batches;
    let is_long = config.pipeline.stages.saturating_mul(micro_batches) > ESTIMATED_ACTIONS_MAX;
    if !is_here || here == 0 || is_long {
        return;
    }
    // Threads take turns where there are more of them than cores.
    let pipelines = processes.replicas_here().saturating_mul(processes.on_this_host());
    let all = here.saturating_mul(pipelines);
    let threads = config.pipeline.threads_per_stage;
    let busy = Busy { stages: all.min(machine::cores()), threads };
    let Ok(mut rate) = limits::roughly(busy, task::kind(config), setup::kernels(config)) else {
        return;
    };
    let share = busy.stages as f64 / all as f64;
    (rate.flops_per_s, rate.bytes_per_s) = (rate.flops_per_s * share, rate.bytes_per_s * share);
    let Ok(Some(needs)) = needs(config, model, processes, &rate) else { return };
    let available = machine::available();
    let available = available.map_or(String::new(), |own| format!("; {} here", own.bytes));
    // Rows of one sample each are as long as the longest of their mini-batch.
    let about = match config.packing() {
        Some(PackingChoice::None) => "up to",
        _ => "about",
    };
    prose!(
        "estimate: {about} {} for {}; {} for a stage{available}",
        time(seconds(needs.step.as_ms() / 1e3 * steps as f64)),
        counted(steps, "step"),
        needs.largest
    );
    if let Some(Exceeded { device, peak, cap }) = needs.exceeded {
        complain!(
            "gpipe: warning: device {device} needs {about} {peak} by this estimate, and \
            pipeline.memory gives it {cap}; gpipe plan finds what fits, if anything does"
        );
    }
}

fn check_threads(config: &Config) -> Result<(), CliError> {
    let (each, cores) = (config.pipeline.threads_per_stage, machine::cores());
    let most = cores.saturating_mul(THREADS_PER_CORE_MAX);
    if each <= most || config.pipeline.oversubscribe {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "pipeline.threads_per_stage = {each}: there are {cores} cores, and more than {most} \
        threads of a stage would only wait for one another: use 1 to {cores}, {INSIST}"
    )))
}

fn check_memory(config: &Config, model: &Sequence, processes: &Processes) -> Result<(), CliError> {
    let Some(Available { bytes: available, by }) = machine::available() else { return Ok(()) };
    let Some(needs) = needs(config, model, processes, &Rate::default())? else { return Ok(()) };
    let all = needs.stages + needs.batches;
    if all <= available {
        return Ok(());
    }
    let Needs { stages, batches, samples, .. } = needs;
    let (key, value) = match &config.data {
        Data::Parallel(data) => ("data.batch_tokens", data.batch_tokens),
        _ => ("train.mini_batch", config.train.mini_batch),
    };
    let whose = match processes.on_this_host() {
        1 => String::new(),
        several => format!(" in the {several} processes on this machine"),
    };
    let text = format!(
        "{key} = {value}: a step of {samples} samples needs about {all} of memory{whose} ({stages} \
        for the stages' tensors, {batches} for batches made ahead), and {available} are available \
        ({by})"
    );
    if config.pipeline.oversubscribe {
        prose!("{text}: it goes on, as pipeline.oversubscribe says");
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{text}: use a smaller {key}, more pipeline.micro_batches or --remat always, {INSIST}"
    )))
}

/// The first device whose need exceeds its cap.
struct Exceeded {
    device: usize,
    peak: Bytes,
    cap: Bytes,
}

/// What the processes on this host need for a step, estimated from shapes.
struct Needs {
    /// Memory of all stages on this host, within their caps.
    stages: Bytes,
    /// Memory that the largest stage needs, whatever its cap.
    largest: Bytes,
    exceeded: Option<Exceeded>,
    /// Memory of batches made ahead.
    batches: Bytes,
    samples: usize,
    /// The time of a step at the given speed.
    step: Nanos,
}

/// The needs of the processes on this host, each with as many CPU stages as any process has. `None`
/// if there are no CPU stages or the step is too long to simulate.
fn needs(
    config: &Config,
    model: &Sequence,
    processes: &Processes,
    rate: &Rate,
) -> Result<Option<Needs>, CliError> {
    let here = stages_here(config, processes);
    let samples = samples(config);
    let micro_batches = config.pipeline.micro_batches.min(samples).max(1);
    let devices = config.pipeline.stages;
    if here == 0 || devices.saturating_mul(micro_batches) > ACTIONS_MAX {
        return Ok(None);
    }
    let predicted = predicted(config, model, (samples, micro_batches), rate)?;
    let (peaks, step) = (predicted.device_peaks(), predicted.step());
    let caps = &config.pipeline.memory.0;
    let cap_of =
        |device: usize| caps.get(device).or(caps.first().filter(|_| caps.len() == 1)).copied();
    let mut of_devices = peaks.iter().copied().enumerate();
    let exceeded = of_devices.find_map(|(device, peak)| {
        cap_of(device).filter(|&cap| cap < peak).map(|cap| Exceeded { device, peak, cap })
    });
    let capped = peaks.iter().enumerate().map(|(device, &peak)| {
        cap_of(device).map_or(peak, |cap| peak.min(cap)) // the allocator enforces the cap
    });
    let mut capped: Vec<Bytes> = capped.collect();
    capped.sort_unstable_by(|a, b| b.cmp(a));
    let largest = peaks.iter().copied().max().unwrap_or_default();
    // A stage is here at most once for each pipeline.
    let pipelines = processes.replicas_here().saturating_mul(processes.on_this_host());
    let copies = pipelines.min(config.pipeline.replicas.max(1));
    let all = capped.into_iter().flat_map(|peak| std::iter::repeat_n(peak, copies));
    let stages: Bytes = all.take(here.saturating_mul(pipelines)).sum();
    let batch = task::inputs(config, samples);
    let batch: u64 = batch.iter().map(gpipe::TensorSpec::bytes).sum();
    // One batch is being prepared, one is in the step, and the queue holds the others.
    let each = batch.saturating_mul(config.train.prefetch as u64 + 2);
    let batches = Bytes(each.saturating_mul(pipelines as u64));
    Ok(Some(Needs { stages, largest, exceeded, batches, samples, step }))
}

/// The number of samples of a step. For sentences, it is the number of sentences of maximum length
/// that fit the tokens of a mini-batch.
fn samples(config: &Config) -> usize {
    match &config.data {
        Data::Parallel(data) => (data.batch_tokens / data.length.max(1)).max(1),
        _ => config.samples_of_a_pipeline(),
    }
}

/// A simulation of the step with costs from shapes.
fn predicted(
    config: &Config,
    model: &Sequence,
    (samples, micro_batches): (usize, usize),
    rate: &Rate,
) -> Result<Prediction, CliError> {
    let mut uncapped = config.uncapped();
    uncapped.pipeline.devices.0 = vec![Device::Cpu];
    let sizes = [samples.div_ceil(micro_batches), samples / micro_batches];
    let costs = setup::pipeline(&uncapped, model.clone())?.estimate(&sizes, rate)?;
    let schedule = config.pipeline.schedule.schedule()?;
    let devices = vec![PlanDevice::default(); config.pipeline.stages];
    let stages = schedule.stages(devices.len());
    let stages = stages.map_err(|error| PlanError::Setting(error.to_string()))?;
    let balance = match &config.pipeline.balance {
        gpipe::Balance::Layers(layers) => fitting(layers, stages, costs.layers.len())?,
        gpipe::Balance::Uniform => uniform(costs.layers.len(), stages)?,
        gpipe::Balance::Cost => by_cost(&costs, sizes[0], stages)?,
    };
    let remat = config.pipeline.remat.clone();
    // As configured: a schedule from a file is for that many. A mini-batch of fewer samples has
    // fewer.
    let micro_batches = config.pipeline.micro_batches;
    let plan = Plan { balance, micro_batches, schedule, remat };
    Ok(predict(&costs, &devices, samples, &plan)?)
}

fn fitting(balance: &[usize], stages: usize, layers: usize) -> Result<Vec<usize>, PlanError> {
    partition::check_balance(balance, stages, layers)?;
    Ok(balance.to_vec())
}

fn uniform(layers: usize, stages: usize) -> Result<Vec<usize>, PlanError> {
    Ok(partition::uniform(layers, stages)?)
}

/// An approximation of the cut that the pipeline will choose.
fn by_cost(costs: &ModelCosts, samples: usize, stages: usize) -> Result<Vec<usize>, PlanError> {
    let layers = costs.at(samples, &gpipe::Schedule::OneFOneB);
    let times: Vec<u64> = layers.iter().map(|cost| cost.forward.0.max(1)).collect();
    let layers = times.get(..costs.layers.len()).unwrap_or(&times);
    Ok(partition::by_weighted_cost(layers, &vec![1; stages])?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{args::ConfigArguments, processes::tests::in_two};

    const TWO_REPLICAS: &str = "[model]\nvocabulary = 300\nfeatures = 16\nheads = 2\nhidden = 32\n\
        blocks = 1\n[data]\nsequence = 8\n[pipeline]\nstages = 1\nmicro_batches = 1\n\
        replicas = 2\n[train]\nmini_batch = 4\n";

    /// Each process compared its own need with all of the machine's memory. Launched processes that
    /// did not fit together began, and the system killed one of them.
    #[test]
    fn regression_the_needs_of_all_processes_on_a_host_count() {
        let of = |processes: &Processes| {
            let arguments = ConfigArguments::default();
            let config = Config::from_text(TWO_REPLICAS, Path::new("two.toml"), &arguments);
            let config = config.unwrap();
            let model = task::model(&config, 300).unwrap();
            let Needs { stages, batches, .. } =
                needs(&config, &model, processes, &Rate::default()).unwrap().unwrap();
            (stages.0, batches.0)
        };
        let mut one = None;
        Processes::among(None, 1, |alone| {
            one = Some(of(alone));
            Ok(())
        })
        .unwrap();
        let (stages, batches) = one.unwrap();
        assert!(stages > 0 && batches > 0, "{stages} {batches}");
        assert_eq!(in_two(of), [(2 * stages, 2 * batches); 2]);
    }
}
