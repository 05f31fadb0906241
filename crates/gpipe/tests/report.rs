//! Time reports of a real pipeline. Families: `property_` (the parts sum to the step), `oracle_` (a
//! stage that is made slow, the wall clock).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::time::Instant;

use common::uniform;
use gpipe::{
    Balance, DeviceReport, MeanSquaredError, Nanos, Pipeline, Remat, Schedule, Sequence, Sgd,
    StepReport, TensorSpec,
    layers::{Activation, Linear},
};
use tch::Kind;

const WIDTH: i64 = 256;

fn pipeline(balance: &[usize], schedule: Schedule, remat: Remat, samples: i64) -> Pipeline {
    let model = (0..balance.iter().sum()).fold(Sequence::new(), |model, layer| {
        if layer % 2 == 0 {
            model.layer(Linear::new(WIDTH, WIDTH))
        } else {
            model.layer(Activation::Tanh)
        }
    });
    Pipeline::builder(model, TensorSpec::new([samples, WIDTH], Kind::Float))
        .stages(balance.len())
        .balance(Balance::Layers(balance.to_vec()))
        .schedule(schedule)
        .remat(remat)
        .micro_batches(8)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.01))
        .build()
        .unwrap()
}

fn parts(stage: &DeviceReport) -> [Nanos; 8] {
    [
        stage.forward,
        stage.recompute,
        stage.backward,
        stage.optimizer,
        stage.communication,
        stage.fill_drain,
        stage.imbalance,
        stage.stalls,
    ]
}

fn sum(report: &StepReport, part: fn(&DeviceReport) -> Nanos) -> Nanos {
    report.devices.iter().map(part).sum()
}

#[test]
fn property_every_stages_parts_sum_to_the_step() {
    for schedule in Schedule::SEARCHED_EXACTLY {
        for remat in common::REMATS {
            for balance in [&[8][..], &[4, 4], &[2, 6], &[3, 3, 2]] {
                let mut pipeline = pipeline(balance, schedule.clone(), remat, 67);
                for samples in [67, 5] {
                    let x = uniform(&[samples, WIDTH], 1, Kind::Float);
                    let report = pipeline.train_step(&x, &x).unwrap();
                    for stage in &report.devices {
                        let total: Nanos = parts(stage).into_iter().sum();
                        assert_eq!(total, report.time, "{schedule} {remat} {balance:?}: {stage:?}");
                        assert_eq!(stage.wait, stage.fill_drain + stage.imbalance + stage.stalls);
                    }
                    let lost = sum(&report, |stage| stage.wait + stage.communication);
                    let area = report.time.0 as f64 * balance.len() as f64;
                    assert!((report.bubble - lost.0 as f64 / area).abs() < 1e-9);
                    if balance.len() == 1 {
                        assert_eq!((sum(&report, |s| s.communication + s.imbalance)), Nanos(0));
                    }
                }
            }
        }
    }
}

#[test]
fn oracle_a_stage_with_more_layers_shows_as_imbalance_of_the_other() {
    let mut pipeline = pipeline(&[2, 14], Schedule::OneFOneB, Remat::Never, 2048);
    let x = uniform(&[2048, WIDTH], 1, Kind::Float);
    let reports: Vec<_> = (0..5).map(|_| pipeline.train_step(&x, &x).unwrap()).collect();
    // Any single step may be disturbed by other work on the machine.
    let clear = |report: &StepReport| {
        let [first, last] = &report.devices[..] else { return false };
        first.imbalance > first.fill_drain + first.stalls && last.imbalance < first.imbalance
    };
    let stages: Vec<_> = reports.iter().map(|report| &report.devices).collect();
    assert!(reports.iter().any(clear), "{stages:?}");
}

#[test]
fn oracle_the_step_is_the_wall_clock_around_it() {
    let samples = 8192;
    let mut pipeline = pipeline(&[8, 8], Schedule::OneFOneB, Remat::Always, samples);
    let x = uniform(&[samples, WIDTH], 1, Kind::Float);
    let mut outside = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        let report = pipeline.train_step(&x, &x).unwrap();
        let wall = start.elapsed().as_nanos() as f64;
        let time = report.time.0 as f64;
        outside.push((wall - time) / wall);
    }
    // The driver's part: checking and cutting the batch, waking the workers, writing this report.
    // Other work on the machine can make it longer, but nothing makes it shorter.
    let least = outside.iter().copied().fold(f64::INFINITY, f64::min);
    assert!((0.0..0.01).contains(&least), "{outside:?}");
}

#[test]
fn property_bytes_over_time_go_up_to_the_peak_and_end_with_what_is_left() {
    for remat in [Remat::Always, Remat::Never] {
        let mut pipeline = pipeline(&[4, 4], Schedule::GPipe, remat, 64);
        let x = uniform(&[64, WIDTH], 1, Kind::Float);
        for _ in 0..2 {
            let report = pipeline.train_step(&x, &x).unwrap();
            assert_eq!(report.bytes.len(), 2);
            for (stage, series) in report.devices.iter().zip(&report.bytes) {
                let own = |k: usize| report.timeline.devices[k].len();
                assert!(series.len() == own(0) + 1 || series.len() == own(1) + 1);
                assert!(series.windows(2).all(|pair| pair[0].0 <= pair[1].0));
                let most = series.iter().map(|point| point.1).max().unwrap();
                assert!(most <= stage.peak && series.iter().all(|point| point.1.0 > 0));
                assert_eq!(series.last().unwrap(), &(report.time, stage.live));
                // Parameters are held throughout. What micro-batches hold rises and falls.
                assert!(most > series[0].1, "{remat}");
            }
        }
    }
}
