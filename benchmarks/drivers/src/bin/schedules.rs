//! Compares schedules, for `benchmarks/schedules.py`. Runs one step under each schedule in turn,
//! repeatedly, with predictions from profiles. Then simulates more devices from the same costs.
//! Prints lines of JSON.
//!
//! Every pipeline has the same weights and mini-batch, and must compute the same losses to the bit.
//! The profile is measured before the first reported step, under 1F1B and ZB-H1, as a user's is.
//! From it an order is made, too (`auto`). More than two devices are simulated with the costs
//! measured on two. For `gpt`, the blocks are repeated three times, to have enough layers for 16
//! devices.
//!
//! The cost of split backwards is also measured on one device, where no other device can be busy at
//! the same time. The order is that of the last of two devices under ZB-H1: a micro-batch's weight
//! gradients follow the next micro-batch's input gradients.
//!
//! Usage: `schedules [workload=gpt|amoeba] [rounds=9] [micro_batches=4,8] [passes=8]`
//!
//! `passes` is the number of passes of the profile, of [`PROFILED`] steps each.

use std::{io::Write, sync::Arc};

use gpipe::{
    Balance, Pipeline, PipelineBuilder, Remat, Result, Schedule, Tensors,
    profile::{Profiling, profile},
};
use gpipe_core::{
    StageId,
    cost::ModelCosts,
    plan::{Plan, PlanDevice, Request, predict, search},
    schedule::CustomSchedule,
};
use gpipe_drivers::{
    Arguments, Failure, longer,
    workload::{SAMPLES, STAGES, Workload},
};
use serde_json::json;

/// Number of steps of each pass of the profile.
const PROFILED: usize = 2;
/// Number of steps that still touch memory for the first time, as in a profile.
const WARM_UP: usize = 3;

fn schedules() -> Vec<Schedule> {
    let all = Schedule::NAMED.into_iter();
    all.filter(|schedule| *schedule != Schedule::GPipe).collect()
}

fn print(line: &serde_json::Value) -> std::io::Result<()> {
    println!("{line}");
    std::io::stdout().flush()
}

/// Checks that all losses of a round are bit-identical.
fn same(round: usize, losses: &[f64]) -> std::result::Result<(), Failure> {
    match losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()) {
        true => Ok(()),
        false => Err(format!("the losses of round {round} differ: {losses:?}").into()),
    }
}

/// A pipeline past its first steps.
fn started(
    workload: &Workload,
    micro_batches: usize,
    schedule: Schedule,
    balance: Balance,
) -> Result<(Plan, Pipeline)> {
    let built = workload.builder(micro_batches).schedule(schedule.clone());
    let mut pipeline = built.remat(Remat::Never).balance(balance).build()?;
    for _ in 0..WARM_UP {
        pipeline.train_step(&workload.inputs, &workload.targets)?;
    }
    let (balance, remat) = (pipeline.balance().to_vec(), Remat::Never.into());
    Ok((Plan { balance, micro_batches, schedule, remat }, pipeline))
}

/// A search among all schedules without re-materialization.
fn request<'a>(
    costs: &'a ModelCosts,
    devices: &'a [PlanDevice],
    samples: usize,
    micro_batches: usize,
    schedules: Vec<Schedule>,
) -> Request<'a> {
    Request {
        model: costs,
        devices,
        samples,
        stages: vec![devices.len()],
        micro_batches: vec![micro_batches],
        makes_orders: false,
        schedules,
        balance: None,
        remat: Some(Remat::Never.into()),
        budget: Request::BUDGET,
        usual: None,
    }
}

fn measure(
    workload: &Workload,
    micro_batches: usize,
    (rounds, passes): (usize, usize),
) -> std::result::Result<ModelCosts, Failure> {
    let batches = [(Tensors::new(&workload.inputs), Tensors::new(&workload.targets))];
    let settings = Profiling {
        micro_batches: &[micro_batches],
        schedules: &[Schedule::OneFOneB, Schedule::ZbH1],
        steps: PROFILED,
        passes,
        batches: &batches,
        machine: "this one",
        values: &[],
    };
    let build = || -> Result<PipelineBuilder> { Ok(workload.builder(micro_batches)) };
    let start = |schedule| started(workload, micro_batches, schedule, Balance::Cost);
    let mut running: Vec<(Plan, Pipeline)> =
        schedules().into_iter().map(start).collect::<Result<_>>()?;
    let costs = profile(&settings, build, |_| {}, Ok)?.costs;
    let devices = [PlanDevice::default(); STAGES];
    let made = search(&Request {
        makes_orders: true,
        ..request(&costs, &devices, SAMPLES, micro_batches, Schedule::NAMED.to_vec())
    })?;
    let balance = Balance::Layers(made.plan.balance.clone());
    running.push(started(workload, micro_batches, made.plan.schedule, balance)?);
    let names: Vec<String> = (0..running.len())
        .map(|at| match at + 1 == running.len() {
            true => "auto".to_owned(),
            false => running[at].0.schedule.to_string(),
        })
        .collect();
    for ((plan, _), name) in running.iter().zip(&names) {
        let own = predict(&costs, &[PlanDevice::default(); STAGES], SAMPLES, plan)?;
        let peaks: Vec<u64> = own.device_peaks().into_iter().map(|peak| peak.0).collect();
        print(&json!({
            "micro_batches": micro_batches,
            "schedule": name,
            "runs": plan.schedule.to_string(),
            "balance": plan.balance,
            "predicted_ms": own.step().as_ms(),
            "predicted_bubble": own.bubble(),
            "predicted_peaks": peaks,
        }))?;
    }
    for round in 0..rounds {
        let mut losses = Vec::new();
        for offset in 0..running.len() {
            // The order changes each round.
            let at = (round + offset) % running.len();
            let (_, pipeline) = &mut running[at];
            let step = pipeline.train_step(&workload.inputs, &workload.targets)?;
            losses.push(step.loss);
            let parts = |part: fn(&gpipe::DeviceReport) -> f64| -> Vec<f64> {
                step.devices.iter().map(part).collect()
            };
            print(&json!({
                "micro_batches": micro_batches,
                "schedule": names[at],
                "round": round,
                "step_ms": step.time.as_ms(),
                "bubble": step.bubble,
                "forward_ms": parts(|own| own.forward.as_ms()),
                "backward_ms": parts(|own| own.backward.as_ms()),
                "peaks": step.devices.iter().map(|own| own.peak.0).collect::<Vec<_>>(),
            }))?;
        }
        same(round, &losses)?;
    }
    Ok(costs)
}

/// Measures whole and split backwards on one device, in turn.
fn alone(
    workload: &Workload,
    micro_batches: usize,
    rounds: usize,
) -> std::result::Result<(), Failure> {
    let mut lists = Schedule::ZbH1.actions(STAGES, micro_batches).split_off(STAGES - 1);
    lists.iter_mut().flatten().for_each(|action| action.stage = StageId(0));
    let halves = Schedule::Custom(Arc::new(CustomSchedule::parse(
        "halves",
        &gpipe_core::schedule::custom::print(&lists),
    )?));
    let mut running = Vec::new();
    for (name, schedule) in [("whole", Schedule::OneFOneB), ("halves", halves)] {
        let built = workload.builder(micro_batches).stages(1).schedule(schedule);
        let mut pipeline = built.remat(Remat::Never).build()?;
        for _ in 0..WARM_UP {
            pipeline.train_step(&workload.inputs, &workload.targets)?;
        }
        running.push((name, pipeline));
    }
    for round in 0..rounds {
        let mut losses = Vec::new();
        for offset in 0..running.len() {
            let at = (round + offset) % running.len();
            let (name, pipeline) = &mut running[at];
            let step = pipeline.train_step(&workload.inputs, &workload.targets)?;
            losses.push(step.loss);
            print(&json!({
                "alone": *name,
                "micro_batches": micro_batches,
                "round": round,
                "step_ms": step.time.as_ms(),
                "backward_ms": step.devices[0].backward.as_ms(),
            }))?;
        }
        same(round, &losses)?;
    }
    Ok(())
}

/// Searches the best cut for several numbers of devices under each schedule, without
/// re-materialization, then makes an order. There are four micro-batches of `samples` samples per
/// device.
fn simulate(costs: &ModelCosts, samples: usize) -> std::result::Result<(), Failure> {
    for count in [2, 4, 8, 16] {
        let micro_batches = 4 * count;
        let devices = vec![PlanDevice::default(); count];
        let all = schedules().into_iter().map(|schedule| (schedule.to_string(), vec![schedule]));
        for (name, own) in all.chain([("auto".to_owned(), Schedule::NAMED.to_vec())]) {
            let makes_orders = name == "auto";
            let samples_ = micro_batches * samples;
            let request = request(costs, &devices, samples_, micro_batches, own);
            let found = match search(&Request { makes_orders, ..request }) {
                Ok(found) => found,
                Err(error) => {
                    let why = error.to_string();
                    print(&json!({
                        "devices": count,
                        "schedule": name,
                        "samples": samples,
                        "why": why,
                    }))?;
                    continue;
                }
            };
            let peak = found.prediction.device_peaks().into_iter().max().unwrap_or_default();
            print(&json!({
                "devices": count,
                "samples": samples,
                "micro_batches": micro_batches,
                "schedule": name,
                "runs": found.plan.schedule.to_string(),
                "stages": found.plan.balance.len(),
                "layers": costs.layers.len(),
                "simulated_ms": found.prediction.step().as_ms(),
                "bound_ms": found.made.as_ref().map(|made| made.bound.as_ms()),
                "bubble": found.prediction.bubble(),
                "peak": peak.0,
            }))?;
        }
    }
    Ok(())
}

fn main() -> std::result::Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut arguments = Arguments::read()?;
    let name: String = arguments.take("workload", "gpt")?;
    let counts = (arguments.take("rounds", "9")?, arguments.take("passes", "8")?);
    let workload = Workload::named(&name)?;
    let sizes: String = arguments.take("micro_batches", "4,8")?;
    for size in sizes.split(',') {
        let micro_batches = size.parse()?;
        alone(&workload, micro_batches, counts.0)?;
        let costs = measure(&workload, micro_batches, counts)?;
        let times = if name == "gpt" { 3 } else { 1 };
        simulate(&longer(&costs, times), SAMPLES / micro_batches)?;
    }
    Ok(())
}
