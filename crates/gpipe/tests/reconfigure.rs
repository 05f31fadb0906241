//! Changes between steps: freezing, groups, the optimizer's settings.
//!
//! - `transparency_`: equal at every K, and equal to a pipeline that was built that way and given
//!   the state
//! - `fault_`: changes that are refused change nothing
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Features, Named, Run, assert_same_bits, batch, bits, flat, model, restore};
use gpipe::{Adam, Decay, Group, LearningRate, Pipeline, PipelineBuilder, Schedule, Sgd};
use tch::Kind;

fn step(pipeline: &mut Pipeline, seed: u64) -> (u64, u64) {
    let (inputs, targets) = batch(7, seed);
    let report = pipeline.train_step(&inputs, &targets).unwrap();
    (report.loss.to_bits(), report.grad_norm.to_bits())
}

fn builder(run: &Run, kind: Kind) -> PipelineBuilder {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    run.builder(model(features), 3).kind(kind).clip_norm(1.0)
}

const FROZEN: [&str; 3] = ["embedding.*", "0.*", "1.attention.*"];

const RATE: LearningRate = LearningRate { warmup_steps: 9, decay: Decay::InverseSquareRoot };

fn groups() -> Vec<Group> {
    vec![
        Group::matching(["*.bias"]).weight_decay(0.0).lr_scale(0.5),
        Group::matching(["1.mlp.hidden.weight"]).frozen(),
    ]
}

/// Every kind of change, with steps between. Returns losses and norms, and the state at the end.
fn changed(run: &Run, kind: Kind) -> (Vec<(u64, u64)>, Named) {
    let mut pipeline = builder(run, kind).build().unwrap();
    let mut numbers = vec![step(&mut pipeline, 0)];
    pipeline.freeze(FROZEN).unwrap();
    numbers.push(step(&mut pipeline, 1));
    pipeline.unfreeze(["0.mlp.*"]).unwrap();
    numbers.push(step(&mut pipeline, 2));
    pipeline.regroup(groups()).unwrap();
    numbers.push(step(&mut pipeline, 3));
    pipeline.unfreeze(["*"]).unwrap();
    pipeline.set_optimizer(Adam { lr: 3e-3, beta1: 0.5, ..Adam::default() }).unwrap();
    pipeline.set_clip_norm(None).unwrap();
    numbers.push(step(&mut pipeline, 4));
    pipeline.set_learning_rate_schedule(RATE).unwrap();
    numbers.push(step(&mut pipeline, 5));
    pipeline.set_optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.05) }).unwrap();
    numbers.push(step(&mut pipeline, 6));
    (numbers, flat(&mut pipeline))
}

#[test]
fn transparency_of_changes_between_steps() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let expected = changed(&Run::plain(), kind);
        let layers = 10;
        for run in Run::all(layers).iter().step_by(2) {
            let found = changed(run, kind);
            assert_eq!(found.0, expected.0, "{run:?}");
            assert_same_bits(&found.1, &expected.1, &format!("{run:?}"));
        }
    }
}

/// After each change the pipeline goes on as one that was built with it and given the state.
#[test]
fn transparency_of_a_change_and_a_pipeline_built_with_it() {
    type Change = fn(&mut Pipeline) -> gpipe::Result<()>;
    type Build = fn(PipelineBuilder) -> PipelineBuilder;
    let cases: [(&str, Change, Build); 5] = [
        ("freeze", |p| p.freeze(FROZEN), |b| b.group(Group::matching(FROZEN).frozen())),
        (
            "regroup",
            |p| p.regroup(groups()),
            |b| groups().into_iter().fold(b, PipelineBuilder::group),
        ),
        (
            "optimizer",
            |p| p.set_optimizer(Adam { lr: 1e-3, eps: 1e-4, ..Adam::default() }),
            |b| b.optimizer(Adam { lr: 1e-3, eps: 1e-4, ..Adam::default() }),
        ),
        ("clipping", |p| p.set_clip_norm(Some(0.1)), |b| b.clip_norm(0.1)),
        ("rate", |p| p.set_learning_rate_schedule(RATE), |b| b.learning_rate(RATE)),
    ];
    let run = Run { stages: 3, schedule: Schedule::ZbH1, ..Run::plain() };
    for (what, change, build) in cases {
        let mut pipeline = builder(&run, Kind::Float).build().unwrap();
        step(&mut pipeline, 0);
        let state = pipeline.state().unwrap();
        change(&mut pipeline).unwrap();
        let mut fresh = build(builder(&run, Kind::Float)).build().unwrap();
        restore(&mut fresh, state);
        for seed in 1..3 {
            assert_eq!(step(&mut pipeline, seed), step(&mut fresh, seed), "{what}");
        }
        let trained = |all: Named| -> Named {
            // A pipeline that was built frozen has no optimizer state for what is frozen.
            all.into_iter().filter(|(name, _)| !name.contains(' ')).collect()
        };
        let (found, expected) = (trained(flat(&mut pipeline)), trained(flat(&mut fresh)));
        assert_same_bits(&found, &expected, what);
    }
}

/// Frozen parameters keep value and optimizer state, and go on where they stopped.
#[test]
fn oracle_frozen_parameters_keep_their_state() {
    let mut pipeline =
        builder(&Run { stages: 2, ..Run::plain() }, Kind::Float).average(0.9).build().unwrap();
    step(&mut pipeline, 0);
    let before = flat(&mut pipeline);
    pipeline.freeze(["0.*"]).unwrap();
    step(&mut pipeline, 1);
    let after = flat(&mut pipeline);
    let mut compared = 0;
    for ((name, old), (_, new)) in before.iter().zip(&after) {
        if !name.ends_with("average") && !name.starts_with("Counters") {
            assert_eq!(bits(old) == bits(new), name.starts_with("0."), "{name}");
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
    assert!(pipeline.gradients().unwrap().iter().all(|(name, _)| !name.starts_with("0.")));
    pipeline.unfreeze(["0.*"]).unwrap();
    step(&mut pipeline, 2);
    let updates = flat(&mut pipeline).into_iter().filter(|(name, _)| name.ends_with(" updates"));
    for (name, updates) in updates {
        let expected = if name.starts_with("0.") { 2 } else { 3 };
        assert_eq!(updates.int64_value(&[]), expected, "{name}");
    }
}

/// A state goes on in a pipeline that freezes after the restore. One that has frozen the parameters
/// before ignores what the optimizer kept for them.
#[test]
fn oracle_frozen_parameters_go_on_after_a_restore() {
    let frozen_and_trained = || {
        let mut pipeline = builder(&Run::plain(), Kind::Float).build().unwrap();
        step(&mut pipeline, 0);
        pipeline.freeze(FROZEN).unwrap();
        step(&mut pipeline, 1);
        pipeline
    };
    let go_on = |mut pipeline: Pipeline| {
        pipeline.unfreeze(FROZEN).unwrap();
        step(&mut pipeline, 2);
        flat(&mut pipeline)
    };
    let build = || builder(&Run::plain(), Kind::Float).build().unwrap();
    let expected = go_on(frozen_and_trained());
    let mut after = build();
    restore(&mut after, frozen_and_trained().state().unwrap());
    after.freeze(FROZEN).unwrap();
    assert_same_bits(&go_on(after), &expected, "frozen after the restore");
    let mut before = build();
    before.freeze(FROZEN).unwrap();
    restore(&mut before, frozen_and_trained().state().unwrap());
    let updates = |all: &Named| {
        let own = all.iter().find(|(name, _)| name == "embedding.tokens updates").unwrap();
        own.1.int64_value(&[])
    };
    assert_eq!((updates(&expected), updates(&go_on(before))), (2, 1));
}

#[test]
fn fault_a_change_that_is_refused_changes_nothing() {
    let run = Run { stages: 2, ..Run::plain() };
    let train = |tries: bool| {
        let mut pipeline = builder(&run, Kind::Float).build().unwrap();
        step(&mut pipeline, 0);
        if tries {
            let refused = |result: gpipe::Result<()>, text: &str| {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(text), "{error} lacks {text}");
            };
            refused(pipeline.freeze(["embedding.*", "nothing"]), "no parameter matches 'nothing'");
            refused(pipeline.regroup([Group::matching(["nothing"])]), "'nothing'");
            refused(pipeline.set_optimizer(Adam { lr: -1.0, ..Adam::default() }), "lr = -1");
            refused(pipeline.set_clip_norm(Some(0.0)), "above 0");
            let outputs = pipeline.forward(batch(7, 0).0).unwrap();
            refused(pipeline.freeze(["embedding.*"]), "an update is under way");
            drop(outputs);
        }
        (step(&mut pipeline, 1), flat(&mut pipeline))
    };
    let (expected, found) = (train(false), train(true));
    assert_eq!(found.0, expected.0);
    assert_same_bits(&found.1, &expected.1, "refused changes");
}
