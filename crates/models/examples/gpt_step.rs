//! One measurement of the `gpt` workload for `benchmarks/bench.py`: builds the pipeline, runs the steps,
//! and prints one line of JSON: losses, the milliseconds of each step and of its parts, what the simulator makes of
//! the step before the last, and bytes.
//!
//! Usage: gpt_step [stages=2] [micro_batches=8] [schedule=1f1b] [remat=never] [steps=3] [kernels=fastest|aten]
//!        [dtype=float32|bfloat16] [balance=cost] [early=true] [threads=1] [samples=32] [device=cpu] [keep_freed=true] [folder=DIR]
//! With `folder` the initial weights and the tokens are written there, for the peers to start from.

mod common;

use common::{Arguments, Failure, LENGTH, Measurement, Numbers, VOCABULARY};
use gpipe::{Adam, CrossEntropy};
use tch::Kind;

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    arguments.keep_freed()?;
    let mut measurement = Measurement::new(arguments)?;
    let pipeline = measurement
        .builder(common::gpt().build()?, &[LENGTH], Kind::Int64)?
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 1e-4, ..Adam::default() })
        .build()?;
    let (mut numbers, shape) = (Numbers::new(), [measurement.samples, LENGTH]);
    let (inputs, targets) =
        (numbers.below(VOCABULARY, &shape)?, numbers.below(VOCABULARY, &shape)?);
    measurement.run("gpt", pipeline, &inputs, &targets)
}
