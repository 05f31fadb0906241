//! Runs one measurement of the `gpt` workload, for `benchmarks/bench.py`.
//!
//! Builds the pipeline, runs the steps, and prints one line of JSON: losses, the milliseconds of
//! each step and its parts, the last step simulated from the one before it, and bytes.
//!
//! ```text
//! Usage: gpt_step [stages=2] [micro_batches=8] [schedule=1f1b] [remat=never] [steps=3]
//!        [kernels=fastest|aten] [dtype=float32|bfloat16] [balance=cost] [early=true] [threads=1]
//!        [samples=32] [device=cpu] [keep_freed=true] [folder=DIR]
//!        [vocabulary=8192] [length=128] [features=512] [heads=8] [hidden=2048] [blocks=8]
//! ```
//!
//! With `folder`, writes the initial weights and the tokens there, as the peers' starting point.

use gpipe::{Adam, CrossEntropy};
use gpipe_drivers::{Arguments, Failure, Measurement, Numbers};
use tch::Kind;

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    arguments.keep_freed()?;
    let model = gpipe_drivers::gpt_of(&mut arguments)?;
    let (vocabulary, length) = (model.vocabulary, model.positions);
    let mut measurement = Measurement::new(arguments)?;
    let pipeline = measurement
        .builder(model.build()?, &[length], Kind::Int64)?
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 1e-4, ..Adam::default() })
        .build()?;
    let (mut numbers, shape) = (Numbers::default(), [measurement.samples, length]);
    let mut tokens = || numbers.below(vocabulary, &shape);
    let (inputs, targets) = (tokens()?, tokens()?);
    measurement.run("gpt", pipeline, &inputs, &targets)
}
