//! Schedules that a user wrote, run for real. Families: `property_` (any correct file computes what one stage computes, to the
//! bit), `fault_` (what does not fit the pipeline is refused before anything runs).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::sync::Arc;

use common::{Features, Named, Run, assert_same_bits, batch, flat, model};
use gpipe::{
    Bytes, Pipeline, Remat, Schedule,
    schedule::{Listed, listed::print},
};
use gpipe_core::{splitmix::Stream, testing::random_compute};

fn listed(name: &str, text: &str) -> Schedule {
    Schedule::Listed(Arc::new(Listed::parse(name, text).unwrap()))
}

/// Losses and the whole state after three steps, the second of fewer samples, so that it has fewer micro-batches.
fn trained(pipeline: &mut Pipeline) -> (Vec<u64>, Named) {
    let mut losses = Vec::new();
    for (step, samples) in [7, 3, 6].into_iter().enumerate() {
        let (inputs, targets) = batch(samples, step as u64);
        losses.push(pipeline.train_step(inputs, &targets).unwrap().loss.to_bits());
        let (inputs, targets) = batch(5, 100 + step as u64);
        losses.push(pipeline.evaluate(inputs, &targets).unwrap().loss.to_bits());
    }
    (losses, flat(pipeline))
}

#[test]
fn property_random_files_compute_what_one_stage_does() {
    let features = Features { tied: true, skip: true, dropout: 0.1, ..Features::plain() };
    let layers = model(features).len();
    let mut splits = 0;
    for seed in 0..30 {
        let mut random = Stream::new(seed);
        let stages = 1 + random.below(5).min(layers - 1);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(5);
        let text = print(&random_compute(&mut random, stages, devices, micro_batches));
        splits += usize::from(text.contains('W'));
        let schedule = listed("random", &text);
        let run = Run { stages: devices, schedule, remat: Remat::Never, ..Run::plain() };
        let mut plain = Run::plain().builder(model(features), micro_batches).build().unwrap();
        let mut pipeline = run.builder(model(features), micro_batches).build().unwrap();
        assert_eq!(pipeline.balance().len(), stages);
        let (expected, found) = (trained(&mut plain), trained(&mut pipeline));
        assert_eq!(found.0, expected.0, "seed {seed}:\n{text}");
        assert_same_bits(&found.1, &expected.1, &format!("seed {seed}:\n{text}"));
    }
    assert!(splits > 10, "{splits}");
}

#[test]
fn oracle_a_report_is_of_devices() {
    let features = Features::plain();
    let run =
        Run { stages: 2, schedule: Schedule::Interleaved(2), remat: Remat::Never, ..Run::plain() };
    let mut pipeline = run.builder(model(features), 4).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    let report = pipeline.train_step(inputs, &targets).unwrap();
    assert_eq!((report.devices.len(), report.bytes.len()), (2, 2));
    for (device, (own, bytes)) in report.devices.iter().zip(&report.bytes).enumerate() {
        let parts = own.busy() + own.optimizer + own.communication + own.wait;
        assert_eq!(parts, report.time, "device {device}");
        assert!(own.peak > own.live && own.live > Bytes(0) && own.sent > Bytes(0));
        // One for each action, and one at the end.
        assert_eq!(bytes.len(), report.timeline.devices[device].len() + 1);
        assert!(bytes.iter().all(|(_, held)| *held <= own.peak));
    }
}

#[test]
fn fault_what_does_not_fit_is_refused_before_anything_runs() {
    let text = print(&Schedule::ZbH1.actions(2, 4));
    let refused = |stages: usize, schedule: Schedule, micro_batches: usize| {
        let run = Run { stages, schedule, remat: Remat::Never, ..Run::plain() };
        let built = run.builder(model(Features::plain()), micro_batches).build();
        built.err().unwrap().to_string()
    };
    let error = refused(3, listed("mine", &text), 4);
    assert!(error.contains("file:mine is for 2 devices, not for 3"), "{error}");
    let error = refused(2, listed("mine", &text), 8);
    assert!(error.contains("file:mine is for 4 micro-batches, not for 8"), "{error}");
    let error = refused(3, Schedule::Interleaved(3), 4);
    assert!(error.contains("9 stages") && error.contains("layers"), "{error}");
    let error = "interleaved:1".parse::<Schedule>().unwrap_err().to_string();
    assert!(error.contains("V stages on each device, from 2 to 64"), "{error}");
}

/// A cap is of all stages of a device: two that fit alone do not fit together.
#[test]
fn fault_a_cap_is_of_a_device() {
    let run =
        Run { stages: 2, schedule: Schedule::Interleaved(2), remat: Remat::Never, ..Run::plain() };
    let mut pipeline = run.builder(model(Features::plain()), 4).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    let peak = pipeline.train_step(&inputs, &targets).unwrap().devices[0].peak;
    let capped = |cap: u64| {
        let builder = run.builder(model(Features::plain()), 4).memory_cap([Bytes(cap)]);
        builder.build().and_then(|mut pipeline| pipeline.train_step(&inputs, &targets))
    };
    let other = pipeline.train_step(&inputs, &targets).unwrap();
    let most = other.devices.iter().map(|own| own.peak.0).max().unwrap().max(peak.0);
    assert!(capped(2 * most).is_ok());
    let error = capped(peak.0 / 2).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}
