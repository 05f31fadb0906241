//! Families: `oracle_` (each optimizer, group, average, loss and metric against its plain formula
//! in float64), `property_` (what reduced precision must preserve), `fault_` (settings that make no
//! sense).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::collections::HashMap;

use common::{Features, LENGTH, Recipe, Run, VOCABULARY, batch, model, own_loss::OwnLoss, uniform};
use gpipe::{
    Accuracy, Adafactor, Adam, CrossEntropy, Decay, Group, LayerError, LearningRate, Loss,
    LossContext, MeanSquaredError, Metric, Muon, Optimizer, ParameterInfo, Pipeline,
    PipelineBuilder, RmsForm, RmsProp, Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

const STEPS: u64 = 4;

/// A model of two linear layers on two stages.
fn small(kind: Kind) -> PipelineBuilder {
    let model = Sequence::new()
        .push("a", Linear::new(3, 4))
        .push("tanh", Activation::Tanh)
        .push("b", Linear::new(4, 2));
    let input = if kind == Kind::Double { kind } else { Kind::Float };
    Pipeline::builder(model, TensorSpec::new([6, 3], input))
        .stages(2)
        .micro_batches(2)
        .kind(kind)
        .keep_gradients()
        .loss(MeanSquaredError)
}

fn data(kind: Kind) -> (Tensor, Tensor) {
    (uniform(&[6, 3], 1, kind), uniform(&[6, 2], 2, kind))
}

/// A parameter as a plain list of numbers, with any state that a formula keeps.
struct Plain {
    shape: Vec<i64>,
    values: Vec<f64>,
    state: Vec<Vec<f64>>,
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap()
}

/// Trains the pipeline of `builder`, and applies `formula(name, step from 1, parameter, gradient)`
/// to plain numbers with the pipeline's gradients. Compares every parameter after every step.
fn follow(builder: PipelineBuilder, mut formula: impl FnMut(&str, f64, &mut Plain, &[f64])) {
    let mut pipeline = builder.build().unwrap();
    let (x, y) = data(Kind::Double);
    let plain = |(name, tensor): (String, Tensor)| {
        let (shape, values) = (tensor.size(), numbers(&tensor));
        (name, Plain { shape, values, state: Vec::new() })
    };
    let mut expected: HashMap<String, Plain> =
        pipeline.parameters().unwrap().into_iter().map(plain).collect();
    for step in 1..=STEPS {
        pipeline.train_step(&x, &y).unwrap();
        for (name, gradient) in pipeline.gradients().unwrap() {
            let parameter = expected.get_mut(&name).unwrap();
            formula(&name, step as f64, parameter, &numbers(&gradient));
        }
        for (name, found) in pipeline.parameters().unwrap() {
            for (a, b) in numbers(&found).iter().zip(&expected[&name].values) {
                // A handful of float64 operations in another order.
                assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "step {step} {name}: {a} {b}");
            }
        }
    }
}

#[test]
fn oracle_sgd_with_nesterov_momentum() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.05 };
    follow(small(Kind::Double).optimizer(sgd), |_, step, p, gradient| {
        p.state.resize(1, vec![0.0; gradient.len()]);
        for (i, g) in gradient.iter().enumerate() {
            let g = g + 0.05 * p.values[i];
            p.state[0][i] = if step == 1.0 { g } else { 0.9 * p.state[0][i] + g };
            p.values[i] -= 0.1 * (g + 0.9 * p.state[0][i]);
        }
    });
}

#[test]
fn oracle_rmsprop_in_both_forms() {
    for (momentum, form) in
        [(0.9, RmsForm::TensorFlow), (0.8, RmsForm::PyTorch), (0.0, RmsForm::PyTorch)]
    {
        let rms = RmsProp { lr: 0.01, decay: 0.9, momentum, eps: 1e-3, weight_decay: 0.02, form };
        follow(small(Kind::Double).optimizer(rms), |_, step, p, gradient| {
            if step == 1.0 {
                let first = if form == RmsForm::TensorFlow { 1.0 } else { 0.0 };
                p.state = vec![vec![first; gradient.len()], vec![0.0; gradient.len()]];
            }
            for (i, g) in gradient.iter().enumerate() {
                let g = g + 0.02 * p.values[i];
                let square = 0.9 * p.state[0][i] + 0.1 * g * g;
                p.state[0][i] = square;
                let velocity = momentum * p.state[1][i]
                    + match form {
                        RmsForm::TensorFlow => 0.01 * g / (square + 1e-3).sqrt(),
                        RmsForm::PyTorch => g / (square.sqrt() + 1e-3),
                    };
                p.state[1][i] = velocity;
                p.values[i] -= if form == RmsForm::TensorFlow { velocity } else { 0.01 * velocity };
            }
        });
    }
}

#[test]
fn oracle_adafactor() {
    let adafactor = Adafactor { lr: 0.3, weight_decay: 0.1, ..Adafactor::default() };
    let rms =
        |values: &[f64]| (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
    follow(small(Kind::Double).optimizer(adafactor), |_, t, p, gradient| {
        let share = t.powf(-0.8);
        let step = rms(&p.values).max(1e-3) * f64::min(0.3, 1.0 / t.sqrt());
        p.values.iter_mut().for_each(|value| *value *= 1.0 - 0.3 * 0.1);
        let size = gradient.len();
        let variance: Vec<f64> = if let [rows, columns] = p.shape[..] {
            let (rows, columns) = (rows as usize, columns as usize);
            p.state.resize(2, Vec::new());
            p.state[0].resize(rows, 0.0);
            p.state[1].resize(columns, 0.0);
            let square = |r: usize, c: usize| gradient[r * columns + c].powi(2);
            for r in 0..rows {
                let mean = (0..columns).map(|c| square(r, c)).sum::<f64>() / columns as f64;
                p.state[0][r] += share * (mean - p.state[0][r]);
            }
            for c in 0..columns {
                let mean = (0..rows).map(|r| square(r, c)).sum::<f64>() / rows as f64;
                p.state[1][c] += share * (mean - p.state[1][c]);
            }
            let norm = p.state[0].iter().sum::<f64>() / rows as f64;
            let element = |i: usize| p.state[0][i / columns] * p.state[1][i % columns] / norm;
            (0..size).map(element).collect()
        } else {
            p.state.resize(1, vec![0.0; size]);
            for (i, g) in gradient.iter().enumerate() {
                p.state[0][i] += share * (g * g - p.state[0][i]);
            }
            p.state[0].clone()
        };
        let direction: Vec<f64> =
            gradient.iter().zip(&variance).map(|(g, v)| g / v.sqrt()).collect();
        let clip = rms(&direction).max(1.0);
        for (value, d) in p.values.iter_mut().zip(&direction) {
            *value -= step * d / clip;
        }
    });
}

#[test]
fn oracle_groups_and_learning_rate() {
    let rate = LearningRate { warmup_steps: 2, decay: Decay::Exponential { rate: 0.5, every: 1 } };
    let builder = small(Kind::Double)
        .optimizer(Sgd { weight_decay: 0.1, ..Sgd::new(0.2) })
        .learning_rate(rate)
        .group(Group::matching(["*.bias"]).weight_decay(0.0))
        .group(Group::matching(["b.*"]).lr_scale(0.25));
    let factors = [0.5, 1.0, 1.0, 0.5];
    follow(builder, |name, step, p, gradient| {
        let decay = if name.ends_with(".bias") { 0.0 } else { 0.1 };
        // The first matching group counts: b.bias has the rate of the first group.
        let scale = if name == "b.weight" { 0.25 } else { 1.0 };
        let lr = 0.2 * factors[step as usize - 1] * scale;
        for (value, g) in p.values.iter_mut().zip(gradient) {
            *value -= lr * (g + decay * *value);
        }
    });
}

#[test]
fn oracle_a_frozen_group_has_no_gradient_and_stays() {
    let builder =
        small(Kind::Float).optimizer(Adam::default()).group(Group::matching(["a.*"]).frozen());
    let mut pipeline = builder.build().unwrap();
    let before = pipeline.parameters().unwrap();
    let (x, y) = data(Kind::Float);
    pipeline.train_step(&x, &y).unwrap();
    let gradients: Vec<String> =
        pipeline.gradients().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(gradients, ["b.weight", "b.bias"]);
    for ((name, before), (_, after)) in before.iter().zip(&pipeline.parameters().unwrap()) {
        assert_eq!(before == after, name.starts_with("a."), "{name}");
    }
}

#[test]
fn oracle_averages_follow_their_formula_and_evaluation_can_use_them() {
    let mut pipeline = small(Kind::Double).optimizer(Sgd::new(0.5)).average(0.3).build().unwrap();
    let (x, y) = data(Kind::Double);
    let values =
        |named: Vec<(String, Tensor)>| named.into_iter().map(|(_, t)| t).collect::<Vec<_>>();
    let mut expected = values(pipeline.parameters().unwrap());
    for step in 1..=5 {
        pipeline.train_step(&x, &y).unwrap();
        let decay = f64::min(0.3, (1.0 + f64::from(step)) / (10.0 + f64::from(step)));
        let now = values(pipeline.parameters().unwrap());
        for (average, value) in expected.iter_mut().zip(&now) {
            *average = &*average * decay + value * (1.0 - decay);
        }
    }
    let averages = values(pipeline.averages().unwrap());
    for (found, expected) in averages.iter().zip(&expected) {
        assert!((found - expected).abs().max().double_value(&[]) < 1e-14);
    }
    let parameters = values(pipeline.parameters().unwrap());
    let own = pipeline.evaluate(&x, &y).unwrap();
    let (inside, loss) = pipeline
        .with_averages(|pipeline| {
            assert!(pipeline.train_step(&x, &y).is_err());
            assert_eq!(values(pipeline.averages()?), averages, "wherever they are");
            Ok((values(pipeline.parameters()?), pipeline.evaluate(&x, &y)?.loss))
        })
        .unwrap();
    assert_eq!(inside, averages);
    assert_ne!(loss, own.loss);
    assert_eq!(values(pipeline.parameters().unwrap()), parameters);
    assert_eq!(pipeline.evaluate(&x, &y).unwrap(), own);
    // A failure inside, and a change that the exchange back would lose.
    let failed = pipeline.with_averages(|pipeline| {
        let named = pipeline.parameters()?;
        assert!(pipeline.set_parameters(&named).is_err());
        pipeline.evaluate(&x, uniform(&[5, 2], 2, Kind::Double))
    });
    assert!(failed.is_err());
    assert_eq!(values(pipeline.parameters().unwrap()), parameters);
    pipeline.train_step(&x, &y).unwrap();
}

/// In bfloat16, layers compute in copies. Those of frozen parameters stayed the raw weights, so an
/// evaluation mixed both.
#[test]
fn regression_averages_of_frozen_parameters_are_in_use() {
    let (x, y) = data(Kind::Float);
    let mut pipeline = small(Kind::BFloat16).optimizer(Sgd::new(0.5)).average(0.9).build().unwrap();
    (0..4).for_each(|_| drop(pipeline.train_step(&x, &y).unwrap()));
    let before = pipeline.with_averages(|pipeline| pipeline.evaluate(&x, &y)).unwrap();
    assert_ne!(before, pipeline.evaluate(&x, &y).unwrap());
    pipeline.freeze(["a.*"]).unwrap();
    let frozen = pipeline.with_averages(|pipeline| pipeline.evaluate(&x, &y)).unwrap();
    assert_eq!(frozen, before);
}

#[test]
fn regression_averages_of_tied_weights_are_exchanged_once() {
    // Both uses share a storage. Exchanging it once per use would leave it unchanged.
    let features = Features { tied: true, recipe: Recipe::Everything, ..Features::plain() };
    for stages in [1, 2] {
        let run = Run { stages, ..Run::plain() };
        let mut pipeline = features.build(run.builder(model(features), 2)).build().unwrap();
        let (x, y) = batch(4, 1);
        (0..3).for_each(|_| drop(pipeline.train_step(&x, &y).unwrap()));
        let averages = pipeline.averages().unwrap();
        let inside = pipeline.with_averages(Pipeline::parameters).unwrap();
        common::assert_same_bits(&inside, &averages, "averages in use");
        assert_ne!(averages[0].1, pipeline.parameters().unwrap()[0].1);
    }
}

#[test]
fn oracle_label_smoothing_and_accuracy() {
    let run = Run { stages: 2, ..Run::plain() };
    let smooth = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
    let builder = run.builder(model(Features::plain()), 2).kind(Kind::Double);
    let mut pipeline = builder.loss(smooth).metric(Accuracy::default()).build().unwrap();
    let (x, y) = batch(5, 3);
    let evaluation = pipeline.evaluate(&x, &y).unwrap();
    let logits = pipeline.predict(&x).unwrap().remove(0).reshape([-1, VOCABULARY]);
    let logs = logits.log_softmax(-1, Kind::Double);
    let (mut sum, mut hits, mut count) = (0.0, 0.0, 0.0);
    for position in 0..5 * LENGTH {
        let target = y.reshape([-1]).int64_value(&[position]);
        if target == -100 {
            continue;
        }
        let row = numbers(&logs.get(position));
        let uniform = row.iter().sum::<f64>() / row.len() as f64;
        sum -= 0.9 * row[target as usize] + 0.1 * uniform;
        hits += f64::from(row.iter().all(|value| *value <= row[target as usize]));
        count += 1.0;
    }
    assert!((evaluation.loss - sum / count).abs() < 1e-12);
    let accuracy = &evaluation.metrics[0];
    assert_eq!((accuracy.name.as_str(), accuracy.sum, accuracy.count), ("accuracy", hits, count));
    assert_eq!(accuracy.value(), hits / count);
}

/// A user-written loss: the mean absolute error.
struct AbsoluteError;

impl Loss for AbsoluteError {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        match outputs == targets {
            true => Ok(()),
            false => Err(LayerError::Shape("outputs and targets differ".into())),
        }
    }

    fn sum(
        &self,
        _: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        assert_eq!(outputs[0].kind(), Kind::Float, "losses are computed in float32");
        Ok(outputs[0].f_sub(&targets[0])?.f_abs()?.f_sum(Kind::Float)?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(targets[0].numel() as f64)
    }
}

/// A user-written metric that can fail: the largest output.
struct Largest(bool);

impl Metric for Largest {
    fn name(&self) -> &str {
        "largest"
    }

    fn sum(&self, outputs: &[Tensor], _: &[Tensor]) -> Result<f64, LayerError> {
        if self.0 {
            return Err(LayerError::Value("no".into()));
        }
        Ok(outputs[0].f_max()?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        if targets[0].size()[0] == 5 {
            return Err(LayerError::Value("five".into()));
        }
        Ok(1.0)
    }
}

#[test]
fn regression_a_metric_that_cannot_count_fails_before_anything_is_updated() {
    // The metric was evaluated after the update, so the step failed although it had been applied.
    let builder = small(Kind::Float).metric(Largest(false)).training_metrics();
    let mut pipeline = builder.optimizer(Sgd::new(0.1)).build().unwrap();
    let (x, y) = (uniform(&[5, 3], 1, Kind::Float), uniform(&[5, 2], 2, Kind::Float));
    let before = pipeline.parameters().unwrap();
    let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
    assert!(error.contains("five"), "{error}");
    common::assert_same_bits(&pipeline.parameters().unwrap(), &before, "not updated");
    assert_eq!(pipeline.steps(), 0);
}

#[test]
fn oracle_losses_and_metrics_of_a_users_own() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let build = |fails| {
            let builder = small(kind).loss(AbsoluteError).metric(Largest(fails));
            builder.optimizer(Sgd::new(0.1)).build().unwrap()
        };
        let (x, y) = data(Kind::Float);
        let mut pipeline = build(false);
        let before = pipeline.evaluate(&x, &y).unwrap();
        (0..20).for_each(|_| drop(pipeline.train_step(&x, &y).unwrap()));
        let after = pipeline.evaluate(&x, &y).unwrap();
        assert!(after.loss < 0.9 * before.loss, "{} {}", before.loss, after.loss);
        let outputs = pipeline.predict(&x).unwrap().remove(0);
        assert_eq!(outputs.kind(), Kind::Float);
        let largest = |half: i64| outputs.narrow(0, 3 * half, 3).max().double_value(&[]);
        assert_eq!(after.metrics[0].sum, largest(0) + largest(1));
        let error = build(true).evaluate(&x, &y).unwrap_err().to_string();
        assert!(error.contains("'largest': no"), "{error}");
    }
}

#[test]
fn property_bfloat16_keeps_master_weights_and_sums_in_float32() {
    // bfloat16 loses steps of 1e-4 to a weight near 1, because its neighbours are 2^-8 apart.
    let mut pipeline = small(Kind::BFloat16).optimizer(Sgd::new(1e-3)).build().unwrap();
    let (x, y) = data(Kind::Float);
    let before = pipeline.parameters().unwrap();
    assert!(before.iter().all(|(_, value)| value.kind() == Kind::Float));
    pipeline.train_step(&x, &y).unwrap();
    let gradients = pipeline.gradients().unwrap();
    for (((name, before), (_, after)), (_, gradient)) in
        before.iter().zip(&pipeline.parameters().unwrap()).zip(&gradients)
    {
        assert_eq!(gradient.kind(), Kind::Float);
        let expected = before - gradient * 1e-3;
        let difference = (&expected - after).abs().max().double_value(&[]);
        assert!(difference < 1e-7, "{name}: {difference:e}"); // one rounding of a float32 near 1
        assert_ne!(before, after, "{name}");
    }
}

#[test]
fn oracle_reduced_precision_is_near_float32() {
    let loss = |kind| {
        let features = Features { tied: true, kind, ..Features::plain() };
        let run = Run { stages: 2, ..Run::plain() };
        let mut pipeline = features.build(run.builder(model(features), 3)).build().unwrap();
        let (x, y) = batch(6, 1);
        (0..10).map(|_| pipeline.train_step(&x, &y).unwrap().loss).collect::<Vec<_>>()
    };
    let exact = loss(Kind::Float);
    assert!(exact[9] < 0.8 * exact[0], "it learns: {exact:?}");
    // bfloat16 has 8 significant bits, float16 has 11. A loss is a mean over 27 tokens, each with
    // about ten roundings.
    for (kind, tolerance) in [(Kind::BFloat16, 0.02), (Kind::Half, 0.0025)] {
        for (found, expected) in loss(kind).iter().zip(&exact) {
            let relative = (found / expected - 1.0).abs();
            assert!(relative < tolerance, "{kind:?}: {found} {expected}");
        }
    }
}

#[test]
fn property_float16_skips_steps_that_overflow_and_finds_a_scale() {
    // So large that its gradients overflow at the first loss scale.
    let large = |x: &Tensor, y: &Tensor| {
        Ok(x.f_sub(y)?.f_square()?.f_sum(Kind::Float)?.f_mul_scalar(1000.0)?)
    };
    let run = |stages: usize| {
        let builder = small(Kind::Half).stages(stages).loss(OwnLoss(large));
        let mut pipeline = builder.optimizer(Sgd::new(1e-6)).build().unwrap();
        let (x, y) = data(Kind::Float);
        let before = pipeline.parameters().unwrap();
        let mut scales = Vec::new();
        loop {
            let report = pipeline.train_step(&x, &y).unwrap();
            scales.push(report.loss_scale);
            if !report.skipped {
                assert_eq!((report.step, pipeline.steps()), (1, 1));
                break;
            }
            assert_eq!((report.step, pipeline.steps()), (0, 0));
            common::assert_same_bits(&pipeline.parameters().unwrap(), &before, "skipped");
        }
        (scales, pipeline.parameters().unwrap())
    };
    let (scales, parameters) = run(1);
    assert!(scales.len() > 2 && scales.windows(2).all(|pair| pair[1] == pair[0] / 2.0));
    for stages in [2, 3] {
        let found = run(stages);
        assert_eq!(found.0, scales);
        common::assert_same_bits(&found.1, &parameters, "float16");
    }
}

#[test]
fn fault_recipes_that_make_no_sense_say_what_and_the_remedy() {
    let text = |builder: PipelineBuilder| match builder.build() {
        Err(error) => error.to_string(),
        Ok(_) => panic!("built"),
    };
    let optimizer = |optimizer: fn() -> Box<dyn Fn(PipelineBuilder) -> PipelineBuilder>| {
        text(optimizer()(small(Kind::Float)))
    };
    let cases: [(&str, String); 12] = [
        (
            "nesterov needs a momentum",
            optimizer(|| Box::new(|b| b.optimizer(Sgd { nesterov: true, ..Sgd::new(0.1) }))),
        ),
        (
            "decay = 1",
            optimizer(|| Box::new(|b| b.optimizer(RmsProp { decay: 1.0, ..RmsProp::default() }))),
        ),
        (
            "beta2_decay = 0.8",
            optimizer(|| {
                Box::new(|b| b.optimizer(Adafactor { beta2_decay: 0.8, ..Adafactor::default() }))
            }),
        ),
        (
            "clip_threshold = 0",
            optimizer(|| {
                Box::new(|b| b.optimizer(Adafactor { clip_threshold: 0.0, ..Adafactor::default() }))
            }),
        ),
        (
            "iterations = 101",
            optimizer(|| Box::new(|b| b.optimizer(Muon { iterations: 101, ..Muon::default() }))),
        ),
        (
            "no parameter matches 'embeding.*'",
            optimizer(|| {
                let others = vec!["embeding.*".to_owned()];
                Box::new(move |b| b.optimizer(Muon { others: others.clone(), ..Muon::default() }))
            }),
        ),
        ("no parameter matches 'c.*'", text(small(Kind::Float).group(Group::matching(["c.*"])))),
        (
            "two metrics are named 'largest'",
            text(small(Kind::Float).metric(Largest(false)).metric(Largest(true))),
        ),
        ("a group has no names", text(small(Kind::Float).group(Group::matching([""; 0])))),
        ("average is 1: use at least 0", text(small(Kind::Float).average(1.0))),
        ("use Float, Double, BFloat16 or Half", text(small(Kind::Int64))),
        (
            "decay_floor = 2: use 0 to 1",
            text(small(Kind::Float).learning_rate(LearningRate {
                warmup_steps: 0,
                decay: Decay::Cosine { steps: 5, floor: 2.0 },
            })),
        ),
    ];
    for (expected, found) in cases {
        assert!(found.contains(expected), "{found}");
    }
    let mut plain = small(Kind::Float).optimizer(Sgd::new(0.1)).build().unwrap();
    let error = plain.averages().unwrap_err().to_string();
    assert!(error.contains("with `average`"), "{error}");
    let smooth = CrossEntropy { label_smoothing: 1.0, ..CrossEntropy::default() };
    let spec = TensorSpec::new([2, 3], Kind::Float);
    let error = smooth
        .check(&LossContext::default(), &[spec], &[TensorSpec::new([2], Kind::Int64)])
        .unwrap_err();
    assert!(error.to_string().contains("label_smoothing is 1"));
    let own = ParameterInfo { name: "one", shape: &[2, 3, 5], kind: Kind::Float };
    let state = Adafactor::default().state(&own);
    assert_eq!((&state[0].shape[..], &state[1].shape[..]), (&[2, 3, 1][..], &[2, 1, 5][..]));
}
