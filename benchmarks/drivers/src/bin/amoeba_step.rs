//! Runs one measurement of the `amoeba` workload: AmoebaNet-D(cells, filters) on small images,
//! trained by SGD with momentum. Prints one line of JSON, as `gpt_step` does.
//!
//! ```text
//! Usage: amoeba_step [cells=6] [filters=128] [size=64] [stages=2] [micro_batches=8]
//!        [schedule=1f1b] [remat=never] [steps=3] [kernels=fastest|aten]
//!        [dtype=float32|bfloat16] [balance=cost] [early=true] [threads=1] [samples=32]
//!        [device=cpu] [keep_freed=true] [folder=DIR]
//! ```
//!
//! With `folder`, writes the initial weights and the images there, as the peers' starting point.

use gpipe::{CrossEntropy, Sgd};
use gpipe_drivers::{Arguments, Failure, Measurement, Numbers};
use gpipe_models::{AmoebaNet, Variant};
use tch::Kind;

const CHANNELS: i64 = 3;
const CLASSES: i64 = 10;

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    arguments.keep_freed()?;
    let model = AmoebaNet {
        variant: Variant::D,
        cells: arguments.take("cells", "6")?,
        filters: arguments.take("filters", "128")?,
        channels: CHANNELS,
        classes: CLASSES,
        drop_path: 0.0,
        auxiliary: false,
    };
    let size: i64 = arguments.take("size", "64")?;
    let mut measurement = Measurement::new(arguments)?;
    let pipeline = measurement
        .builder(model.build()?, &[CHANNELS, size, size], Kind::Float)?
        .loss(CrossEntropy::default())
        .optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.01) })
        .build()?;
    let (mut numbers, samples) = (Numbers::default(), measurement.samples);
    let inputs = numbers.uniform(&[samples, CHANNELS, size, size])?;
    let targets = numbers.below(CLASSES, &[samples])?;
    measurement.run("amoeba", pipeline, &inputs, &targets)
}
