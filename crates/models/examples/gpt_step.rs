//! One measurement of the `gpt` workload for `benchmarks/gpt_step.py`: builds the pipeline, runs the steps,
//! and prints one line of JSON: losses, the milliseconds of each step and of its parts, what the simulator makes of
//! the step before the last, and bytes.
//!
//! Usage: gpt_step [stages=2] [micro_batches=8] [schedule=1f1b] [remat=never] [steps=3] [kernels=fastest|aten]
//!        [dtype=float32|bfloat16] [balance=cost] [samples=32] [device=cpu] [folder=DIR]
//! With `folder` the initial weights and the tokens are written there, for the peers to start from.

mod common;

use common::{Arguments, Failure, Measurement, Numbers};
use gpipe::{Adam, CrossEntropy};
use gpipe_models::Transformer;
use tch::Kind;

const VOCABULARY: i64 = 8192;
const LENGTH: i64 = 128;

fn main() -> Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut measurement = Measurement::new(Arguments::read()?)?;
    let model = Transformer {
        vocabulary: VOCABULARY,
        positions: LENGTH,
        features: 512,
        heads: 8,
        hidden: 2048,
        blocks: 8,
        dropout: 0.0,
        attention_dropout: 0.0,
        tied: false,
        split_blocks: true,
    };
    let pipeline = measurement
        .builder(model.build()?, &[LENGTH], Kind::Int64)?
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 1e-4, ..Adam::default() })
        .build()?;
    let (mut numbers, shape) = (Numbers::new(), [measurement.samples, LENGTH]);
    let (inputs, targets) =
        (numbers.below(VOCABULARY, &shape)?, numbers.below(VOCABULARY, &shape)?);
    measurement.run("gpt", pipeline, &inputs, &targets)
}
