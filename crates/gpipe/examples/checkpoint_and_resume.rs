//! Saves a checkpoint and resumes from it with another number of stages, bit for bit.
//!
//! `cargo run --release --example checkpoint_and_resume`
#![allow(clippy::print_stdout)]

use gpipe::{
    Adam, MeanSquaredError, Pipeline, Sequence, TensorSpec,
    layers::{Activation, Dropout, Linear},
};
use gpipe_checkpoint::{Checkpoints, RunInfo, Settings, folder};
use tch::{Device, Kind, Tensor};

fn pipeline(stages: usize) -> gpipe::Result<Pipeline> {
    let model = Sequence::new()
        .layer(Linear::new(8, 32))
        .layer(Activation::Tanh)
        .layer(Dropout { p: 0.1 })
        .layer(Linear::new(32, 8));
    Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
        .stages(stages)
        .micro_batches(4)
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
        .build()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(0);
    let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
    let run = tempfile::tempdir()?;

    let mut first = pipeline(2)?;
    let mut checkpoints = Checkpoints::open(run.path(), Settings::default())?;
    for _ in 0..3 {
        first.train_step(&x, &x)?;
    }
    checkpoints.save(&mut first, RunInfo::default())?; // copies now, writes during training
    let uninterrupted = first.train_step(&x, &x)?;
    checkpoints.wait()?;

    let mut second = pipeline(4)?;
    let newest = folder::newest(run.path())?.found.ok_or("there is no whole checkpoint")?;
    newest.restore(&mut second)?;
    let resumed = second.train_step(&x, &x)?;

    println!("step {}: loss {} in 2 stages", uninterrupted.step, uninterrupted.loss);
    println!("step {}: loss {} in 4 stages, resumed", resumed.step, resumed.loss);
    assert_eq!(uninterrupted.loss.to_bits(), resumed.loss.to_bits());
    Ok(())
}
