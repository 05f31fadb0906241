//! What a training step asks of simulated GPUs: how often the host waits, and how many kernels,
//! copies and allocations there are. Needs `GPIPE_SIMULATED_GPUS`.
//!
//! Arguments: `workload=gpt-tiny stages=2 micro_batches=8 schedule=1f1b remat=never`.

use gpipe::{Device, RematPolicies};
use gpipe_bridge::device::{self, SimulatedCounts};
use gpipe_drivers::{Arguments, Failure, workload::Workload};

/// Steps that are counted, after one that also allocates what stays.
const STEPS: u64 = 2;

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let name: String = arguments.take("workload", "gpt-tiny")?;
    let stages: usize = arguments.take("stages", "2")?;
    let micro_batches: usize = arguments.take("micro_batches", "8")?;
    let schedule: String = arguments.take("schedule", "1f1b")?;
    let remat: String = arguments.take("remat", "never")?;
    arguments.done()?;
    if !device::is_simulated()? {
        return Err("set GPIPE_SIMULATED_GPUS to the number of stages, or more".into());
    }
    let workload = Workload::named(&name)?;
    let mut pipeline = workload
        .builder(micro_batches)
        .devices((0..stages).map(Device::Cuda).collect::<Vec<_>>())
        .schedule(schedule.parse()?)
        .remat(remat.parse::<RematPolicies>()?)
        .build()?;
    pipeline.train_step(&workload.inputs, &workload.targets)?;
    let before = device::simulated_counts();
    for _ in 0..STEPS {
        pipeline.train_step(&workload.inputs, &workload.targets)?;
    }
    let after = device::simulated_counts();
    let each = |count: fn(&SimulatedCounts) -> u64| (count(&after) - count(&before)) / STEPS;
    println!(
        "| {name}, {schedule}, remat {remat} | {stages} | {micro_batches} | {} | {} | {} | {} | {} \
         | {} | {} |",
        each(|own| own.host_waits),
        each(|own| own.stream_waits),
        each(|own| own.launches),
        each(|own| own.copies_in),
        each(|own| own.copies_out),
        each(|own| own.copies_across),
        each(|own| own.allocations),
    );
    Ok(())
}
