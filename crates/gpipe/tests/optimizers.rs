//! Custom optimizers, the example Muon, and Adam with rounded moments.
//!
//! - `oracle_`: Muon against its formula, rounded moments against exact ones
//! - `property_`: the inputs that the rounding of moments depends on
//! - `transparency_`: through the shared matrix, with state in other dtypes and shapes
//! - `fault_`: an optimizer that damages what it is given
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::sync::{Arc, Mutex};

use common::{
    Features, Named, assert_close, batch,
    matrix::{Subject, one},
    model, uniform,
};
use gpipe::{
    Adam, LayerError, MeanSquaredError, Moments, Muon, Optimizer, ParameterInfo, Pipeline,
    PipelineBuilder, Sequence, StateSpec, TensorSpec, Update,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

fn matrix(what: &str, build: &dyn Fn(PipelineBuilder) -> PipelineBuilder) {
    let features = Features { tied: true, dropout: 0.2, ..Features::plain() };
    let subject = Subject {
        model: &|| model(features),
        inputs: vec![TensorSpec::new([4, common::LENGTH], Kind::Int64)],
        batch: &one(batch),
        build,
        may_skip: false,
        what: what.into(),
    };
    subject.matrix(&[(vec![7, 5], 3)]);
}

#[test]
fn transparency_of_muon() {
    let others = vec!["embedding.*".into(), "head.*".into()];
    matrix("muon", &|builder| {
        builder.optimizer(Muon { others: others.clone(), ..Muon::default() })
    });
}

fn with_rounded_moments() -> Adam {
    let moments = Moments::BFloat16;
    Adam { lr: 0.01, weight_decay: 0.1, decoupled: true, moments, ..Adam::default() }
}

#[test]
fn transparency_of_moments_in_bfloat16() {
    matrix("moments in bfloat16", &|builder| {
        builder.optimizer(with_rounded_moments()).average(0.9).clip_norm(1.0)
    });
    matrix("muon with moments in bfloat16", &|builder| {
        let adam = with_rounded_moments();
        let others = vec!["embedding.*".into(), "head.*".into()];
        builder.optimizer(Muon { others, adam, ..Muon::default() })
    });
}

/// Runs Adam on one parameter of `count` elements, for 20 updates with fixed gradients, and returns
/// the parameter and its moments.
fn adam_alone(adam: Adam, name: &str, seed: u64, count: i64) -> Vec<Tensor> {
    let parameter = uniform(&[count], 5, Kind::Float);
    let info = ParameterInfo { name, shape: &[count], kind: Kind::Float };
    let zeros = |spec: StateSpec| {
        Tensor::zeros(&spec.shape, (spec.kind.unwrap_or(Kind::Float), tch::Device::Cpu))
    };
    let state: Vec<Tensor> = adam.state(&info).into_iter().map(zeros).collect();
    for update in 1..=20 {
        let grad = uniform(&[count], 100 + update, Kind::Float);
        adam.apply(&Update {
            names: &[name],
            parameters: &[&parameter],
            grads: &[&grad],
            state: &[&state],
            lr: adam.lr,
            weight_decay: adam.weight_decay,
            update,
            step: update,
            seed,
        })
        .unwrap();
    }
    std::iter::once(parameter).chain(state).collect()
}

#[test]
fn oracle_moments_in_bfloat16_follow_those_in_float32() {
    // More elements than one part of an update, and not a multiple of a part.
    let count = 300_001;
    let rounded = with_rounded_moments();
    let found = adam_alone(rounded, "a.w", 1, count);
    let expected = adam_alone(Adam { moments: Moments::Full, ..rounded }, "a.w", 1, count);
    assert_eq!([found[1].kind(), found[2].kind()], [Kind::BFloat16; 2]);
    let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
    for moment in [1, 2] {
        let apart = double(&found[moment]) - double(&expected[moment]);
        // The rounding errors of elements are independent and have mean 0: the mean of all is
        // within five of its standard errors of 0.
        let error = apart.std(true).double_value(&[]) / (count as f64).sqrt();
        assert!(error > 0.0);
        assert!(apart.mean(Kind::Double).double_value(&[]).abs() < 5.0 * error, "{moment}");
    }
    assert!(found[2].min().double_value(&[]) >= 0.0);
    // 20 updates of at most about lr each; the moments are off by some 2^-8 of theirs.
    let apart = (&found[0] - &expected[0]).abs().max().double_value(&[]);
    assert!(apart > 0.0 && apart < 0.2 * 20.0 * rounded.lr, "{apart}");
}

/// Rounding to nearest would not change a second moment once its updates are below half a step.
#[test]
fn property_small_changes_of_a_moment_are_not_lost() {
    let adam = Adam { beta2: 0.999, ..with_rounded_moments() };
    let count = 4096;
    let state =
        [0.0, 1.0].map(|value| Tensor::full([count], value, (Kind::BFloat16, tch::Device::Cpu)));
    let parameter = Tensor::zeros([count], (Kind::Float, tch::Device::Cpu));
    for update in 1..=400 {
        adam.apply(&Update {
            names: &["a.w"],
            parameters: &[&parameter],
            grads: &[&parameter.zeros_like()],
            state: &[&state],
            lr: 0.0,
            weight_decay: 0.0,
            update,
            step: update,
            seed: 1,
        })
        .unwrap();
    }
    let mean = state[1].mean(Kind::Double).double_value(&[]);
    // 0.999^400 = 0.67. An element's relative error is below sqrt(400) steps of 2^-8 / 2, or 0.04;
    // the mean of 4096 of them is within five standard errors, 0.003.
    assert!((mean - 0.999_f64.powi(400)).abs() < 0.003, "{mean}");
}

#[test]
fn property_roundings_depend_on_seed_and_name() {
    let run = |name, seed| adam_alone(with_rounded_moments(), name, seed, 1000);
    let own = run("a.w", 1);
    assert_eq!(own, run("a.w", 1));
    for other in [run("a.v", 1), run("a.w", 2)] {
        assert_ne!(own[1], other[1]);
        assert_ne!(own[2], other[2]);
    }
}

/// The network of the formula's test: a wide and a tall matrix, and vectors.
fn network() -> PipelineBuilder {
    let model = Sequence::new()
        .push("wide", Linear::new(6, 3))
        .push("tanh", Activation::Tanh)
        .push("tall", Linear::new(3, 5))
        .push("head", Linear::new(5, 4));
    Pipeline::builder(model, TensorSpec::new([8, 6], Kind::Float))
        .stages(2)
        .micro_batches(2)
        .loss(MeanSquaredError)
        .keep_gradients()
}

#[test]
fn oracle_muon_is_its_formula() {
    let (lr, decay, momentum) = (0.02, 0.1, 0.9);
    let adam = Adam { lr: 0.01, decoupled: true, ..Adam::default() };
    let muon = Muon {
        lr,
        momentum,
        weight_decay: decay,
        others: vec!["head.*".into()],
        adam,
        ..Muon::default()
    };
    let mut pipeline = network().optimizer(muon).build().unwrap();
    // The parameters that Muon leaves to AdamW, beside AdamW alone on the same gradients.
    let mut expected: Named = pipeline.parameters().unwrap();
    let mut kept: Vec<Vec<Tensor>> =
        expected.iter().map(|(_, value)| vec![value.zeros_like(), value.zeros_like()]).collect();
    for step in 1..=3 {
        let x = uniform(&[8, 6], step, Kind::Float);
        let y = uniform(&[8, 4], 100 + step, Kind::Float);
        pipeline.train_step(&x, &y).unwrap();
        let gradients = pipeline.gradients().unwrap();
        for (at, (name, grad)) in gradients.iter().enumerate() {
            let value = &mut expected[at].1;
            if !matches!(name.as_str(), "wide.weight" | "tall.weight") {
                let names = [name.as_str()];
                let update = Update {
                    names: &names,
                    parameters: &[value],
                    grads: &[grad],
                    state: &[&kept[at]],
                    lr: adam.lr,
                    weight_decay: decay,
                    update: step,
                    step,
                    seed: 0,
                };
                adam.apply(&update).unwrap();
                continue;
            }
            let buffer = &kept[at][0] * momentum + grad * (1.0 - momentum);
            let nesterov = &buffer * momentum + grad * (1.0 - momentum);
            let rows = value.size()[0] as f64;
            let columns = value.size()[1] as f64;
            let direction = newton_schulz(&nesterov).to_kind(Kind::Float);
            *value =
                &*value * (1.0 - lr * decay) - direction * (lr * (rows / columns).max(1.0).sqrt());
            kept[at][0] = buffer;
        }
    }
    // A few roundings, of which those in bfloat16 are the same operations on the same numbers; an
    // input that rounds to another bfloat16 moves an element by lr / 256.
    assert_close(&pipeline.parameters().unwrap(), &expected, 2e-3, "muon");
}

/// The iteration as Jordan et al. write it, on a matrix [rows, columns].
fn newton_schulz(matrix: &Tensor) -> Tensor {
    let (a, b, c) = (3.4445, -4.7750, 2.0315);
    let tall = matrix.size()[0] > matrix.size()[1];
    let mut x = matrix.to_kind(Kind::BFloat16);
    x = if tall { x.tr() } else { x };
    x = &x / (x.norm() + 1e-7);
    for _ in 0..5 {
        let gram = x.matmul(&x.tr());
        let polynomial = &gram * b + gram.matmul(&gram) * c;
        x = &x * a + polynomial.matmul(&x);
    }
    if tall { x.tr() } else { x }
}

/// A parameter's name, the number of its update, and that of the step.
type Seen = (String, u64, u64);

/// An optimizer that keeps a counter in int64, a momentum in bfloat16 and a scalar, and treats
/// parameters by name.
#[derive(Debug)]
struct Own {
    seen: Option<Arc<Mutex<Vec<Seen>>>>,
}

impl Optimizer for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        if parameter.name.ends_with(".bias") {
            return vec![StateSpec::zeros("calls", &[1]).kind(Kind::Int64)];
        }
        assert_eq!(parameter.kind, Kind::Float);
        vec![
            StateSpec::zeros("calls", &[1]).kind(Kind::Int64),
            StateSpec::zeros("momentum", parameter.shape).kind(Kind::BFloat16),
            StateSpec { fill: 1.0, ..StateSpec::zeros("scale", &[]) },
        ]
    }

    fn temporaries(&self) -> usize {
        3
    }

    fn lr(&self) -> f64 {
        0.05
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        for (at, name) in update.names.iter().enumerate() {
            if let Some(seen) = &self.seen {
                seen.lock().unwrap().push(((*name).to_owned(), update.update, update.step));
            }
            let mut parameter = update.parameters[at].shallow_clone();
            let grad = update.grads[at];
            let state = update.state[at];
            let _ = state[0].shallow_clone().f_add_scalar_(1)?;
            if name.ends_with(".bias") {
                assert_eq!(state.len(), 1, "{name}");
                let _ = parameter.f_sub_(&grad.f_mul_scalar(update.lr)?)?;
                continue;
            }
            let mut momentum = state[1].shallow_clone();
            let _ = momentum.f_mul_scalar_(0.9)?.f_add_(&grad.f_to_kind(Kind::BFloat16)?)?;
            let _ = state[2].shallow_clone().f_mul_scalar_(0.99)?;
            let step = momentum.f_to_kind(parameter.kind())?.f_mul(&state[2])?;
            let _ = parameter.f_sub_(&step.f_mul_scalar(update.lr)?)?;
        }
        Ok(())
    }
}

#[test]
fn transparency_of_an_own_optimizer_with_other_dtypes_and_shapes() {
    matrix("own", &|builder| builder.optimizer(Own { seen: None }));
}

#[test]
fn oracle_an_own_optimizer_sees_names_updates_and_steps() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = Own { seen: Some(Arc::clone(&seen)) };
    let mut pipeline = network().optimizer(own).build().unwrap();
    for step in 0..2 {
        let x = uniform(&[8, 6], step, Kind::Float);
        pipeline.train_step(&x, uniform(&[8, 4], 9, Kind::Float)).unwrap();
    }
    let mut found = seen.lock().unwrap().clone();
    found.sort();
    let mut expected = Vec::new();
    for layer in ["head", "tall", "wide"] {
        for parameter in ["bias", "weight"] {
            expected.extend([1, 2].map(|step| (format!("{layer}.{parameter}"), step, step)));
        }
    }
    assert_eq!(found, expected);
}

/// Damages a parameter or its state.
#[derive(Debug)]
struct Damages {
    state: bool,
}

impl Optimizer for Damages {
    fn name(&self) -> &'static str {
        "damages"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        vec![StateSpec::zeros("momentum", parameter.shape)]
    }

    fn temporaries(&self) -> usize {
        0
    }

    fn lr(&self) -> f64 {
        0.1
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        let own = if self.state { &update.state[0][0] } else { update.parameters[0] };
        let _ = own.shallow_clone().f_resize_([1, 2, 3])?;
        Ok(())
    }
}

#[test]
fn fault_an_optimizer_that_changes_a_shape_is_an_error() {
    for state in [false, true] {
        let mut pipeline = network().optimizer(Damages { state }).build().unwrap();
        let (x, y) = (uniform(&[8, 6], 1, Kind::Float), uniform(&[8, 4], 2, Kind::Float));
        let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
        // libtorch itself protects the parameters, which require gradients.
        let text = if state { "change only values" } else { "cannot resize" };
        assert!(error.contains(text), "{error}");
    }
}
