//! Family `gpu_`: tests that need a GPU. Without one, every test here is skipped and notes that in
//! the file that GPIPE_SKIP_LOG names. Equality to the bit holds for deterministic kernels, and
//! these tests use no others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::io::Write;

use common::{Features, Run, assert_close, assert_same_bits, batch, model};
use gpipe::{Bytes, Device, Remat};
use tch::Kind;

/// Whether `test` must be skipped; if so, writes that to the log.
fn skipped(test: &str) -> bool {
    if Device::gpus() > 0 {
        return false;
    }
    if let Some(path) = std::env::var_os("GPIPE_SKIP_LOG") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        // In a single write, because tests run in parallel.
        file.write_all(format!("{test}: there is no GPU\n").as_bytes()).unwrap();
    }
    true
}

const GPU: Device = Device::Cuda(0);

/// The gradients of 3 steps, and the parameters after them.
fn train(run: &Run, devices: Vec<Device>, features: Features) -> common::Named {
    let builder = features.build(run.builder(model(features), 3)).devices(devices);
    let mut pipeline = builder.build().unwrap();
    let mut all = Vec::new();
    for step in 0..3 {
        let (inputs, targets) = batch(7, step);
        pipeline.train_step(&inputs, &targets).unwrap();
        let gradients = pipeline.gradients().unwrap().into_iter();
        all.extend(gradients.map(|(name, gradient)| (format!("{step} {name}"), gradient)));
    }
    all.extend(pipeline.parameters().unwrap());
    all
}

#[test]
fn gpu_several_stages_on_one_gpu_are_transparent() {
    if skipped("gpu_several_stages_on_one_gpu_are_transparent") {
        return;
    }
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let features = Features { tied: true, skip: true, dropout: 0.2, kind, ..Features::plain() };
        let expected = train(&Run::plain(), vec![GPU], features);
        for run in Run::all(model(features).len()) {
            let found = train(&run, vec![GPU; run.stages], features);
            assert_same_bits(&found, &expected, &format!("{run:?} {kind:?}"));
        }
    }
}

#[test]
fn gpu_mixed_with_cpu_stages_agrees_with_the_cpu() {
    if skipped("gpu_mixed_with_cpu_stages_agrees_with_the_cpu") {
        return;
    }
    // In float64 only the order of sums differs between kernels. Dropout draws the same masks.
    let kind = Kind::Double;
    let features = Features { skip: true, dropout: 0.2, kind, ..Features::plain() };
    let expected = train(&Run::plain(), vec![Device::Cpu], features);
    let cpu = Device::Cpu;
    for devices in
        [vec![GPU], vec![GPU, cpu], vec![cpu, GPU], vec![GPU, cpu, GPU], vec![cpu, GPU, cpu]]
    {
        let run = Run { stages: devices.len(), remat: Remat::Always, ..Run::plain() };
        let found = train(&run, devices.clone(), features);
        assert_close(&found, &expected, 1e-9, &format!("{devices:?}"));
    }
}

#[test]
fn gpu_memory_is_reported_and_a_cap_is_an_error_that_names_the_stage() {
    if skipped("gpu_memory_is_reported_and_a_cap_is_an_error_that_names_the_stage") {
        return;
    }
    let build = |cap: Option<Bytes>| {
        let builder = Run::plain().builder(model(Features::plain()), 2).devices([GPU]);
        match cap {
            Some(cap) => builder.memory_cap([cap]).build(),
            None => builder.build(),
        }
    };
    let (inputs, targets) = batch(8, 1);
    let report = build(None).unwrap().train_step(&inputs, &targets).unwrap();
    assert!(report.devices[0].peak > report.devices[0].live && report.devices[0].live.0 > 0);
    let Err(error) = build(Some(Bytes(1024))) else { panic!("its parameters exceed the cap") };
    let error = error.to_string();
    assert!(error.contains("out of memory") && error.contains("device 0"), "{error}");
}
