//! The ledger of a step: what it counts, and that it changes nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Features, LENGTH, Run, assert_same_bits, batch, model};
use gpipe::{
    Kernels, Remat, Schedule, TensorSpec,
    ledger::{
        Ledger, Line, Phase, Work,
        limits::{self, Busy},
    },
};
use tch::Kind;

const MICRO_BATCHES: usize = 4;
const SAMPLES: i64 = 8;

fn runs() -> Vec<Run> {
    let run = |stages, schedule: &Schedule| Run {
        stages,
        schedule: schedule.clone(),
        remat: Remat::Always,
        ..Run::plain()
    };
    let schedules = [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV];
    schedules.iter().flat_map(|schedule| [1, 3].map(|stages| run(stages, schedule))).collect()
}

/// The lines of the second of two steps.
fn lines(run: &Run, kernels: Kernels) -> Vec<Line> {
    let ledger = Ledger::default();
    let builder = run.builder(model(Features::plain()), MICRO_BATCHES).kernels(kernels);
    let mut pipeline = builder.observer(ledger.clone()).build().unwrap();
    let (inputs, targets) = batch(SAMPLES, 1);
    pipeline.train_step(&inputs, &targets).unwrap();
    ledger.begin();
    pipeline.train_step(&inputs, &targets).unwrap();
    let lines = ledger.end();
    // After the end nothing is counted.
    pipeline.train_step(&inputs, &targets).unwrap();
    assert!(ledger.end().is_empty());
    lines
}

fn flops(lines: &[Line], phase: Phase) -> f64 {
    lines.iter().filter(|line| line.phase == phase).map(|line| line.flops).sum()
}

#[test]
fn oracle_floating_point_operations_are_those_of_the_layers() {
    let inputs = [TensorSpec::new([SAMPLES / MICRO_BATCHES as i64, LENGTH], Kind::Int64)];
    let costs = model(Features::plain()).costs(&inputs, Kind::Float).unwrap();
    // The embedding's cost is that of memory.
    let forward: u64 = costs.iter().skip(1).sum();
    let forward = (forward * MICRO_BATCHES as u64) as f64;
    for run in runs() {
        for kernels in [Kernels::Aten, Kernels::OneDnn] {
            let lines = lines(&run, kernels);
            let found = Phase::ALL.map(|phase| flops(&lines, phase));
            assert_eq!(found, [forward, forward, 2.0 * forward, 0.0], "{run:?} {kernels:?}");
        }
    }
}

#[test]
fn oracle_every_kind_of_work_of_a_transformer_is_found() {
    let run = Run { stages: 2, schedule: Schedule::OneFOneB, ..Run::plain() };
    let lines = lines(&run, Kernels::Aten);
    for (phase, work) in [
        (Phase::Forward, Work::Products),
        (Phase::Forward, Work::Attention),
        (Phase::Forward, Work::Norms),
        (Phase::Forward, Work::Activations),
        (Phase::Forward, Work::Elementwise),
        (Phase::Forward, Work::Lookups),
        (Phase::Forward, Work::Loss),
        (Phase::Backward, Work::Products),
        (Phase::Backward, Work::Attention),
        (Phase::Backward, Work::Loss),
        (Phase::Backward, Work::GradientSums),
        (Phase::Backward, Work::Dispatch),
        (Phase::Update, Work::Optimizer),
    ] {
        let own = lines.iter().filter(|line| (line.phase, line.work) == (phase, work));
        assert!(own.map(|line| line.time.0).sum::<u64>() > 0, "{phase:?} {work}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| line.phase != Phase::Recompute), "nothing is recomputed");
    // Each micro-batch but the first adds its gradients to the sums: 4 bytes are read twice and
    // written once.
    let elements: i64 = {
        let mut pipeline = run.builder(model(Features::plain()), 1).build().unwrap();
        pipeline.parameters().unwrap().iter().map(|(_, own)| own.numel() as i64).sum()
    };
    let sums = lines.iter().filter(|line| line.work == Work::GradientSums);
    let bytes: u64 = sums.map(|line| line.bytes).sum();
    assert_eq!(bytes, 12 * (MICRO_BATCHES as u64 - 1) * elements as u64);
}

#[test]
fn transparency_a_ledger_changes_no_bit() {
    let train = |counts: bool| {
        let run = Run { stages: 2, schedule: Schedule::ZbH1, ..Run::plain() };
        let ledger = Ledger::default();
        let builder = run.builder(model(Features::plain()), MICRO_BATCHES);
        let mut pipeline = builder.observer(ledger.clone()).build().unwrap();
        if counts {
            ledger.begin();
        }
        let (inputs, targets) = batch(SAMPLES, 1);
        pipeline.train_step(&inputs, &targets).unwrap();
        assert_eq!(ledger.end().is_empty(), !counts);
        pipeline.parameters().unwrap()
    };
    assert_same_bits(&train(true), &train(false), "counting");
}

#[test]
fn property_limits_are_of_each_stage() {
    let busy = Busy { stages: 2, threads: 1 };
    for kind in [Kind::Float, Kind::BFloat16] {
        assert!(limits::products(busy, kind, [64, 64, 64]).unwrap() > 0.0);
    }
    assert!(limits::bandwidth(busy).unwrap() > 0.0);
    assert!(limits::products(busy, Kind::Float, [-1, 64, 64]).is_err());
}
