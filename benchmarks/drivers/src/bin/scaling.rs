//! Reproduces the paper's tables 2 and 3 (Huang et al. 2019) on this machine, for
//! `benchmarks/bench.py`.
//!
//! One mini-batch runs on K stages in M micro-batches, under GPipe's schedule with
//! re-materialization. Two stages are measured, one step of each M in turn, repeatedly. Two, four
//! and eight stages are simulated from profiles of two, over links between threads and over slower
//! links. Prints lines of JSON.
//!
//! Each profile is measured before the first reported step, in separate pipelines. For two stages,
//! the cut is that of the running pipeline. For more, it minimizes the time of the slowest stage by
//! the profile.
//!
//! Usage: `scaling [workload=gpt|amoeba] [rounds=5] [micro_batches=1,4,32]`

use std::io::Write;

use gpipe::{
    Balance, Nanos, Pipeline, PipelineBuilder, Remat, Result, Schedule, Tensors,
    profile::{Profiling, profile},
};
use gpipe_core::{
    cost::{ModelCosts, Transport},
    partition::by_cost,
    plan::{Plan, PlanDevice, predict},
};
use gpipe_drivers::{
    Arguments, Failure,
    workload::{SAMPLES, STAGES, Workload},
};
use serde_json::json;

/// Number of steps that still touch memory for the first time, as in a profile.
const WARM_UP: usize = 3;
/// Number of steps of a profile.
const PROFILED: usize = 3;
/// Numbers of stages that are simulated.
const SIMULATED: [usize; 3] = [STAGES, 4, 8];

/// A kind of link.
struct Link {
    name: &'static str,
    transport: Transport,
}

/// Links beside those between threads, which the profile measures. They have nominal rates, and a
/// latency that is typical of TCP within a rack.
const SLOW: [Link; 3] = [
    Link { name: "10 Gbit/s", transport: bits(10_000_000_000) },
    Link { name: "1 Gbit/s", transport: bits(1_000_000_000) },
    Link { name: "100 Mbit/s", transport: bits(100_000_000) },
];

const fn bits(per_s: u64) -> Transport {
    Transport { latency: Nanos(50_000), bytes_per_s: per_s / 8 }
}

fn print(line: &serde_json::Value) -> std::io::Result<()> {
    println!("{line}");
    std::io::stdout().flush()
}

/// One M: its costs, and a pipeline past its first steps with its plan.
struct Cell {
    micro_batches: usize,
    costs: ModelCosts,
    plan: Plan,
    pipeline: Pipeline,
}

impl Cell {
    fn new(workload: &Workload, micro_batches: usize) -> Result<Self> {
        let batches = [(Tensors::new(&workload.inputs), Tensors::new(&workload.targets))];
        let settings = Profiling {
            micro_batches: &[micro_batches],
            schedules: &[Schedule::GPipe],
            steps: PROFILED,
            passes: 1,
            batches: &batches,
            machine: "this one",
            values: &[],
        };
        let built = || -> Result<PipelineBuilder> {
            Ok(workload.builder(micro_batches).schedule(Schedule::GPipe))
        };
        let costs = profile(&settings, built, |_| {}, Ok)?.costs;
        let mut pipeline = built()?.remat(Remat::Always).balance(Balance::Cost).build()?;
        for _ in 0..WARM_UP {
            pipeline.train_step(&workload.inputs, &workload.targets)?;
        }
        let plan = plan(pipeline.balance().to_vec(), micro_batches);
        Ok(Self { micro_batches, costs, plan, pipeline })
    }

    /// Prints simulations over every kind of link.
    fn simulate(&self) -> std::result::Result<(), Failure> {
        let threads = Link { name: "threads", transport: self.costs.transport };
        for Link { name, transport } in [threads].iter().chain(&SLOW) {
            let costs = ModelCosts { transport: *transport, ..self.costs.clone() };
            for stages in SIMULATED {
                let plan = match stages {
                    STAGES => self.plan.clone(),
                    _ => plan(fastest(&costs, self.micro_batches, stages)?, self.micro_batches),
                };
                let devices = vec![PlanDevice::default(); stages];
                let found = predict(&costs, &devices, SAMPLES, &plan)?;
                let times: Vec<u64> = found
                    .stages
                    .iter()
                    .map(|own| (own.cost.forward + own.cost.rematerialize + own.cost.backward).0)
                    .collect();
                let mean = times.iter().sum::<u64>() as f64 / stages as f64;
                print(&json!({
                    "link": name,
                    "stages": stages,
                    "micro_batches": self.micro_batches,
                    "balance": plan.balance,
                    "simulated_ms": found.step().as_ms(),
                    "bubble": found.bubble(),
                    "imbalance": times.iter().max().copied().unwrap_or(0) as f64 / mean,
                }))?;
            }
        }
        Ok(())
    }
}

fn plan(balance: Vec<usize>, micro_batches: usize) -> Plan {
    Plan { balance, micro_batches, schedule: Schedule::GPipe, remat: Remat::Always.into() }
}

/// The cut that minimizes the time of the slowest stage.
fn fastest(
    costs: &ModelCosts,
    micro_batches: usize,
    stages: usize,
) -> std::result::Result<Vec<usize>, Failure> {
    let layers = costs.at(SAMPLES.div_ceil(micro_batches), &Schedule::GPipe);
    let mut times: Vec<u64> =
        layers.iter().map(|own| (own.forward + own.rematerialize + own.backward).0).collect();
    // The loss runs with the last layer.
    if times.len() > costs.layers.len() {
        let loss = times.pop().unwrap_or(0);
        if let Some(last) = times.last_mut() {
            *last += loss;
        }
    }
    Ok(by_cost(&times, stages)?)
}

fn main() -> std::result::Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut arguments = Arguments::read()?;
    let name: String = arguments.take("workload", "gpt")?;
    let rounds: usize = arguments.take("rounds", "5")?;
    let counts: String = arguments.take("micro_batches", "1,4,32")?;
    let workload = Workload::named(&name)?;
    let mut cells = Vec::new();
    for count in counts.split(',') {
        let cell = Cell::new(&workload, count.parse()?)?;
        cell.simulate()?;
        cells.push(cell);
    }
    for round in 0..rounds {
        for offset in 0..cells.len() {
            // The order changes each round.
            let at = (round + offset) % cells.len();
            let Cell { micro_batches, pipeline, .. } = &mut cells[at];
            let step = pipeline.train_step(&workload.inputs, &workload.targets)?;
            print(&json!({
                "round": round,
                "stages": STAGES,
                "micro_batches": micro_batches,
                "step_ms": step.time.as_ms(),
                "bubble": step.bubble,
            }))?;
        }
    }
    Ok(())
}
