//! The smallest program that trains: a network, a loss, an optimizer and a number of stages.
//!
//! `cargo run --release --example minimal`
#![allow(clippy::print_stdout)]

use gpipe::{
    Adam, MeanSquaredError, Pipeline, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Device, Kind, Tensor};

fn main() -> gpipe::Result<()> {
    let model = Sequence::new()
        .layer(Linear::new(8, 64))
        .layer(Activation::Tanh)
        .layer(Linear::new(64, 64))
        .layer(Activation::Tanh)
        .layer(Linear::new(64, 1));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([32, 8], Kind::Float))
        .stages(2)
        .micro_batches(4)
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
        .build()?;

    // The network learns the length of a vector.
    tch::manual_seed(0);
    let x = Tensor::randn([32, 8], (Kind::Float, Device::Cpu));
    let length = x.square().sum_dim_intlist(1_i64, true, None).sqrt();
    for _ in 0..200 {
        let report = pipeline.train_step(&x, &length)?;
        if report.step % 40 == 0 {
            let bubble = 100.0 * report.bubble;
            println!("step {}: loss {:.4}, bubble {bubble:.0}%", report.step, report.loss);
        }
    }

    let output = pipeline.predict(&x)?;
    println!(
        "predicted {:.2}, true {:.2}",
        output[0].double_value(&[0, 0]),
        length.double_value(&[0, 0])
    );
    Ok(())
}
