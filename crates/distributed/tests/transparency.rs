//! Family `transparency_`: several processes, each with one or more stages, compute what one
//! process computes, to the last bit.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{
    DEADLINE, in_processes,
    model::{
        Features, Named, Recipe, Run, assert_same_bits, batch, bits, flat, log_skipped, model,
        restore, views,
    },
};
use std::collections::HashMap;

use gpipe::{
    Device, Pipeline,
    decode::GroupStep,
    processes::{Links, Transport},
};
use gpipe_core::{Nanos, Op, simulate::Timeline};
use tch::{Kind, Tensor};

/// Results of training: numbers of every step, gradients, the final state, and outputs.
struct Computed {
    numbers: Vec<u64>,
    gradients: Named,
    state: Named,
    outputs: Vec<u64>,
}

const STEPS: u64 = 3;

/// What is trained: how to build it, its number of layers, and its mini-batches.
struct Subject<'a> {
    build: &'a (dyn Fn(&Run, usize) -> gpipe::PipelineBuilder + Sync),
    layers: usize,
    batch: fn(i64, u64) -> (Vec<Tensor>, Tensor),
    what: String,
}

fn tokens(samples: i64, seed: u64) -> (Vec<Tensor>, Tensor) {
    let (inputs, targets) = batch(samples, seed);
    (vec![inputs], targets)
}

fn train(
    pipeline: &mut Pipeline,
    samples: &[i64],
    batch: fn(i64, u64) -> (Vec<Tensor>, Tensor),
) -> Computed {
    let (mut numbers, mut gradients) = (Vec::new(), Named::new());
    for step in 0..STEPS {
        let (inputs, targets) = batch(samples[step as usize % samples.len()], step);
        let report = pipeline.train_step(inputs, &targets).unwrap();
        numbers.extend([report.loss, report.grad_norm, report.count, report.lr].map(f64::to_bits));
        numbers.extend(report.metrics.iter().map(|metric| metric.sum.to_bits()));
        let own = pipeline.gradients().unwrap();
        gradients.extend(own.into_iter().map(|(name, tensor)| (format!("{name} {step}"), tensor)));
    }
    let (inputs, targets) = batch(5, 77);
    let evaluation = pipeline.evaluate(&inputs[..], &targets).unwrap();
    numbers.push(evaluation.loss.to_bits());
    let outputs = pipeline.predict(&inputs[..]).unwrap();
    let outputs = outputs.iter().flat_map(bits).collect();
    Computed { numbers, gradients, state: flat(pipeline), outputs }
}

fn builder(features: Features, run: &Run, micro_batches: usize) -> gpipe::PipelineBuilder {
    features.build(run.builder(model(features), micro_batches).clip_norm(1.0))
}

/// Merges by name, because each process has only the entries of its stages.
fn merged(parts: Vec<Named>) -> Named {
    let mut all: Named = parts.into_iter().flatten().collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all.dedup_by(|(a, _), (b, _)| a == b);
    all
}

/// Asserts that the processes computed together what one process computed.
fn assert_equal(found: Vec<Computed>, expected: &Computed, what: &str) {
    let (mut gradients, mut states) = (Vec::new(), Vec::new());
    for own in found {
        assert_eq!(own.numbers, expected.numbers, "{what}");
        assert!(own.outputs == expected.outputs, "{what}");
        gradients.push(own.gradients);
        states.push(own.state);
    }
    let sorted = |named: &Named| {
        merged(vec![named.iter().map(|(name, own)| (name.clone(), own.shallow_clone())).collect()])
    };
    assert_same_bits(&merged(gradients), &sorted(&expected.gradients), what);
    assert_same_bits(&merged(states), &sorted(&expected.state), what);
}

fn matrix(features: Features, cases: &[(Vec<i64>, usize)]) {
    matrix_of(
        &Subject {
            build: &|run, micro_batches| builder(features, run, micro_batches),
            layers: model(features).len(),
            batch: tokens,
            what: format!("{features:?}"),
        },
        cases,
    );
}

fn matrix_of(subject: &Subject, cases: &[(Vec<i64>, usize)]) {
    let Subject { build, layers, batch, what } = subject;
    let mut compared = 0;
    for (samples, micro_batches) in cases {
        let mut plain = build(&Run::plain(), *micro_batches).build().unwrap();
        let expected = train(&mut plain, samples, *batch);
        for processes in [2, 3, 4] {
            // Cuts and policies with at least as many stages as processes. The full list runs in
            // the matrix of threads.
            let runs = Run::all(*layers).into_iter().filter(|run| run.stages >= processes);
            for (index, run) in runs.enumerate() {
                if index % 3 != processes % 3 && std::env::var_os("GPIPE_SOAK").is_none() {
                    continue;
                }
                let what = format!(
                    "{run:?} in {processes} processes: {what} N={samples:?} M={micro_batches}"
                );
                let found = in_processes(processes, DEADLINE, |cluster| {
                    let built = build(&run, *micro_batches).processes(cluster);
                    train(&mut built.build().unwrap(), samples, *batch)
                });
                assert_equal(found, &expected, &what);
                compared += 1;
            }
        }
    }
    println!("soak: {compared} ways to run it in processes compared with one stage, bit for bit");
}

/// Processes with a GPU each, whose values pass from GPU to GPU. Skipped without GPUs.
#[test]
fn transparency_of_gpus_connected_by_nccl() {
    if Device::gpus() < 4 {
        log_skipped("transparency_of_gpus_connected_by_nccl: there are not four GPUs");
        return;
    }
    let kinds = [Kind::Float, Kind::BFloat16];
    for (features, (samples, micro_batches)) in kinds
        .map(|kind| Features { tied: true, skip: true, dropout: 0.2, kind, ..Features::plain() })
        .into_iter()
        .zip([(vec![7, 5], 3), (vec![3, 1, 6], 4)])
    {
        let gpus = |builder: gpipe::PipelineBuilder, count| {
            let gpus: Vec<Device> = (0..count).map(Device::Cuda).collect();
            builder.devices(gpus).links(Links::Nccl)
        };
        let plain = builder(features, &Run::plain(), micro_batches);
        let plain = plain.devices([Device::Cuda(0)]);
        let expected = train(&mut plain.build().unwrap(), &samples, tokens);
        let mut compared = 0;
        let runs = Run::all(model(features).len()).into_iter().filter(|run| run.stages > 1);
        for (index, run) in runs.enumerate() {
            if index % 5 != 0 && std::env::var_os("GPIPE_SOAK").is_none() {
                continue;
            }
            let count = run.stages;
            let found = in_processes(count, DEADLINE, |cluster| {
                let built = gpus(builder(features, &run, micro_batches), count).processes(cluster);
                train(&mut built.build().unwrap(), &samples, tokens)
            });
            let what = format!("{run:?} on {count} GPUs: {features:?}");
            assert_equal(found, &expected, &what);
            compared += 1;
        }
        assert!(compared > 10, "{compared}");
    }
}

#[test]
fn transparency_of_processes() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    matrix(features, &[(vec![7, 5], 3), (vec![3, 1, 6], 4)]);
}

#[test]
fn transparency_of_processes_with_everything() {
    let recipe = Recipe::Everything;
    let features = Features { tied: true, skip: true, dropout: 0.2, recipe, ..Features::plain() };
    matrix(features, &[(vec![8], 4)]);
    let kind = Kind::BFloat16;
    matrix(Features { batch_norm: true, kind, recipe: Recipe::Adam, ..features }, &[(vec![6], 3)]);
}

/// A value whose memory overlaps itself was sent contiguously between processes, and as a view
/// between threads. The next layer's kernel saw other strides and computed other bits. This test
/// also covers expanded, strided and offset values, those with one element or none, and booleans.
#[test]
fn regression_views_give_the_same_bits_in_processes() {
    let subject = Subject {
        build: &views::builder,
        layers: views::model().len(),
        batch: views::batch,
        what: "views".into(),
    };
    matrix_of(&subject, &[(vec![8], 4), (vec![3, 1, 6], 4)]);
}

/// State taken from several processes can be restored in any number of processes, or in one.
#[test]
fn transparency_of_a_state_between_processes() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    let run = Run { stages: 4, ..Run::plain() };
    let steps = |pipeline: &mut Pipeline, range: std::ops::Range<u64>| {
        for step in range {
            let (inputs, targets) = batch(6, step);
            pipeline.train_step(inputs, &targets).unwrap();
        }
    };
    let mut plain = builder(features, &Run::plain(), 3).build().unwrap();
    steps(&mut plain, 0..4);
    let expected = flat(&mut plain);
    let parts = in_processes(2, DEADLINE, |cluster| {
        let mut pipeline = builder(features, &run, 3).processes(cluster).build().unwrap();
        steps(&mut pipeline, 0..2);
        pipeline.state().unwrap()
    });
    let mut parts = parts.into_iter();
    let mut state = parts.next().unwrap();
    state.stages.extend(parts.flat_map(|part| part.stages));
    let mut alone = builder(features, &Run { stages: 2, ..Run::plain() }, 3).build().unwrap();
    restore(&mut alone, state);
    steps(&mut alone, 2..4);
    let sorted = |named: Named| merged(vec![named]);
    assert_same_bits(&sorted(flat(&mut alone)), &sorted(expected), "resumed in one process");
}

#[test]
fn oracle_every_process_has_the_report_of_all_stages() {
    let features = Features::plain();
    let run = Run { stages: 4, ..Run::plain() };
    let reports = in_processes(2, DEADLINE, |cluster| {
        let rank = cluster.rank();
        let mut pipeline = builder(features, &run, 3).processes(cluster).build().unwrap();
        let (inputs, targets) = batch(6, 1);
        let report = pipeline.train_step(inputs, &targets).unwrap();
        assert_eq!((report.devices.len(), report.timeline.devices.len()), (4, 4));
        assert!(report.devices.iter().all(|stage| stage.peak.0 > 0));
        // Each stage's time is fully accounted for, on the clock that the processes share.
        let program_ends = report.timeline.devices.iter().map(|list| list.last().unwrap().end);
        assert_eq!(program_ends.max().unwrap(), report.time);
        assert_no_message_arrives_before_it_leaves(&report.timeline);
        (rank, report.devices.iter().map(|stage| stage.sent).collect::<Vec<_>>(), report.time)
    });
    assert_eq!(reports[0].1, reports[1].1);
    assert_eq!(reports[0].2, reports[1].2);
}

/// Fails if a timeline mixes two clocks: a message would then arrive before it was sent.
fn assert_no_message_arrives_before_it_leaves(timeline: &Timeline) {
    // Tolerance: clocks agree to half of a round trip on loopback (the shortest of eight), which
    // may be long on a busy machine.
    let apart = Nanos(5_000_000);
    let mut left = HashMap::new();
    let timed = || timeline.devices.iter().flatten();
    for own in timed() {
        if let Op::Send(transfer) = own.action.op {
            left.insert(transfer, own.start);
        }
    }
    let mut arrived = 0;
    for own in timed() {
        let Op::Receive(transfer) = own.action.op else { continue };
        let left = left[&transfer];
        assert!(own.end + apart >= left, "{} ended at {}, left at {left}", own.action, own.end);
        arrived += 1;
    }
    assert_eq!(arrived, left.len());
    assert!(arrived > 20, "{arrived}");
}

/// Decodes two groups, position by position, each position from the earlier ones.
fn decode(pipeline: &mut Pipeline) -> Vec<Tensor> {
    let tokens = batch(4, 3).0;
    let mut decoding = pipeline.decoding();
    let mut outputs = Vec::new();
    for (first, count) in [(0, 2), (2, 1), (3, 1)] {
        let step = |group: i64| {
            let own = tokens.narrow(0, 2 * group, 2).narrow(1, first, count).contiguous();
            GroupStep { group: group as usize, inputs: vec![own], rows: None }
        };
        let steps = decoding.step((0..2).map(step).collect());
        outputs.extend(steps.unwrap().into_iter().flatten());
    }
    outputs
}

#[test]
fn transparency_of_a_decoding() {
    let features = Features { tied: true, ..Features::plain() };
    let run = Run { stages: 3, ..Run::plain() };
    let expected = decode(&mut builder(features, &Run::plain(), 2).build().unwrap());
    assert_eq!(expected.len(), 6);
    for found in in_processes(3, DEADLINE, |cluster| {
        let built = builder(features, &run, 2).processes(cluster).build();
        decode(&mut built.unwrap())
    }) {
        assert_eq!(found.len(), expected.len());
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!((found.size(), bits(found)), (expected.size(), bits(expected)), "{number}");
        }
    }
}
