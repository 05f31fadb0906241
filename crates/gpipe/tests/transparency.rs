//! The first test to read. Family `transparency_`: the number of stages, the balance, the schedule and the
//! choice of what to re-materialize never change a bit of any loss, gradient or parameter; nor does it that
//! the state is taken out of one pipeline and put into another, which is run in another way.
//!
//! Whoever adds a value to an axis (a schedule, a transport, batch norm, resume) adds it to `Run::all` or
//! to `Features` and thereby runs the whole matrix on it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use common::{Features, Named, Recipe, Run, assert_close, assert_same_bits, batch, model};
use gpipe::Pipeline;
use tch::Kind;

/// What five steps give: losses, norms, rates and metrics; every step's gradients; parameters, averages and
/// optimizer state afterwards.
#[derive(Default)]
struct Computed {
    applied: usize,
    numbers: Vec<u64>,
    gradients: Named,
    state: Named,
}

/// Steps until the state is taken, if it is, and in all.
const TAKEN_AFTER: usize = 2;
const STEPS: usize = 5;

fn build(run: &Run, features: Features, micro_batches: usize) -> Pipeline {
    let builder = run.builder(model(features), micro_batches).clip_norm(1.0);
    features.build(builder).build().unwrap()
}

/// Trains; with `then`, the state is taken after two steps and put into a pipeline that is run so.
fn train(
    run: &Run,
    then: Option<&Run>,
    features: Features,
    samples: &[i64],
    micro_batches: usize,
) -> Computed {
    let mut pipeline = build(run, features, micro_batches);
    let mut computed = Computed::default();
    for step in 0..STEPS {
        if let (TAKEN_AFTER, Some(then)) = (step, then) {
            let state = pipeline.state().unwrap();
            pipeline = build(then, features, micro_batches);
            common::restore(&mut pipeline, state);
        }
        let (inputs, targets) = batch(samples[step % samples.len()], step as u64);
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        let numbers = &mut computed.numbers;
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits(), report.lr.to_bits()]);
        numbers.extend([report.loss_scale.to_bits(), report.step]);
        numbers.extend(report.metrics.iter().map(|metric| metric.sum.to_bits()));
        // In float16 one of few samples may overflow: then that, too, must be the same, and the scale after it.
        numbers.push(u64::from(report.skipped));
        computed.applied += usize::from(!report.skipped);
        let named = pipeline.gradients().unwrap().into_iter();
        computed.gradients.extend(named.map(|(name, t)| (format!("step {step} {name}"), t)));
    }
    computed.state = common::flat(&mut pipeline);
    computed
}

fn matrix(features: Features) {
    // Even; ragged, and ragged in another way in the next step; fewer samples than micro-batches, and one.
    let mut cases = vec![(vec![8], 4), (vec![7, 5], 3), (vec![3, 1, 6], 4)];
    let widened = std::env::var_os("GPIPE_SOAK").is_some();
    if widened {
        cases.extend((1..=9).flat_map(|n| (1..=9).map(move |m| (vec![n], m))));
    }
    for (samples, micro_batches) in cases {
        let samples = &samples[..];
        let expected = train(&Run::plain(), None, features, samples, micro_batches);
        assert!(expected.gradients.len() > 5 * 9, "every parameter has a gradient in every step");
        // One of the few samples that only the widened matrix has may overflow in float16; nothing else is skipped.
        let skipped = STEPS - expected.applied;
        assert!(
            skipped <= usize::from(widened && features.kind == Kind::Half),
            "{skipped} skipped"
        );
        let runs = Run::all(model(features).len());
        for (index, run) in runs.iter().enumerate() {
            // Every way to run is also one to begin with, and one to go on with: 7 shares no factor with
            // how many there are of each kind.
            let then = &runs[(7 * index + 3) % runs.len()];
            for then in [None, Some(then)] {
                let what =
                    format!("{run:?}, then {then:?}: {features:?} N={samples:?} M={micro_batches}");
                let found = train(run, then, features, samples, micro_batches);
                assert_eq!(found.numbers, expected.numbers, "losses and norms: {what}");
                assert_same_bits(&found.gradients, &expected.gradients, &what);
                assert_same_bits(&found.state, &expected.state, &what);
            }
        }
    }
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
    let features = Features { tied: true, dropout: 0.2, batch_norm: true, ..Features::plain() };
    matrix(features);
    matrix(Features { kind: Kind::BFloat16, skip: true, ..features });
}

#[test]
fn transparency_of_rmsprop() {
    matrix(Features { tied: true, recipe: Recipe::RmsProp, ..Features::plain() });
}

#[test]
fn transparency_of_evaluation_and_prediction_in_any_order() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    let (inputs, targets) = batch(7, 3);
    let mut expected = None;
    for run in Run::all(model(features).len()) {
        let mut pipeline = run.builder(model(features), 3).build().unwrap();
        // Before any training, between two steps, and twice.
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
            let sequence = model(features).freeze(|name| name.starts_with(frozen));
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
