//! A training step in parts: `forward`, `backward`, `accumulate` and `update`.
//!
//! - `transparency_`: the parts equal `train_step` to the bit, however they run.
//! - `oracle_`: input gradients equal autograd's and finite differences. A GAN step, accumulations
//!   and held bytes equal those computed without a pipeline.
//! - `fault_`: wrong use is an error, and a failure leaves what the documentation says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{
    Features, LENGTH, Named, Recipe, Run, assert_close, assert_same_bits, batch, bits, flat, model,
};
use gpipe::{
    Bytes, Count, CrossEntropy, Error, Forward, Infer, Kernels, Layer, LayerError, Loss,
    LossContext, MeanSquaredError, Pipeline, PipelineBuilder, Remat, Schedule, Sequence, Sgd,
    TensorSpec,
    estimate::Rate,
    layers::{Activation, Linear},
    plan::{Plan, PlanDevice, predict},
};
use gpipe_core::Op;
use tch::{Kind, Reduction, Tensor};

const STEPS: u64 = 3;

/// How a step is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Whole,
    Accumulated,
    InParts,
    /// In parts, with the gradients read before the update.
    Read,
}

/// The loss of the pipeline, computed by the caller from the outputs.
fn own_loss(pipeline: &Pipeline, outputs: &[Tensor], targets: &Tensor) -> Tensor {
    let count = pipeline.count_of(targets).unwrap();
    let sum = CrossEntropy::default()
        .sum(&LossContext::default(), outputs, &[targets.shallow_clone()])
        .unwrap();
    sum * (1.0 / count)
}

/// Takes one step; returns its loss and norm as bits.
fn step(pipeline: &mut Pipeline, way: Way, seed: u64) -> (u64, u64) {
    let (inputs, targets) = batch(7, seed);
    match way {
        Way::Whole => {
            let report = pipeline.train_step(&inputs, &targets).unwrap();
            (report.loss.to_bits(), report.grad_norm.to_bits())
        }
        Way::Accumulated => {
            let count = Count::Total(pipeline.count_of(&targets).unwrap());
            let evaluation = pipeline.accumulate(&inputs, &targets, count.clone()).unwrap();
            let report = pipeline.update().unwrap();
            assert_eq!(report.loss, Some(evaluation.loss));
            assert_eq!(report.step, seed + 1);
            (evaluation.loss.to_bits(), report.grad_norm.to_bits())
        }
        Way::InParts | Way::Read => {
            let outputs = pipeline.forward(&inputs).unwrap();
            own_loss(pipeline, outputs.tensors(), &targets).backward();
            // An evaluation between the parts changes nothing.
            let before = pipeline.evaluate(&inputs, &targets).unwrap();
            let grads = pipeline.backward(&outputs, outputs.gradients()).unwrap();
            assert!(grads.iter().all(Option::is_none), "tokens have no gradient");
            assert_eq!(pipeline.evaluate(&inputs, &targets).unwrap(), before);
            if way == Way::Read {
                assert!(!pipeline.accumulated_gradients().unwrap().is_empty());
            }
            let report = pipeline.update().unwrap();
            assert_eq!(report.loss, None);
            (0, report.grad_norm.to_bits())
        }
    }
}

/// The way of one stage that has the bits of `way`: whole steps. On GPUs the loss of a caller, who
/// computes it on the CPU, rounds differently from the pipeline's. There it is compared with a
/// caller's.
fn alike(way: Way) -> Way {
    if common::on_gpus() && way != Way::Accumulated { Way::InParts } else { Way::Whole }
}

fn trained(builder: PipelineBuilder, way: Way) -> (Vec<(u64, u64)>, Named) {
    let mut pipeline = builder.build().unwrap();
    let numbers = (0..STEPS).map(|seed| step(&mut pipeline, way, seed)).collect();
    (numbers, flat(&mut pipeline))
}

/// Runs the small model of `common` in all ways, and compares with whole steps of one stage.
fn matrix(features: Features) {
    let build = |run: &Run| {
        let builder = run.builder(model(features), 3).kind(features.kind).clip_norm(1.0);
        match features.recipe {
            Recipe::Everything => features.build(builder).loss(CrossEntropy::default()),
            _ => builder,
        }
    };
    let ways = [Way::Accumulated, Way::InParts, Way::Read];
    let expected = ways.map(|way| trained(build(&Run::plain()), alike(way)));
    for run in Run::all(model(features).len()) {
        for (way, expected) in ways.into_iter().zip(&expected) {
            let found = trained(build(&run), way);
            let what = format!("{way:?}, {run:?}: {features:?}");
            for (found, expected) in found.0.iter().zip(&expected.0) {
                assert_eq!(found.1, expected.1, "norm: {what}");
                assert!(way != Way::Accumulated || found.0 == expected.0, "loss: {what}");
            }
            assert_same_bits(&found.1, &expected.1, &what);
        }
    }
}

#[test]
fn transparency_of_parts() {
    matrix(Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() });
}

#[test]
fn transparency_of_parts_with_batch_norm() {
    matrix(Features { batch_norm: true, dropout: 0.2, ..Features::plain() });
}

#[test]
fn transparency_of_parts_in_bfloat16() {
    matrix(Features { tied: true, kind: Kind::BFloat16, ..Features::plain() });
}

#[test]
fn transparency_of_parts_with_a_recipe_of_everything() {
    matrix(Features { tied: true, recipe: Recipe::Everything, ..Features::plain() });
}

/// One, two and three accumulated mini-batches equal one larger mini-batch: with the same
/// micro-batches, to the bit, masks and batch norm's statistics included.
#[test]
fn transparency_of_accumulated_mini_batches() {
    let features =
        Features { tied: true, skip: true, dropout: 0.2, batch_norm: true, ..Features::plain() };
    let (inputs, targets) = batch(12, 5);
    let train = |run: &Run, pieces: i64, count: Count, kind: Kind| {
        // Twelve samples in six micro-batches of two.
        let micro_batches = if pieces == 0 { 6 } else { 6 / pieces as usize };
        let builder = run.builder(model(features), micro_batches).kind(kind);
        let mut pipeline = builder.build().unwrap();
        if pieces == 0 {
            pipeline.train_step(&inputs, &targets).unwrap();
            return (flat(&mut pipeline), pipeline.gradients().unwrap());
        }
        for piece in 0..pieces {
            let own = |tensor: &Tensor| tensor.narrow(0, piece * 12 / pieces, 12 / pieces);
            pipeline.accumulate(own(&inputs), own(&targets), count.clone()).unwrap();
        }
        pipeline.update().unwrap();
        (flat(&mut pipeline), pipeline.gradients().unwrap())
    };
    let expected = train(&Run::plain(), 0, Count::Unknown, Kind::Float);
    let exact = train(&Run::plain(), 0, Count::Unknown, Kind::Double);
    let total = Count::Total(12.0 * LENGTH as f64 - 3.0);
    for pieces in [1, 2, 3] {
        for run in Run::all(model(features).len()).iter().step_by(3) {
            let found = train(run, pieces, total.clone(), Kind::Float);
            assert_same_bits(&found.0, &expected.0, &format!("{pieces} pieces, {run:?}"));
            assert_same_bits(&found.1, &expected.1, &format!("{pieces} pieces, {run:?}"));
        }
        // Without a total, the update divides, so all roundings differ.
        let found = train(&Run::plain(), pieces, Count::Unknown, Kind::Double);
        assert_close(&found.1, &exact.1, 1e-10, "an unknown total");
    }
}

/// A network of floating-point inputs, and its pipeline.
fn tanh_net() -> Sequence {
    Sequence::new()
        .push("first", Linear::new(5, 8))
        .push("tanh", Activation::Tanh)
        .push("second", Linear::new(8, 6))
        .push("again", Activation::Tanh)
        .push("third", Linear::new(6, 3))
}

fn tanh_builder(run: &Run, kind: Kind) -> PipelineBuilder {
    Pipeline::builder(tanh_net(), TensorSpec::new([6, 5], kind))
        .stages(run.stages)
        .schedule(run.schedule.clone())
        .remat(run.remat)
        .micro_batches(3)
        .kind(kind)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .input_gradients()
}

/// The same network without a pipeline.
fn plain_net(parameters: &Named, x: &Tensor) -> Tensor {
    let of = |name: &str| &parameters.iter().find(|(own, _)| own == name).unwrap().1;
    let linear = |x: &Tensor, layer: &str| {
        x.linear(of(&format!("{layer}.weight")), Some(of(&format!("{layer}.bias"))))
    };
    let x = linear(x, "first").tanh();
    linear(&linear(&x, "second").tanh(), "third")
}

#[test]
fn oracle_gradients_of_inputs_equal_autograds() {
    let x = common::uniform(&[6, 5], 3, Kind::Double);
    let weights = common::uniform(&[6, 3], 4, Kind::Double);
    let mut expected: Option<Vec<u64>> = None;
    for run in Run::all(tanh_net().len()) {
        let mut pipeline = tanh_builder(&run, Kind::Double).build().unwrap();
        let outputs = pipeline.forward(&x).unwrap();
        (&outputs.tensors()[0] * &weights).sum(Kind::Double).backward();
        let grads = pipeline.backward(&outputs, outputs.gradients()).unwrap();
        let found = grads[0].as_ref().unwrap();
        let leaf = x.copy().set_requires_grad(true);
        let plain = plain_net(&pipeline.parameters().unwrap(), &leaf);
        (plain * &weights).sum(Kind::Double).backward();
        let named = |tensor: Tensor| vec![("x".to_owned(), tensor)];
        // float64: sums of at most 8 products differ in order only.
        assert_close(&named(found.copy()), &named(leaf.grad()), 1e-12, &format!("{run:?}"));
        let expected = expected.get_or_insert_with(|| bits(found));
        assert!(bits(found) == *expected, "{run:?}");
    }
}

/// Central differences of the loss through a whole pipeline, for each input element.
#[test]
fn oracle_gradients_of_inputs_equal_finite_differences() {
    let x = common::uniform(&[6, 5], 7, Kind::Double);
    let run = Run { stages: 3, schedule: Schedule::ZbH1, ..Run::plain() };
    let mut pipeline = tanh_builder(&run, Kind::Double).build().unwrap();
    let outputs = pipeline.forward(&x).unwrap();
    outputs.tensors()[0].square().sum(Kind::Double).backward();
    let grads = pipeline.backward(&outputs, outputs.gradients()).unwrap();
    pipeline.discard_update().unwrap();
    let grad = Vec::<f64>::try_from(grads[0].as_ref().unwrap().reshape([-1])).unwrap();
    let mut loss = |at: i64, by: f64| {
        let moved = x.copy();
        let _ = moved.view([-1]).narrow(0, at, 1).g_add_scalar_(by);
        let outputs = pipeline.predict(&moved).unwrap();
        outputs[0].square().sum(Kind::Double).double_value(&[])
    };
    for (at, grad) in grad.into_iter().enumerate() {
        let h = 1e-5;
        let difference = (loss(at as i64, h) - loss(at as i64, -h)) / (2.0 * h);
        // The third derivative's share, h^2, and rounding, eps / h, are both near 1e-10, times
        // numbers of about 10.
        assert!((difference - grad).abs() < 5e-9, "{at}: {difference} {grad}");
    }
}

/// A step of a generator inside a GAN, with both networks as pipelines, against plain autograd.
#[test]
fn oracle_a_gan_step_equals_autograds() {
    let noise = common::uniform(&[6, 5], 1, Kind::Double);
    let real = common::uniform(&[6, 3], 2, Kind::Double);
    let judge = || {
        Sequence::new()
            .push("first", Linear::new(3, 7))
            .push("tanh", Activation::Tanh)
            .push("score", Linear::new(7, 1))
    };
    let run = Run { stages: 2, schedule: Schedule::OneFOneB, remat: Remat::Always, ..Run::plain() };
    let mut generator = tanh_builder(&run, Kind::Double).build().unwrap();
    let mut critic = Pipeline::builder(judge(), TensorSpec::new([6, 3], Kind::Double))
        .stages(2)
        .micro_batches(2)
        .kind(Kind::Double)
        .seed(5)
        .optimizer(Sgd::new(0.1))
        .input_gradients()
        .build()
        .unwrap();
    let start = (generator.parameters().unwrap(), critic.parameters().unwrap());
    // The critic's step: scores of real samples up, of made ones down.
    let fake = generator.forward(&noise).unwrap();
    let made = fake.tensors()[0].detach();
    let (on_real, on_made) = (critic.forward(&real).unwrap(), critic.forward(&made).unwrap());
    let loss = on_made.tensors()[0].mean(Kind::Double) - on_real.tensors()[0].mean(Kind::Double);
    loss.backward();
    critic.backward(&on_real, on_real.gradients()).unwrap();
    critic.backward(&on_made, on_made.gradients()).unwrap();
    critic.update().unwrap();
    // The generator's step, through the critic.
    let judged = critic.forward(&made).unwrap();
    (-judged.tensors()[0].mean(Kind::Double)).backward();
    let through = critic.backward(&judged, judged.gradients()).unwrap();
    critic.discard_update().unwrap();
    generator.backward(&fake, through).unwrap();
    generator.update().unwrap();
    // The same without pipelines.
    let leaves = |named: &Named| -> Named {
        let leaf = |(name, tensor): &(String, Tensor)| {
            (name.clone(), tensor.copy().set_requires_grad(true))
        };
        named.iter().map(leaf).collect()
    };
    let descend = |named: &Named| {
        let _no_grad = tch::no_grad_guard();
        for (_, parameter) in named {
            let grad = parameter.grad();
            let _ = parameter.shallow_clone().f_sub_(&(grad * 0.1)).unwrap();
            parameter.shallow_clone().zero_grad();
        }
    };
    let (own, other) = (leaves(&start.0), leaves(&start.1));
    let score = |x: &Tensor| {
        let of = |name: &str| &other.iter().find(|(own, _)| own == name).unwrap().1;
        let hidden = x.linear(of("first.weight"), Some(of("first.bias"))).tanh();
        hidden.linear(of("score.weight"), Some(of("score.bias")))
    };
    let made = plain_net(&own, &noise);
    (score(&made.detach()).mean(Kind::Double) - score(&real).mean(Kind::Double)).backward();
    descend(&other);
    (-score(&made).mean(Kind::Double)).backward();
    descend(&own);
    // float64: sums differ in the order of micro-batches only.
    assert_close(&generator.parameters().unwrap(), &own, 1e-12, "the generator");
    assert_close(&critic.parameters().unwrap(), &other, 1e-12, "the critic");
}

/// Three accumulations against one plain gradient.
#[test]
fn oracle_three_accumulations_equal_autograds() {
    let run = Run { stages: 3, schedule: Schedule::ZbH1, ..Run::plain() };
    let mut pipeline = tanh_builder(&run, Kind::Double).build().unwrap();
    let start = pipeline.parameters().unwrap();
    let leaves: Named =
        start.iter().map(|(name, t)| (name.clone(), t.copy().set_requires_grad(true))).collect();
    let mut sum = Tensor::from(0.0_f64);
    for seed in 0..3 {
        let samples = 4 + seed as i64;
        let x = common::uniform(&[samples, 5], seed, Kind::Double);
        let y = common::uniform(&[samples, 3], seed + 9, Kind::Double);
        pipeline.accumulate(&x, &y, Count::Unknown).unwrap();
        sum += plain_net(&leaves, &x).mse_loss(&y, Reduction::Sum);
    }
    let report = pipeline.update().unwrap();
    assert_eq!(report.count, 45.0);
    let loss = sum / 45.0;
    assert!((report.loss.unwrap() - loss.double_value(&[])).abs() < 1e-14);
    loss.backward();
    let expected: Named = leaves
        .iter()
        .map(|(name, own)| (name.clone(), (own - own.grad() * 0.1).detach()))
        .collect();
    assert_close(&pipeline.parameters().unwrap(), &expected, 1e-12, "three accumulations");
}

fn live(pipeline: &mut Pipeline) -> Bytes {
    let x = common::uniform(&[6, 5], 3, Kind::Float);
    // Evaluations report no memory: run a forward, and drop it.
    let outputs = pipeline.forward(&x).unwrap();
    outputs.held().iter().copied().sum()
}

#[test]
fn oracle_dropped_outputs_free_what_stages_hold_and_the_number_of_open_forwards_is_bounded() {
    let why = "a GPU's statistics change when copies end";
    if common::is_about_cpus(
        "oracle_dropped_outputs_free_what_stages_hold_and_the_number_of_open_forwards_is_bounded",
        why,
    ) {
        return;
    }
    let run = Run { stages: 2, remat: Remat::Never, ..Run::plain() };
    let mut pipeline = tanh_builder(&run, Kind::Float).open_forwards(3).build().unwrap();
    let x = common::uniform(&[6, 5], 3, Kind::Float);
    let open: Vec<_> = (0..3).map(|_| pipeline.forward(&x).unwrap()).collect();
    let held: Vec<_> = open.iter().map(|outputs| outputs.held().to_vec()).collect();
    assert!(held.iter().all(|own| *own == held[0] && own.iter().all(|bytes| bytes.0 > 0)));
    let error = pipeline.forward(&x).err().unwrap().to_string();
    assert!(error.contains("3 forwards are open"), "{error}");
    drop(open);
    // Each forward holds the same again, and is freed before the next begins.
    let each = held[0].iter().copied().sum::<Bytes>();
    for _ in 0..9 {
        assert_eq!(live(&mut pipeline), each);
    }
    // An update closes the forwards that are open.
    let first = pipeline.forward(&x).unwrap();
    let second = pipeline.forward(&x).unwrap();
    pipeline.backward(&first, Tensor::ones([6, 3], common::cpu(Kind::Float))).unwrap();
    pipeline.update().unwrap();
    let grad = Tensor::ones([6, 3], common::cpu(Kind::Float));
    let error = pipeline.backward(&second, grad).unwrap_err().to_string();
    assert!(error.contains("run the forward again"), "{error}");
    // Outputs may outlive their pipeline.
    let last = pipeline.forward(&x).unwrap();
    drop(pipeline);
    drop(last);
}

/// What a dropped forward computed leaves no trace: neither statistics nor gradients. Its samples
/// keep their numbers.
#[test]
fn transparency_of_dropped_forwards() {
    let features = Features { batch_norm: true, ..Features::plain() };
    let train = |drops: bool, run: &Run| {
        let mut pipeline = run.builder(model(features), 3).build().unwrap();
        for seed in 0..2 {
            if drops {
                drop(pipeline.forward(&batch(5, 9).0).unwrap());
            }
            step(&mut pipeline, Way::InParts, seed);
        }
        flat(&mut pipeline)
    };
    let expected = train(false, &Run::plain());
    for run in Run::all(model(features).len()).iter().step_by(5) {
        assert_same_bits(&train(true, run), &expected, &format!("{run:?}"));
    }
}

#[test]
fn fault_wrong_use_of_the_parts_is_an_error_and_loses_nothing() {
    let run = Run { stages: 2, ..Run::plain() };
    let build = || tanh_builder(&run, Kind::Float).build().unwrap();
    let (mut pipeline, mut other) = (build(), build());
    let x = common::uniform(&[6, 5], 3, Kind::Float);
    let y = common::uniform(&[6, 3], 4, Kind::Float);
    let grad = || Tensor::ones([6, 3], common::cpu(Kind::Float));
    let start = pipeline.parameters().unwrap();
    let refused = |result: gpipe::Result<()>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error:?} lacks {text:?}");
    };
    refused(pipeline.update().map(drop), "call backward or accumulate first");
    let outputs = pipeline.forward(&x).unwrap();
    refused(pipeline.train_step(&x, &y).map(drop), "an update is under way");
    refused(pipeline.set_parameters(&start), "an update is under way");
    refused(other.backward(&outputs, grad()).map(drop), "another pipeline's");
    refused(pipeline.backward(&outputs, vec![grad(), grad()]).map(drop), "2 gradients for 1");
    refused(pipeline.backward(&outputs, vec![None]).map(drop), "no output has a gradient");
    let wrong = Tensor::ones([6, 4], common::cpu(Kind::Float));
    refused(pipeline.backward(&outputs, wrong).map(drop), "output 0 is");
    let count = Count::Total(f64::NAN);
    refused(pipeline.accumulate(&x, &y, count).map(drop), "the total count is NaN");
    // After all these the forward is still open.
    pipeline.backward(&outputs, grad()).unwrap();
    refused(pipeline.backward(&outputs, grad()).map(drop), "run the forward again");
    refused(pipeline.accumulate(&x, &y, Count::Unknown).map(drop), "use one of the three");
    pipeline.discard_update().unwrap();
    pipeline.accumulate(&x, &y, Count::Total(36.0)).unwrap();
    refused(pipeline.accumulate(&x, &y, Count::Total(37.0)).map(drop), "before it was 36");
    refused(pipeline.update().map(drop), "the mini-batches count 18");
    pipeline.accumulate(&x, &y, Count::Total(36.0)).unwrap();
    pipeline.accumulated_gradients().unwrap();
    refused(pipeline.accumulate(&x, &y, Count::Total(36.0)).map(drop), "read or changed");
    assert_same_bits(&pipeline.parameters().unwrap(), &start, "nothing was updated");
    assert_eq!(pipeline.update().unwrap().step, 1);
}

/// After a failed forward, gradients and other forwards remain. After a failed backward or
/// accumulation the update is gone, and nothing else. Then training goes on as if it had not been.
#[test]
fn fault_what_remains_after_a_failed_part() {
    let (inputs, targets) = batch(7, 1);
    let total = |pipeline: &Pipeline| Count::Total(2.0 * pipeline.count_of(&targets).unwrap());
    let features = Features { tied: true, ..Features::plain() };
    for run in Run::all(model(features).len()).iter().filter(|run| run.stages > 1).step_by(7) {
        for at in ['F', 'B'] {
            let fails = Arc::new(AtomicBool::new(false));
            let (stage, armed) = (run.stages as u32 - 1, Arc::clone(&fails));
            let hit = move |op: Op| match op {
                Op::Forward(m) => at == 'F' && m.0 == 1,
                Op::Backward(m) | Op::BackwardInput(m) => at == 'B' && m.0 == 1,
                _ => false,
            };
            let builder = run.builder(model(features), 3).before_action(move |action| {
                if action.stage.0 == stage && hit(action.op) && armed.load(Ordering::SeqCst) {
                    return Err(LayerError::Value("injected".into()));
                }
                Ok(())
            });
            let mut pipeline = builder.build().unwrap();
            let start = flat(&mut pipeline);
            let outputs = pipeline.forward(&inputs).unwrap();
            fails.store(true, Ordering::SeqCst);
            let grads = || {
                let shape = outputs.tensors()[0].size();
                Tensor::ones(shape.as_slice(), common::cpu(Kind::Float))
            };
            let failed = match at {
                'F' => pipeline.forward(&inputs).map(drop),
                _ => pipeline.backward(&outputs, grads()).map(drop),
            };
            let failed = failed.unwrap_err();
            assert!(matches!(failed, Error::Step { .. }), "{failed}");
            fails.store(false, Ordering::SeqCst);
            match at {
                'F' => drop(pipeline.backward(&outputs, grads()).unwrap()),
                _ => {
                    let error = pipeline.backward(&outputs, grads()).unwrap_err().to_string();
                    assert!(error.contains("run the forward again"), "{error}");
                    let error = pipeline.update().unwrap_err().to_string();
                    assert!(error.contains("no gradient"), "{error}");
                }
            }
            pipeline.discard_update().unwrap();
            // A failed accumulation discards what was accumulated before it.
            let count = total(&pipeline);
            pipeline.accumulate(&inputs, &targets, count.clone()).unwrap();
            fails.store(true, Ordering::SeqCst);
            pipeline.accumulate(&inputs, &targets, count).unwrap_err();
            fails.store(false, Ordering::SeqCst);
            let error = pipeline.update().unwrap_err().to_string();
            assert!(error.contains("no gradient"), "{error}");
            assert_same_bits(&flat(&mut pipeline), &start, "nothing was updated");
            step(&mut pipeline, Way::InParts, 0);
            let mut fresh = run.builder(model(features), 3).build().unwrap();
            step(&mut fresh, alike(Way::InParts), 0);
            assert_same_bits(&flat(&mut pipeline), &flat(&mut fresh), &format!("{run:?}"));
        }
    }
}

/// A state in the middle of an update left out the gradients that had accumulated, so a resumed
/// training went on without a part of its mini-batches.
#[test]
fn regression_accumulated_gradients_are_not_lost_in_a_state() {
    let mut pipeline = tanh_builder(&Run::plain(), Kind::Float).build().unwrap();
    let (x, y) =
        (common::uniform(&[6, 5], 3, Kind::Float), common::uniform(&[6, 3], 4, Kind::Float));
    let outputs = pipeline.forward(&x).unwrap();
    pipeline.state().unwrap(); // nothing has accumulated
    drop(outputs);
    pipeline.accumulate(&x, &y, Count::Unknown).unwrap();
    let error = pipeline.state().err().unwrap().to_string();
    assert!(error.contains("discard_update before you take its state"), "{error}");
    pipeline.update().unwrap();
    pipeline.state().unwrap();
}

/// [samples, positions, features] -> [samples x positions, features].
struct Flatten;

impl Layer for Flatten {
    fn kind(&self) -> &'static str {
        "flatten"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let shape = &inputs[0].shape;
        Ok(vec![TensorSpec::new([shape[0] * shape[1], shape[2]], inputs[0].kind)])
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_flatten(0, 1)?])
    }
}

/// Gradients of outputs were cut by samples, which these do not have as their first size.
#[test]
fn regression_outputs_need_not_begin_with_samples() {
    let x = common::uniform(&[7, 2, 5], 3, Kind::Double);
    let grad = common::uniform(&[14, 3], 4, Kind::Double);
    let gradients = |micro_batches: usize| {
        let model = Sequence::new().push("linear", Linear::new(5, 3)).push("flatten", Flatten);
        let builder = Pipeline::builder(model, TensorSpec::new([7, 2, 5], Kind::Double));
        let builder = builder.kind(Kind::Double).stages(2).micro_batches(micro_batches).seed(1);
        let mut pipeline = builder.optimizer(Sgd::new(0.1)).input_gradients().build().unwrap();
        let outputs = pipeline.forward(&x).unwrap();
        assert_eq!(outputs.tensors()[0].size(), [14, 3]);
        let of_input = pipeline.backward(&outputs, &grad).unwrap().remove(0).unwrap();
        let weight = pipeline.parameters().unwrap().remove(0).1;
        let expected = grad.matmul(&weight).reshape([7, 2, 5]);
        assert!((of_input - expected).abs().max().double_value(&[]) < 1e-12); // roundings
        pipeline.accumulated_gradients().unwrap()
    };
    let whole = x.flatten(0, 1);
    for micro_batches in [1, 3] {
        let found = gradients(micro_batches);
        let expected = grad.transpose(0, 1).matmul(&whole);
        assert_eq!(found[0].0, "linear.weight");
        assert!((&found[0].1 - expected).abs().max().double_value(&[]) < 1e-12);
    }
}

/// A gradient that is not finite updates nothing, and the gradients are gone.
#[test]
fn fault_an_update_with_a_nan_changes_nothing() {
    let run = Run { stages: 2, ..Run::plain() };
    let mut pipeline = tanh_builder(&run, Kind::Float).build().unwrap();
    let start = pipeline.parameters().unwrap();
    let x = common::uniform(&[6, 5], 3, Kind::Float);
    let outputs = pipeline.forward(&x).unwrap();
    let grad = Tensor::full([6, 3], f64::NAN, common::cpu(Kind::Float));
    pipeline.backward(&outputs, grad).unwrap();
    let error = pipeline.update().unwrap_err();
    assert!(matches!(error, Error::NotFinite { .. }), "{error}");
    assert_same_bits(&pipeline.parameters().unwrap(), &start, "nothing was updated");
    assert!(pipeline.update().unwrap_err().to_string().contains("no gradient"));
    let y = common::uniform(&[6, 3], 4, Kind::Float);
    assert_eq!(pipeline.train_step(&x, &y).unwrap().step, 1);
}

/// Gradients are read, scaled, replaced, mapped and clipped by name: equal to the same change of
/// the gradients of one stage, to the bit, tied weights included.
#[test]
fn transparency_of_changed_gradients() {
    let features = Features { tied: true, skip: true, ..Features::plain() };
    let train = |run: &Run| {
        let mut pipeline = run.builder(model(features), 3).build().unwrap();
        let (inputs, targets) = batch(7, 1);
        pipeline.accumulate(&inputs, &targets, Count::Unknown).unwrap();
        let before = pipeline.accumulated_gradients().unwrap();
        pipeline.scale_gradients("*.tokens", 0.3).unwrap();
        let bias: Named = before
            .iter()
            .filter(|(name, _)| name == "head.norm.bias" || name == "0.mlp.hidden.bias")
            .map(|(name, grad)| (name.clone(), grad * 2.0 + 0.01))
            .collect();
        pipeline.set_gradients(&bias).unwrap();
        pipeline.map_gradients("1.attention.*", |_, grad| Ok(grad.f_clamp(-1e-3, 1e-3)?)).unwrap();
        let norm = pipeline.clip_gradients("embedding.*", 1e-2).unwrap();
        let after = pipeline.accumulated_gradients().unwrap();
        let report = pipeline.update().unwrap();
        (before, after, vec![norm.to_bits(), report.grad_norm.to_bits()], flat(&mut pipeline))
    };
    let expected = train(&Run::plain());
    let of = |all: &Named, name: &str| {
        all.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("no {name}")).1.copy()
    };
    let (before, after) = (&expected.0, &expected.1);
    let close = |found: Tensor, wanted: Tensor, name: &str| {
        assert_close(&vec![(name.into(), found)], &vec![(name.into(), wanted)], 1e-5, name);
    };
    let name = "1.attention.output.weight";
    close(of(after, name), of(before, name).clamp(-1e-3, 1e-3), name);
    let name = "0.mlp.hidden.bias";
    close(of(after, name), of(before, name) * 2.0 + 0.01, name);
    let embedding: f64 = after
        .iter()
        .filter(|(name, _)| name.starts_with("embedding."))
        .map(|(_, grad)| grad.square().sum(Kind::Double).double_value(&[]))
        .sum();
    assert!((embedding.sqrt() - 1e-2).abs() < 1e-6, "clipped to {}", embedding.sqrt());
    for run in Run::all(model(features).len()) {
        let found = train(&run);
        let what = format!("{run:?}");
        assert_same_bits(&found.0, &expected.0, &what);
        assert_same_bits(&found.1, &expected.1, &what);
        assert_eq!(found.2, expected.2, "{what}");
        assert_same_bits(&found.3, &expected.3, &what);
    }
}

#[test]
fn fault_wrong_changes_of_gradients_are_refused() {
    let run = Run { stages: 2, ..Run::plain() };
    let sequence = tanh_net().freeze(["first.*"]);
    let mut pipeline = Pipeline::builder(sequence, TensorSpec::new([6, 5], Kind::Float))
        .stages(run.stages)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()
        .unwrap();
    let x = common::uniform(&[6, 5], 3, Kind::Float);
    let y = common::uniform(&[6, 3], 4, Kind::Float);
    let refused = |result: gpipe::Result<()>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error:?} lacks {text:?}");
    };
    refused(pipeline.accumulated_gradients().map(drop), "there is no gradient");
    refused(pipeline.scale_gradients("*", 2.0), "there is no gradient");
    pipeline.accumulate(&x, &y, Count::Unknown).unwrap();
    let before = pipeline.accumulated_gradients().unwrap();
    assert!(before.iter().all(|(name, _)| !name.starts_with("first.")), "it is frozen");
    refused(pipeline.scale_gradients("forth.*", 2.0), "no parameter's name matches 'forth.*'");
    refused(pipeline.scale_gradients("*", f64::INFINITY), "give a finite number");
    refused(pipeline.clip_gradients("*", 0.0).map(drop), "give a number above 0");
    let value = |name: &str, shape: &[i64]| {
        vec![(name.to_owned(), Tensor::zeros(shape, common::cpu(Kind::Float)))]
    };
    refused(pipeline.set_gradients(&value("first.bias", &[8])), "is frozen");
    refused(pipeline.set_gradients(&value("second.bias", &[5])), "the gradient for it");
    refused(pipeline.set_gradients(&value("nothing", &[5])), "no parameter 'nothing'");
    assert_same_bits(&pipeline.accumulated_gradients().unwrap(), &before, "nothing changed");
    // An error while gradients are changed discards the update, not the parameters.
    let start = pipeline.parameters().unwrap();
    let wrong = pipeline.map_gradients("*", |_, grad| Ok(grad.f_sum(Kind::Float)?));
    refused(wrong, "its replacement");
    refused(pipeline.update().map(drop), "there is no gradient");
    assert_same_bits(&pipeline.parameters().unwrap(), &start, "nothing was updated");
    assert_eq!(pipeline.train_step(&x, &y).unwrap().step, 1);
}

/// What a forward holds until its backward is predicted, from shapes alone, to the byte: where the
/// last stage keeps its activations, with what the pipeline's loss would keep.
#[test]
fn oracle_what_an_open_forward_holds_is_predicted() {
    let why = "what a GPU's first stage holds of the inputs is not predicted";
    if common::is_about_cpus("oracle_what_an_open_forward_holds_is_predicted", why) {
        return;
    }
    let network = || {
        Sequence::new()
            .push("first", Linear::new(48, 64))
            .push("tanh", Activation::Tanh)
            .push("second", Linear::new(64, 32))
            .push("gelu", Activation::Gelu)
            .push("third", Linear::new(32, 16))
            .push("again", Activation::Tanh)
            .push("last", Linear::new(16, 8))
    };
    let x = common::uniform(&[24, 48], 3, Kind::Float);
    let (mut compared, mut kept) = (0, 0);
    for run in Run::all(network().len()) {
        // How much of the products selective keeps is measured, not estimated.
        if run.remat == Remat::Selective {
            continue;
        }
        let builder = Pipeline::builder(network(), TensorSpec::of(&x))
            .stages(run.stages)
            .schedule(run.schedule.clone())
            .remat(run.remat)
            .balance(run.balance.clone())
            .micro_batches(4)
            .kernels(Kernels::Aten)
            .loss(MeanSquaredError)
            .optimizer(Sgd::new(0.1))
            .input_gradients();
        let costs = builder.clone().estimate(&[6], &Rate::default()).unwrap();
        let mut pipeline = builder.build().unwrap();
        let plan = Plan {
            balance: pipeline.balance().to_vec(),
            micro_batches: 4,
            schedule: run.schedule.clone(),
            remat: run.remat.into(),
        };
        let devices = vec![PlanDevice::default(); run.stages];
        let mut predicted = predict(&costs, &devices, 24, &plan).unwrap().open_forward(&plan);
        if run.remat == Remat::Never {
            // Of each micro-batch the squares and their sum, on the device of the last stage.
            let on = *run.schedule.placement(run.stages).last().unwrap();
            predicted[on].0 -= 4 * (6 * 8 * 4 + 4);
        }
        let outputs = pipeline.forward(&x).unwrap();
        assert_eq!(outputs.held(), predicted, "{run:?}");
        compared += 1;
        kept += usize::from(run.remat == Remat::Never);
    }
    assert!(compared > 60 && kept > 10, "{compared}, {kept}");
}

/// A recomputation uses the inputs again. If they were changed in place meanwhile, as noise often
/// is, its gradients were wrong without an error.
#[test]
fn regression_inputs_that_change_before_the_backward_are_an_error() {
    let model = Sequence::new().layer(Linear::new(4, 4)).layer(Activation::Tanh);
    let built = Pipeline::builder(model, TensorSpec::new([6, 4], Kind::Float)).micro_batches(3);
    let mut pipeline = built.optimizer(Sgd::new(0.1)).build().unwrap();
    let mut noise = common::uniform(&[6, 4], 1, Kind::Float);
    let outputs = pipeline.forward(&noise).unwrap();
    outputs.tensors()[0].sum(Kind::Float).backward();
    let _ = noise.fill_(0.0);
    let error = pipeline.backward(&outputs, outputs.gradients()).unwrap_err();
    assert!(matches!(error, Error::Input(_)), "{error}");
    assert!(error.to_string().contains("changed in place since its forward"), "{error}");
    let outputs = pipeline.forward(&noise).unwrap();
    outputs.tensors()[0].sum(Kind::Float).backward();
    pipeline.backward(&outputs, outputs.gradients()).unwrap();
}
