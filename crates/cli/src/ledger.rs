//! `gpipe ledger`: where the time of a step goes, by kind of work, beside the least that it would
//! take on this machine.

use std::{collections::BTreeMap, path::Path};

use gpipe::{
    Device, Nanos, StepReport,
    ledger::{
        Ledger, Line, Phase, Work,
        limits::{self, Busy},
    },
};
use serde::Serialize;
use tch::Kind;

use crate::{
    CliError,
    args::LedgerArguments,
    config::Config,
    demand,
    files::write_aside,
    machine, numbers,
    output::{complain, prose, say},
    plan_training::{self, Following},
    processes::{self, Processes},
    profile, setup,
    task::{self, Batch},
};

/// Default number of counted steps.
const STEPS: u64 = 3;
/// Steps before them, which also warm up caches and the allocator.
const WARM_UP: u64 = 2;

/// What the machine can do at most, while all stages are at it.
#[derive(Debug, Clone, Copy, Serialize)]
struct Limits {
    /// Sizes of the largest product: rows, inner, columns. 0 without products.
    product: [i64; 3],
    /// Floating-point operations per second of a stage for that product.
    flops_per_s: f64,
    /// Bytes per second that a stage reads and writes.
    bytes_per_s: f64,
}

/// What is counted, as written to a file. Times are of one step, in ns, of all stages together.
#[derive(Debug, Serialize)]
struct Counted {
    machine: String,
    stages: usize,
    threads_per_stage: usize,
    micro_batches: usize,
    schedule: String,
    remat: String,
    dtype: String,
    steps: u64,
    /// A step's time.
    step_ns: u64,
    /// Multiplications and additions of a step, without those that are repeated.
    flops: f64,
    /// Pages of memory that a step was the first to touch. `None` where the system does not count
    /// them.
    new_pages: Option<u64>,
    limits: Limits,
    operations: Vec<Operation>,
}

#[derive(Debug, Clone, Serialize)]
struct Operation {
    work: String,
    phase: String,
    operation: String,
    calls: u64,
    time_ns: u64,
    /// The least time at the machine's limits; 0 where nothing is known of it.
    least_ns: u64,
    bytes: u64,
    flops: f64,
}

/// Trains a few steps and shows where their time went.
pub(crate) fn run(arguments: &LedgerArguments) -> Result<(), CliError> {
    let timeout_s = processes::timeout_s(&arguments.pipeline.config);
    Processes::among(None, timeout_s, |processes| count(arguments, processes))
}

fn count(arguments: &LedgerArguments, processes: &Processes) -> Result<(), CliError> {
    let mut config = Config::load_for_training(&arguments.pipeline)?;
    if arguments.pipeline.config.steps.is_none() {
        config.train.steps = STEPS;
    }
    let following = Following::begin(&arguments.plan, &arguments.pipeline, &mut config)?;
    check(&config)?;
    setup::check_images(&config, processes)?;
    let task = plan_training::open(&arguments.plan, &config, None)?;
    let make = task.training(0, 0, task::ALL)?;
    let model = task::model(&config, task.vocabulary().size())?;
    complain!("{}", task.summary());
    following.follow(&mut config, (task.as_ref(), &model), processes)?;
    demand::refuse(&config, &model, processes)?;
    let ledger = Ledger::default();
    let builder = setup::pipeline(&config, model)?.observer(ledger.clone());
    let mut pipeline = builder.build()?;
    let (mut reports, mut before) = (Vec::new(), None);
    for step in 0..WARM_UP + config.train.steps {
        let Batch { inputs, targets, .. } = task::made(&make, step)?;
        if step == WARM_UP {
            ledger.begin();
            before = machine::new_pages();
        }
        let report = pipeline.train_step(inputs, targets)?;
        if step >= WARM_UP {
            reports.push(report);
        }
    }
    let new_pages = before.zip(machine::new_pages()).map(|(before, now)| now - before);
    let lines = ledger.end();
    drop(pipeline);
    let counted = counted(&config, &lines, &reports, new_pages)?;
    show(&counted, arguments.operations);
    match &arguments.out {
        Some(path) => write(path, &counted),
        None => Ok(()),
    }
}

/// Refuses what a ledger cannot count.
fn check(config: &Config) -> Result<(), CliError> {
    let refuse = |reason: &str| Err(CliError::Usage(reason.into()));
    if config.pipeline.replicas > 1 {
        return refuse(
            "a ledger counts one pipeline: leave out --replicas (pipeline.replicas), and give no \
            plan with several replicas",
        );
    }
    if config.pipeline.devices.0.iter().any(|device| *device != Device::Cpu) {
        return refuse(
            "a ledger counts operations of CPUs, because a GPU does not tell how long each takes: \
            give --device cpu, or see gpipe trace",
        );
    }
    Ok(())
}

/// The counts of one step, with the least time for each operation. `new_pages`: those of all
/// steps.
fn counted(
    config: &Config,
    lines: &[Line],
    reports: &[StepReport],
    new_pages: Option<u64>,
) -> Result<Counted, CliError> {
    let steps = reports.len().max(1) as u64;
    let mut times: Vec<Nanos> = reports.iter().map(|report| report.time).collect();
    times.sort_unstable();
    let kind = task::kind(config);
    let stages = config.pipeline.stages;
    let busy = Busy { stages, threads: config.pipeline.threads_per_stage };
    complain!("measuring the machine's products and memory ...");
    let limits = limits_of(busy, kind, lines)?;
    let least = |line: &Line| {
        let seconds = match line.flops > 0.0 {
            true if limits.flops_per_s > 0.0 => line.flops / limits.flops_per_s,
            _ => line.bytes as f64 / limits.bytes_per_s.max(1.0),
        };
        (seconds * 1e9) as u64 / steps
    };
    let operations = lines.iter().map(|line| Operation {
        work: line.work.to_string(),
        phase: format!("{:?}", line.phase).to_lowercase(),
        operation: line.operation.clone(),
        calls: line.calls / steps,
        time_ns: line.time.0 / steps,
        least_ns: least(line),
        bytes: line.bytes / steps,
        flops: line.flops / steps as f64,
    });
    let first = lines.iter().filter(|line| line.phase != Phase::Recompute);
    Ok(Counted {
        machine: profile::machine(),
        stages,
        threads_per_stage: config.pipeline.threads_per_stage,
        micro_batches: config.pipeline.micro_batches,
        schedule: config.pipeline.schedule.schedule()?.to_string(),
        remat: config.pipeline.remat.to_string(),
        dtype: config.pipeline.dtype.to_string(),
        steps,
        step_ns: times.get(times.len() / 2).map_or(0, |time| time.0),
        flops: first.map(|line| line.flops).sum::<f64>() / steps as f64,
        new_pages: new_pages.map(|all| all / steps),
        limits,
        operations: operations.collect(),
    })
}

/// Measures the machine with the largest product that the network has.
fn limits_of(busy: Busy, kind: Kind, lines: &[Line]) -> Result<Limits, CliError> {
    let size = |line: &Line| line.flops / line.calls.max(1) as f64;
    let products = lines.iter().filter(|line| line.work == Work::Products);
    let largest = products
        .filter_map(|line| Some((size(line), sizes_of(&line.operation)?)))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let product = largest.map_or([0; 3], |(_, sizes)| sizes);
    let flops_per_s = match product {
        [0, 0, 0] => 0.0,
        sizes => limits::products(busy, kind, sizes)?,
    };
    Ok(Limits { product, flops_per_s, bytes_per_s: limits::bandwidth(busy)? })
}

/// Rows, inner and columns of a product of matrices, from the operation's name.
fn sizes_of(operation: &str) -> Option<[i64; 3]> {
    let (name, shapes) = operation.split_once(" [")?;
    let mut sides = shapes.trim_end_matches(']').split("][").map(|side| {
        let sizes: Option<Vec<i64>> = side.split(' ').map(|size| size.parse().ok()).collect();
        sizes
    });
    let (a, b) = (sides.next()??, sides.next()??);
    match (&a[..], &b[..]) {
        (&[rows, inner], &[columns, _]) if name.ends_with("linear_pointwise") => {
            Some([rows, inner, columns])
        }
        (&[rows, inner], &[_, columns]) => Some([rows, inner, columns]),
        _ => None,
    }
}

/// Sums over operations.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    by_phase: [u64; Phase::ALL.len()],
    least: u64,
}

impl Sum {
    fn add(&mut self, operation: &Operation) {
        let named = |phase: &Phase| format!("{phase:?}").to_lowercase() == operation.phase;
        if let Some(phase) = Phase::ALL.iter().position(named) {
            self.by_phase[phase] += operation.time_ns;
        }
        self.least += operation.least_ns;
    }

    fn time(&self) -> u64 {
        self.by_phase.iter().sum()
    }

    fn print(&self, name: &str, all: u64) {
        let ms = |ns: u64| if ns == 0 { "-".to_owned() } else { format!("{:.1}", ns as f64 / 1e6) };
        let [forward, recompute, backward, update] = self.by_phase.map(ms);
        let share = 100.0 * self.time() as f64 / all.max(1) as f64;
        let over = match self.least {
            // As it is shown, which is nothing to divide by.
            least if least < 50_000 => "-".to_owned(),
            least => format!("{:.2}", self.time() as f64 / least as f64),
        };
        say!(
            "{name:<13} {forward:>8} {recompute:>9} {backward:>8} {update:>7} {:>8} {share:>5.1} \
            {:>8} {over:>6}",
            ms(self.time()),
            ms(self.least)
        );
    }
}

/// Prints the table, and the operations that take the most time.
fn show(counted: &Counted, operations: usize) {
    let Counted { stages, threads_per_stage, limits, .. } = counted;
    let cores = (stages * threads_per_stage).min(machine::cores());
    prose!(
        "a step of {:.1} ms: {} of {}, M {}, {}, {}, {} ({} steps)",
        counted.step_ns as f64 / 1e6,
        numbers::counted(stages, "stage"),
        numbers::counted(threads_per_stage, "thread"),
        counted.micro_batches,
        counted.schedule,
        counted.remat,
        counted.dtype,
        counted.steps
    );
    let mut by_work = BTreeMap::<&str, Sum>::new();
    let mut all = Sum::default();
    for operation in &counted.operations {
        by_work.entry(&operation.work).or_default().add(operation);
        all.add(operation);
    }
    say!(
        "{:<13} {:>8} {:>9} {:>8} {:>7} {:>8} {:>5} {:>8} {:>6}",
        "work, ms",
        "forward",
        "recompute",
        "backward",
        "update",
        "all",
        "%",
        "least",
        "ratio"
    );
    for work in Work::ALL.map(|work| work.to_string()) {
        if let Some(sum) = by_work.get(work.as_str()) {
            sum.print(&work, all.time());
        }
    }
    all.print("all", all.time());
    let per_stage = |per_s: f64| per_s / 1e9;
    let [rows, inner, columns] = limits.product;
    prose!(
        "least: products at {:.0} GFLOP/s a stage ([{rows} {inner}] x [{inner} {columns}]),\n\
        the rest at {:.1} GB/s a stage, measured with all at work; ratio: all / least",
        per_stage(limits.flops_per_s),
        per_stage(limits.bytes_per_s)
    );
    let rate = counted.flops / (counted.step_ns.max(1) as f64 / 1e9);
    let limit = limits.flops_per_s * *stages as f64;
    prose!(
        "{:.3} TFLOP a step, {:.0} GFLOP/s on {}: {:.2} of what products alone make",
        counted.flops / 1e12,
        rate / 1e9,
        numbers::counted(cores, "core"),
        if limit > 0.0 { rate / limit } else { 0.0 }
    );
    if let Some(pages) = counted.new_pages {
        prose!("a step touched {pages} new pages of memory, and reused the rest");
    }
    show_longest(&counted.operations, operations);
}

/// Lists the `count` operations that take the most time.
fn show_longest(operations: &[Operation], count: usize) {
    let mut longest: Vec<&Operation> = operations.iter().collect();
    longest.sort_by_key(|operation| std::cmp::Reverse(operation.time_ns));
    if count > 0 {
        say!("{:>9} {:>9} {:>7}  operation", "ms", "least", "calls");
    }
    for operation in longest.into_iter().take(count) {
        let name = match operation.operation.as_str() {
            "" => "outside of operations",
            name => name,
        };
        say!(
            "{:>9.2} {:>9.2} {:>7}  {}, {}: {name}",
            operation.time_ns as f64 / 1e6,
            operation.least_ns as f64 / 1e6,
            operation.calls,
            operation.phase,
            operation.work
        );
    }
}

fn write(path: &Path, counted: &Counted) -> Result<(), CliError> {
    let text = serde_json::to_string(counted);
    write_aside(path, &text.map_err(|error| CliError::Usage(error.to_string()))?)?;
    say!("{}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_the_sizes_of_a_product_are_in_its_name() {
        for (operation, sizes) in [
            ("aten::mm [32 8][8 4]", Some([32, 8, 4])),
            ("aten::addmm [32 8][8 4]", Some([32, 8, 4])),
            ("mkldnn::_linear_pointwise [32 8][4 8]", Some([32, 8, 4])),
            ("aten::bmm [2 32 8][2 8 4]", None),
            ("aten::add", None),
        ] {
            assert_eq!(sizes_of(operation), sizes, "{operation}");
        }
    }
}
