//! Plans before anything runs: where to cut, which schedule to use and what to recompute, so that
//! no stage exceeds its memory cap. Here costs come from shapes; `gpipe::profile` measures them.
//!
//! `cargo run --release --example plan_under_a_cap`
#![allow(clippy::print_stdout)]

use gpipe::{
    Adam, Bytes, MeanSquaredError, Pipeline, PipelineBuilder, Schedule, Sequence, TensorSpec,
    estimate::Rate,
    layers::{Activation, Linear},
    plan::{PlanDevice, Request, search},
};
use tch::{Device, Kind, Tensor};

const SAMPLES: usize = 256;
const CAP: Bytes = Bytes(6 << 20);

fn builder() -> PipelineBuilder {
    let mut model = Sequence::new().layer(Linear::new(64, 512));
    for _ in 0..4 {
        model = model.layer(Activation::Tanh).layer(Linear::new(512, 512));
    }
    let model = model.layer(Linear::new(512, 64));
    Pipeline::builder(model, TensorSpec::new([SAMPLES as i64, 64], Kind::Float))
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let micro_batches = vec![4, 8, 16];
    let sizes: Vec<usize> = micro_batches.iter().map(|m| SAMPLES / m).collect();
    let costs = builder().estimate(&sizes, &Rate::default())?;
    let found = search(&Request {
        model: &costs,
        devices: &[PlanDevice { speed: 1.0, memory: Some(CAP) }; 4],
        samples: SAMPLES,
        stages: vec![1, 2, 3, 4],
        micro_batches,
        schedules: vec![Schedule::GPipe, Schedule::OneFOneB],
        makes_orders: false,
        balance: None,
        remat: None,
        budget: Request::BUDGET,
        usual: None,
    })?;
    println!("{:?}", found.plan);

    let mut pipeline = builder().planned(&found.plan).memory_cap([CAP]).build()?;
    let x = Tensor::randn([SAMPLES as i64, 64], (Kind::Float, Device::Cpu));
    let report = pipeline.train_step(&x, &x)?;
    for (device, predicted) in report.devices.iter().zip(found.prediction.device_peaks()) {
        println!("predicted at most {predicted}, held {}, cap {CAP}", device.peak);
    }
    Ok(())
}
