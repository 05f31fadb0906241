//! `fault_layer_*`: layers that fail, panic or produce NaN, and optimizers that fail in the update.

use std::sync::atomic::Ordering;

use gpipe::{
    Balance, Forward, Infer, Layer, LayerError, MeanSquaredError, Optimizer, ParameterInfo,
    Pipeline, Remat, Schedule, Sequence, Sgd, StateSpec, TensorSpec, Update,
    layers::{Linear, Pop},
};
use tch::{Kind, Tensor};

use super::{
    Deed, M, Pair, Trap, Way, assert_says, common::assert_same_bits, data, refused,
    silence_injected_panics, ways,
};

#[test]
fn fault_layer_error_in_forward_and_rematerialization() {
    for way in ways() {
        let trap = Trap::new(Deed::Error);
        let mut pair = Pair::new(&way, &trap);
        let recomputes = way.remat == Remat::Always;
        for call in 0..if recomputes { 2 * M as i64 } else { M as i64 } {
            trap.set(call);
            let (x, y) = data();
            let text = pair.harm(|p| p.train_step(&x, &y));
            trap.set(-1);
            let stage = format!("stage {}, micro-batch", way.stage_of(1));
            assert_says(&text, &[&stage, "layer 'middle'", "injected error: do not inject it"]);
            // The schedule decides which calls are forwards and which recompute. GPipe separates
            // them.
            if way.schedule == Schedule::GPipe {
                let place = format!("micro-batch {}: ", call % M as i64);
                let op = if call < M as i64 { 'F' } else { 'R' };
                let action = format!("{}{op}{}: ", way.stage_of(1), call % M as i64);
                assert_says(&text, &[&place, &action]);
            }
        }
        trap.set(1);
        let (x, y) = data();
        let place = format!("stage {}, micro-batch 1", way.stage_of(1));
        assert_says(&pair.harm(|p| p.evaluate(&x, &y)), &[&place, "layer 'middle'"]);
        trap.set(1);
        assert_says(&pair.harm(|p| p.predict(&x)), &[&place, "layer 'middle'"]);
    }
}

#[test]
fn fault_layer_error_in_a_segment_that_is_recomputed_within_the_backward() {
    for stages in [1, 2] {
        let trap = Trap::new(Deed::Error);
        let way = Way { remat: Remat::Segments(2), ..Way::plain(stages) };
        let mut pair = Pair::new(&way, &trap);
        for micro_batch in 0..M {
            trap.set((M + micro_batch) as i64);
            let (x, y) = data();
            let text = pair.harm(|p| p.train_step(&x, &y));
            let place = format!("stage 0, micro-batch {micro_batch}");
            assert_says(&text, &[&place, "layer 'middle'", "injected error"]);
        }
    }
}

#[test]
fn fault_layer_panic_in_forward_and_rematerialization() {
    silence_injected_panics();
    for way in ways() {
        let trap = Trap::new(Deed::Panic);
        let mut pair = Pair::new(&way, &trap);
        let recomputes = way.remat == Remat::Always;
        for call in 0..if recomputes { 2 * M as i64 } else { M as i64 } {
            trap.set(call);
            let (x, y) = data();
            let text = pair.harm(|p| p.train_step(&x, &y));
            let stage = format!("stage {}, micro-batch", way.stage_of(1));
            assert_says(&text, &[&stage, "panicked: injected panic"]);
        }
        trap.set(2);
        let (x, _) = data();
        assert_says(&pair.harm(|p| p.predict(&x)), &["micro-batch 2", "injected panic"]);
    }
}

#[test]
fn fault_layer_panic_names_the_layer() {
    silence_injected_panics();
    let trap = Trap::new(Deed::Panic);
    let mut pipeline = Way::plain(1).builder(&trap).build().unwrap();
    trap.set(0);
    let (x, y) = data();
    assert_says(&refused(pipeline.train_step(&x, &y)), &["layer 'middle'", "injected panic"]);
}

#[test]
fn fault_layer_nan_in_the_middle_is_named() {
    for way in ways() {
        let mut pair = Pair::new(&way, &Trap::new(Deed::NanAbove));
        for micro_batch in 0..M as i64 {
            let (x, y) = data();
            let _ = x.narrow(0, 2 * micro_batch + 1, 1).fill_(1e6);
            let text = pair.harm(|p| p.train_step(&x, &y));
            let place = format!("stage {}, micro-batch {micro_batch}", way.stage_of(1));
            assert_says(&text, &[&place, "layer 'middle': its output", "nothing was updated"]);
        }
    }
}

#[test]
fn fault_layer_nan_that_does_not_come_again_changes_nothing() {
    for way in ways().into_iter().filter(|way| way.remat == Remat::Never) {
        let trap = Trap::new(Deed::Nan);
        let mut pair = Pair::new(&way, &trap);
        trap.set(1);
        let (x, y) = data();
        assert_says(&pair.harm(|p| p.train_step(&x, &y)), &["is not finite"]);
    }
}

#[test]
fn fault_layer_panic_in_the_run_that_names_a_nan() {
    silence_injected_panics();
    let trap = Trap::new(Deed::Panic);
    let mut pair = Pair::new(&Way::plain(1), &trap);
    let (x, y) = data();
    let _ = x.narrow(0, 3, 1).fill_(f64::NAN);
    // Calls 0 and 1 belong to the first run, which ends at the loss of micro-batch 1. Call 2
    // belongs to the second run.
    trap.set(2);
    let text = pair.harm(|p| p.train_step(&x, &y));
    assert!(text.contains("is not finite") || text.contains("injected panic"), "{text}");
    assert!(trap.at.load(Ordering::SeqCst) < 0, "there was a second run");
}

/// y = x + sqrt(0 x): equal to x, with a gradient of 0 / 0.
struct NanBackward;

impl Layer for NanBackward {
    fn kind(&self) -> &'static str {
        "nan-backward"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_add(&inputs[0].f_mul_scalar(0.0)?.f_abs()?.f_sqrt()?)?])
    }
}

#[test]
fn fault_layer_nan_in_a_backward_is_named() {
    let model = Sequence::new()
        .push("one", Linear::new(4, 8))
        .push("two", NanBackward)
        .push("three", Linear::new(8, 2));
    for stages in 1..=3 {
        let mut pipeline = Pipeline::builder(model.clone(), TensorSpec::new([6, 4], Kind::Float))
            .stages(stages)
            .balance(Balance::Uniform)
            .micro_batches(M)
            .loss(MeanSquaredError)
            .optimizer(Sgd::new(0.1))
            .build()
            .unwrap();
        let before = pipeline.parameters().unwrap();
        let (x, y) = data();
        assert!(pipeline.evaluate(&x, &y).unwrap().loss.is_finite());
        let text = refused(pipeline.train_step(&x, &y));
        assert_says(&text, &["micro-batch 0", "the gradient of its input", "'two'"]);
        assert_same_bits(&pipeline.parameters().unwrap(), &before, "after a NaN in a backward");
    }
}

/// An optimizer that fails in the middle of an update: the only fault that may leave a step half
/// done.
#[derive(Debug, Clone)]
struct BadOptimizer {
    panics: bool,
}

impl Optimizer for BadOptimizer {
    fn name(&self) -> &'static str {
        "bad"
    }

    fn state(&self, _: &ParameterInfo) -> Vec<StateSpec> {
        Vec::new()
    }

    fn temporaries(&self) -> usize {
        0
    }
    fn lr(&self) -> f64 {
        0.1
    }

    fn apply(&self, _: &Update) -> Result<(), LayerError> {
        assert!(!self.panics, "injected panic");
        Err(LayerError::Value("injected error".into()))
    }
}

#[test]
fn fault_layer_an_update_that_fails_half_way_says_what_to_do() {
    silence_injected_panics();
    for stages in [1, 4] {
        for panics in [false, true] {
            let builder = Way::plain(stages).builder(&Trap::new(Deed::Error));
            let mut pipeline = builder.optimizer(BadOptimizer { panics }).build().unwrap();
            let (x, y) = data();
            let whose = match panics {
                true => "the optimizer's code panicked",
                false => "optimizer bad, for ",
            };
            let says = ["the update was ", "restore a checkpoint", "injected", whose];
            assert_says(&refused(pipeline.train_step(&x, &y)), &says);
            for text in [refused(pipeline.train_step(&x, &y)), refused(pipeline.predict(&x))] {
                assert_says(&text, &["cannot go on", "restore a checkpoint", "injected"]);
            }
        }
    }
}

/// A layer that claims to keep the shape, but drops all features except the first.
struct Liar;

impl Layer for Liar {
    fn kind(&self) -> &'static str {
        "liar"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_narrow(1, 0, 1)?])
    }
}

/// A layer that stashes a different tensor than its infer declares.
struct Hoarder;

impl Layer for Hoarder {
    fn kind(&self) -> &'static str {
        "hoarder"
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        ctx.stash("hoard", inputs[0].clone())?;
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        ctx.stash("hoard", &inputs[0].f_narrow(1, 0, 1)?);
        Ok(vec![inputs[0].shallow_clone()])
    }
}

/// The size of a skip that a process receives is bounded by what the layer's infer declares.
#[test]
fn fault_layer_whose_stash_contradicts_its_infer() {
    let model = Sequence::new()
        .push("one", Linear::new(4, 2))
        .push("two", Hoarder)
        .push("three", Linear::new(2, 2))
        .push("four", Pop::new("hoard"));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([6, 4], Kind::Float))
        .stages(2)
        .micro_batches(M)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()
        .unwrap();
    let (x, y) = data();
    let text = refused(pipeline.train_step(&x, &y));
    let says = "its forward stashed float32 [2, 1] as 'hoard', its infer says float32 [2, 2]";
    assert_says(&text, &["layer 'two'", says]);
}

/// If this were the last layer, the loss would broadcast its output, and training would continue
/// with wrong values.
#[test]
fn fault_layer_whose_forward_contradicts_its_infer() {
    for stages in 1..=2 {
        let model = Sequence::new().push("one", Linear::new(4, 2)).push("two", Liar);
        let mut pipeline = Pipeline::builder(model, TensorSpec::new([6, 4], Kind::Float))
            .stages(stages)
            .micro_batches(M)
            .loss(MeanSquaredError)
            .optimizer(Sgd::new(0.1))
            .build()
            .unwrap();
        let (x, y) = data();
        let text = refused(pipeline.train_step(&x, &y));
        assert_says(
            &text,
            &["layer 'two'", "its forward gave float32 [2, 1], its infer says float32 [2, 2]"],
        );
    }
}
