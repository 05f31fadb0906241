//! A skip connection over several stages. The value goes directly from the stage of `Stash` to that
//! of `Pop`, not through the stages between. The gradient returns the same way.
//!
//! `cargo run --release --example long_skip`
#![allow(clippy::print_stdout)]

use gpipe::{
    MeanSquaredError, Pipeline, Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear, Pop, Stash},
};
use tch::{Device, Kind, Tensor};

fn main() -> gpipe::Result<()> {
    let model = Sequence::new()
        .push("encode", Linear::new(8, 32))
        .push("stash", Stash::new("early"))
        .push("tanh", Activation::Tanh)
        .push("narrow", Linear::new(32, 4))
        .push("widen", Linear::new(4, 32))
        .push("pop", Pop::new("early")) // adds what was stashed
        .push("decode", Linear::new(32, 8));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
        .stages(3)
        .micro_batches(4)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()?;

    tch::manual_seed(0);
    let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
    for _ in 0..3 {
        let report = pipeline.train_step(&x, &x)?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    println!("layers by stage: {:?}", pipeline.balance());
    Ok(())
}
