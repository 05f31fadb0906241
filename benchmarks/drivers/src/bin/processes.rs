//! Runs steps of the `gpt` workload on two threads and in two processes in turn, for
//! `benchmarks/processes.py --in-turn`. A disturbance of the machine that lasts longer than a few
//! seconds affects both steps of a pair. Prints a line of JSON for each pair.
//!
//! Usage: `processes [pairs=20] [micro_batches=8] [remat=never]`

use std::{io::Write, time::Instant};

use gpipe::{Adam, CrossEntropy, Pipeline, PipelineBuilder, RematPolicies, Schedule, TensorSpec};
use gpipe_drivers::{Arguments, Failure, LENGTH, Numbers, Processes, VOCABULARY, gpt};
use serde_json::json;
use tch::Kind;

const SAMPLES: i64 = 32;
/// Number of steps of each that still touch memory for the first time.
const WARM_UP: usize = 2;

fn main() -> Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut arguments = Arguments::read()?;
    let processes = Processes::join(&mut arguments, "2")?;
    let pairs: usize = arguments.take("pairs", "20")?;
    let micro_batches: usize = arguments.take("micro_batches", "8")?;
    let remat: RematPolicies = arguments.take("remat", "never")?;
    let builder = || -> Result<PipelineBuilder, Failure> {
        let samples = SAMPLES / micro_batches.max(1) as i64;
        let inputs = TensorSpec::new([samples, LENGTH], Kind::Int64);
        Ok(Pipeline::builder(gpt().build()?, inputs)
            .stages(2)
            .micro_batches(micro_batches)
            .schedule(Schedule::OneFOneB)
            .remat(remat.clone())
            .loss(CrossEntropy::default())
            .optimizer(Adam { lr: 1e-4, ..Adam::default() })
            .seed(1))
    };
    let mut numbers = Numbers::default();
    let mut tokens = || numbers.below(VOCABULARY, &[SAMPLES, LENGTH]);
    let (inputs, targets) = (tokens()?, tokens()?);
    let mut parted = processes.build(builder()?).build()?;
    if processes.rank > 0 {
        for _ in 0..WARM_UP + pairs {
            parted.train_step(&inputs, &targets)?;
        }
        return Ok(());
    }
    let mut threads = builder()?.build()?;
    for pair in 0..WARM_UP + pairs {
        // The order alternates from pair to pair.
        let (mut one, mut two) = (None, None);
        for turn in 0..2 {
            // The report's time is not used, because the other process begins its step while this
            // process runs the threads' step.
            let start = Instant::now();
            let (pipeline, made) = match (pair + turn) % 2 {
                0 => (&mut threads, &mut one),
                _ => (&mut parted, &mut two),
            };
            let loss = pipeline.train_step(&inputs, &targets)?.loss;
            *made = Some((loss, 1e3 * start.elapsed().as_secs_f64()));
        }
        let (one, two) = one.zip(two).ok_or("both are run")?;
        if one.0.to_bits() != two.0.to_bits() {
            return Err("the losses differ".into());
        }
        if pair >= WARM_UP {
            println!("{}", json!({ "threads_ms": one.1, "processes_ms": two.1 }));
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}
