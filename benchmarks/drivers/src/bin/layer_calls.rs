//! What a layer of nearly no work costs: a sequence of `Linear(4, 4)` on one stage, one sample.
//!
//! `layer_calls layers=N steps=N` prints one line of JSON with microseconds per step.
//! `benchmarks/python_package.py` runs the same sequence through the Python package.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use gpipe::{
    Kernels, MeanSquaredError, Pipeline, RematPolicies, Sequence, Sgd, TensorSpec, layers::Linear,
};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let number = |name: &str, otherwise: usize| {
        let own = std::env::args().find_map(|own| own.strip_prefix(name)?.parse().ok());
        own.unwrap_or(otherwise)
    };
    let (layers, steps) = (number("layers=", 100), number("steps=", 200));
    let mut sequence = Sequence::new();
    for at in 0..layers {
        sequence = sequence.push(at.to_string(), Linear::new(4, 4));
    }
    let mut pipeline = Pipeline::builder(sequence, TensorSpec::new([1, 4], Kind::Float))
        .remat("never".parse::<RematPolicies>()?)
        .kernels(Kernels::Aten)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.01))
        .build()?;
    let x = Tensor::ones([1, 4], (Kind::Float, Device::Cpu));
    let mut spent = Vec::new();
    for _ in 0..steps {
        let start = Instant::now();
        pipeline.train_step(&x, &x)?;
        spent.push(start.elapsed().as_secs_f64() * 1e6);
    }
    println!("{{\"layers\": {layers}, \"step_us\": {spent:?}}}");
    Ok(())
}
