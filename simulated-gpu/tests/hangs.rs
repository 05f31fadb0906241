//! A GPU that stops doing its work: the step ends within its deadline, and the error names the
//! stage whose GPU it is, although other stages wait for it, too.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::run_with;
use gpipe::{
    Device, Error, MeanSquaredError, Pipeline, Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

const DEADLINE: Duration = Duration::from_secs(1);

/// Trains until a step fails, and prints the error.
fn train_until_it_fails(devices: Vec<Device>) {
    let mut model = Sequence::new();
    for number in 0..6 {
        model = model.push(format!("linear.{number}"), Linear::new(16, 16));
        model = model.push(format!("gelu.{number}"), Activation::Gelu);
    }
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([2, 16], Kind::Float))
        .devices(devices)
        .micro_batches(4)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.01))
        .timeout(DEADLINE)
        .build()
        .unwrap();
    let options = (Kind::Float, tch::Device::Cpu);
    let (inputs, targets) = (Tensor::ones([8, 16], options), Tensor::zeros([8, 16], options));
    let error: Error = loop {
        let start = Instant::now();
        if let Err(error) = pipeline.train_step(&inputs, &targets) {
            assert!(start.elapsed() < 8 * DEADLINE, "after {:.1?}", start.elapsed());
            break error;
        }
    };
    println!("error: {error}");
    // What is left on the hanging GPU cannot be waited for.
    std::process::exit(0);
}

/// Runs a scenario in which kernels of this GPU hang from number `kernel` on. The GPU's number is
/// its stage's.
#[track_caller]
fn is_named(scenario: &str, gpu: usize, kernel: usize) {
    let hangs = format!("{gpu}:{kernel}");
    let output = run_with(scenario, &[("GPIPE_SIMULATED_GPU_HANGS", &hangs)]);
    let text = String::from_utf8_lossy(&output.stdout);
    let Some((_, error)) = text.split_once("error: ") else {
        panic!("{text} {}", String::from_utf8_lossy(&output.stderr));
    };
    let seen = [
        format!("last sign of life of stage {gpu} "),
        format!("device {gpu} has given no sign of life"),
    ];
    assert!(seen.iter().any(|seen| error.contains(seen)), "{hangs}: {error}");
    let action = format!("when last asked, the GPU had not done {gpu}");
    assert!(error.contains(&action), "{hangs}: {error}");
}

#[test]
fn fault_a_hanging_gpu_is_named() {
    for kernel in [2000, 2017, 2051, 2100] {
        is_named("trains_on_two_gpus", 0, kernel);
        is_named("trains_on_two_gpus", 1, kernel);
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn trains_on_two_gpus() {
    train_until_it_fails(vec![Device::Cuda(0), Device::Cuda(1)]);
}

#[test]
fn fault_a_stage_on_a_cpu_names_the_gpu_that_it_waits_for() {
    for kernel in [2000, 2040] {
        is_named("trains_on_a_gpu_and_a_cpu", 0, kernel);
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn trains_on_a_gpu_and_a_cpu() {
    train_until_it_fails(vec![Device::Cuda(0), Device::Cpu]);
}
