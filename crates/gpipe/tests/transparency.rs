//! The first test to read. Family `transparency_`: the number of stages, the balance, the schedule
//! and the re-materialization policy never change a bit of any loss, gradient or parameter. Nor
//! does moving the state to another pipeline that runs in another way.
//!
//! Whoever adds a value to an axis (a schedule, a transport, batch norm, resume) adds it to
//! `Run::all` or to `Features`, and thereby runs the whole matrix on it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{
    Features, Recipe, Run, assert_close, assert_same_bits, batch,
    matrix::{Subject, one},
    model, views,
};
use gpipe::{Remat, Schedule, TensorSpec};
use gpipe_core::Op;
use tch::Kind;

/// Runs the small model of `common` over even and ragged ways to divide a mini-batch.
fn matrix(features: Features) {
    let subject = Subject {
        model: &|| model(features),
        inputs: vec![TensorSpec::new([4, common::LENGTH], Kind::Int64)],
        batch: &one(batch),
        build: &|builder| features.build(builder.clip_norm(1.0)),
        may_skip: features.kind == Kind::Half,
        what: format!("{features:?}"),
    };
    // Even; ragged, and ragged differently in the next step; fewer samples than micro-batches; one
    // sample.
    subject.matrix(&[(vec![8], 4), (vec![7, 5], 3), (vec![3, 1, 6], 4)]);
}

#[test]
fn transparency_plain() {
    matrix(Features::plain());
}

#[test]
fn transparency_tied() {
    matrix(Features { tied: true, ..Features::plain() });
}

#[test]
fn transparency_skip_and_dropout() {
    matrix(Features { skip: true, dropout: 0.2, ..Features::plain() });
}

#[test]
fn transparency_tied_skip_and_dropout() {
    matrix(Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() });
}

#[test]
fn transparency_bfloat16() {
    let kind = Kind::BFloat16;
    matrix(Features { tied: true, skip: true, dropout: 0.2, kind, ..Features::plain() });
}

#[test]
fn transparency_float16_with_loss_scaling() {
    matrix(Features { tied: true, dropout: 0.2, kind: Kind::Half, ..Features::plain() });
}

#[test]
fn transparency_of_a_recipe_with_everything() {
    let recipe = Recipe::Everything;
    matrix(Features { tied: true, skip: true, dropout: 0.2, recipe, ..Features::plain() });
}

#[test]
fn transparency_of_batch_norm() {
    matrix(Features { tied: true, dropout: 0.2, batch_norm: true, ..Features::plain() });
}

#[test]
fn transparency_of_batch_norm_in_bfloat16() {
    let kind = Kind::BFloat16;
    let features = Features { tied: true, dropout: 0.2, batch_norm: true, ..Features::plain() };
    matrix(Features { kind, skip: true, ..features });
}

#[test]
fn transparency_of_rmsprop() {
    matrix(Features { tied: true, recipe: Recipe::RmsProp, ..Features::plain() });
}

#[test]
fn transparency_of_views() {
    let subject = Subject {
        model: &views::model,
        inputs: views::inputs(),
        batch: &views::batch,
        build: &views::build,
        may_skip: false,
        what: "views".into(),
    };
    subject.matrix(&[(vec![8], 4), (vec![3, 1, 6], 4)]);
}

#[test]
fn transparency_of_evaluation_and_prediction_in_any_order() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    let (inputs, targets) = batch(7, 3);
    let mut expected = None;
    for run in Run::all(model(features).len()) {
        let mut pipeline = run.builder(model(features), 3).build().unwrap();
        // Evaluates before any training, between two steps, and twice in a row.
        let before = pipeline.evaluate(&inputs, &targets).unwrap();
        let outputs = pipeline.predict(&inputs).unwrap();
        pipeline.train_step(&inputs, &targets).unwrap();
        let between = pipeline.evaluate(&inputs, &targets).unwrap();
        assert_eq!(between, pipeline.evaluate(&inputs, &targets).unwrap());
        pipeline.train_step(&inputs, &targets).unwrap();
        let found = (before, between, common::bits(&outputs[0]));
        assert_eq!(outputs[0].size(), [7, common::LENGTH, common::VOCABULARY]);
        let expected = expected.get_or_insert_with(|| found.clone());
        assert_eq!(found.0, expected.0, "{run:?}");
        assert_eq!(found.1, expected.1, "{run:?}");
        assert!(found.2 == expected.2, "{run:?}");
    }
}

#[test]
fn transparency_of_evaluation_between_training_steps() {
    let features = Features { tied: true, dropout: 0.2, ..Features::plain() };
    let run = Run { stages: 3, ..Run::plain() };
    let parameters = |evaluates: bool| {
        let mut pipeline = run.builder(model(features), 3).build().unwrap();
        for step in 0..3 {
            let (inputs, targets) = batch(5, step);
            if evaluates {
                pipeline.evaluate(&inputs, &targets).unwrap();
            }
            pipeline.train_step(&inputs, &targets).unwrap();
        }
        pipeline.parameters().unwrap()
    };
    assert_same_bits(&parameters(true), &parameters(false), "evaluation changes training");
}

/// The time at which a recomputation starts affects only the order of the actions.
#[test]
fn transparency_of_the_start_of_rematerialization() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    let (inputs, targets) = batch(7, 1);
    let train = |run: &Run, early: bool| {
        let builder = run.builder(model(features), 3).early_rematerialization(early);
        let mut pipeline = builder.build().unwrap();
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        let first: Vec<Op> = report.timeline.devices[0].iter().map(|own| own.action.op).collect();
        let begins = |pair: &&[Op]| matches!(pair, [Op::Rematerialize(_), Op::Receive(_)]);
        (pipeline.parameters().unwrap(), first.windows(2).filter(begins).count())
    };
    for remat in [Remat::Always, Remat::Selective, Remat::Segments(2), Remat::Offload] {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let run = Run { stages: 3, schedule, remat, ..Run::plain() };
            let ((early, before), (late, after)) = (train(&run, true), train(&run, false));
            assert_eq!((before, after), (3, 0), "{run:?}");
            assert_same_bits(&late, &early, &format!("{run:?} late"));
        }
    }
}

#[test]
fn transparency_of_m_is_rounding_and_masks_do_not_depend_on_it() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    let gradients = |micro_batches, kind| {
        let run = Run { stages: 2, ..Run::plain() };
        let mut pipeline = run.builder(model(features), micro_batches).kind(kind).build().unwrap();
        let (inputs, targets) = batch(7, 1);
        pipeline.train_step(&inputs, &targets).unwrap();
        pipeline.gradients().unwrap()
    };
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::Double, 1e-10)] {
        let expected = gradients(1, kind);
        for micro_batches in 2..8 {
            let found = gradients(micro_batches, kind);
            assert_close(&found, &expected, tolerance, &format!("M={micro_batches} {kind:?}"));
        }
    }
}

#[test]
fn transparency_of_frozen_layers() {
    let features = Features { skip: true, dropout: 0.2, ..Features::plain() };
    for frozen in ["embedding", "0.", "1.attention", "head"] {
        let train = |run: &Run| {
            let sequence = model(features).freeze([format!("{frozen}*")]);
            let mut pipeline = run.builder(sequence, 3).build().unwrap();
            let before = pipeline.parameters().unwrap();
            let (inputs, targets) = batch(7, 1);
            pipeline.train_step(&inputs, &targets).unwrap();
            (before, pipeline.gradients().unwrap(), pipeline.parameters().unwrap())
        };
        let expected = train(&Run::plain());
        for ((name, before), (_, after)) in expected.0.iter().zip(&expected.2) {
            let same = common::bits(before) == common::bits(after);
            assert_eq!(same, name.starts_with(frozen), "{name} with {frozen} frozen");
        }
        for run in Run::all(model(features).len()) {
            let found = train(&run);
            assert_same_bits(&found.1, &expected.1, &format!("{run:?} {frozen} frozen"));
            assert_same_bits(&found.2, &expected.2, &format!("{run:?} {frozen} frozen"));
        }
    }
}
