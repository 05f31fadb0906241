//! Operations with a backward in Rust: `Function` and `apply`.
//!
//! - `transparency_`: through the shared matrix, re-materialized and split like all else
//! - `oracle_`: against the same operation by autograd, and against finite differences
//! - `fault_`: errors, panics and gradients that do not fit
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{
    LENGTH, Named, Run, VOCABULARY, assert_close, batch,
    matrix::{Subject, one},
    uniform,
};
use gpipe::{
    Computed, CrossEntropy, Function, Infer, Init, Layer, LayerError, MeanSquaredError,
    ParameterSpec, Pipeline, Schedule, Sequence, Sgd, TensorSpec, apply,
    layers::{Embedding, Head, Linear},
};
use tch::{Kind, Tensor};

/// x * sigmoid(scale * x), with its backward in Rust.
#[derive(Clone, Copy)]
struct Swish;

impl Function for Swish {
    fn name(&self) -> &'static str {
        "swish"
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<Computed, LayerError> {
        let (x, scale) = (&inputs[0], &inputs[1]);
        let gate = x.f_mul(scale)?.f_sigmoid()?;
        let outputs = vec![x.f_mul(&gate)?];
        Ok(Computed { outputs, saved: vec![x.shallow_clone(), scale.shallow_clone(), gate] })
    }

    fn backward(
        &self,
        saved: &[Tensor],
        grads: &[Option<Tensor>],
        wanted: &[bool],
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let [x, scale, gate] = saved else { return Err(LayerError::Value("not saved".into())) };
        let Some(grad) = &grads[0] else { return Ok(vec![None, None]) };
        // d gate = gate (1 - gate) d(scale x)
        let inner = grad.f_mul(x)?.f_mul(gate)?.f_mul(&gate.f_neg()?.f_add_scalar(1.0)?)?;
        let of_x = || grad.f_mul(gate)?.f_add(&inner.f_mul(scale)?);
        let axes: Vec<i64> = (0..x.dim() as i64 - 1).collect();
        let of_scale = || inner.f_mul(x)?.f_sum_dim_intlist(axes.as_slice(), false, x.kind());
        Ok(vec![wanted[0].then(of_x).transpose()?, wanted[1].then(of_scale).transpose()?])
    }
}

/// The layer: with its own backward, or by autograd.
struct Gate {
    features: i64,
    own: bool,
}

impl Layer for Gate {
    fn kind(&self) -> &'static str {
        "gate"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("scale", [self.features], Init::Normal { std: 1.0 })]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(
        &self,
        ctx: &mut gpipe::Forward,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, LayerError> {
        let (x, scale) = (&inputs[0], ctx.parameter(0)?);
        match self.own {
            true => apply(Swish, &[x, scale]),
            false => Ok(vec![x.f_mul(&x.f_mul(scale)?.f_sigmoid()?)?]),
        }
    }
}

const FEATURES: i64 = 16;

fn model(own: bool) -> Sequence {
    let embedding = Embedding {
        vocabulary: VOCABULARY,
        features: FEATURES,
        positions: LENGTH,
        std: 0.5,
        dropout: 0.1,
        tie: None,
    };
    let head =
        Head { features: FEATURES, vocabulary: VOCABULARY, std: 0.3, logit_clip: 0.0, tie: None };
    Sequence::new()
        .push("embedding", embedding)
        .push("first", Gate { features: FEATURES, own })
        .push("linear", Linear::new(FEATURES, FEATURES))
        .push("second", Gate { features: FEATURES, own })
        .push("head", head)
}

#[test]
fn transparency_of_a_custom_backward() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let subject = Subject {
            model: &|| model(true),
            inputs: vec![TensorSpec::new([4, LENGTH], Kind::Int64)],
            batch: &one(batch),
            build: &|builder| builder.kind(kind),
            may_skip: false,
            what: format!("a custom backward in {kind:?}"),
        };
        subject.matrix(&[(vec![8], 4), (vec![7, 5], 3)]);
    }
}

#[test]
fn oracle_a_custom_backward_equals_autograds() {
    let gradients = |own: bool, run: &Run| -> Named {
        let mut pipeline = run.builder(model(own), 3).kind(Kind::Double).build().unwrap();
        let (inputs, targets) = batch(7, 1);
        pipeline.train_step(&inputs, &targets).unwrap();
        pipeline.gradients().unwrap()
    };
    let run = Run { stages: 3, schedule: Schedule::ZbH1, ..Run::plain() };
    // float64, and the same formula up to the order of a few products.
    assert_close(&gradients(true, &run), &gradients(false, &run), 1e-11, "swish");
}

#[test]
fn oracle_a_custom_backward_equals_finite_differences() {
    let model = Sequence::new()
        .push("before", Linear::new(5, 4))
        .push("gate", Gate { features: 4, own: true });
    let (x, y) = (uniform(&[6, 5], 1, Kind::Double), uniform(&[6, 4], 2, Kind::Double));
    let mut pipeline = Pipeline::builder(model, TensorSpec::of(&x))
        .stages(2)
        .micro_batches(2)
        .schedule(Schedule::ZbH1)
        .kind(Kind::Double)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .input_gradients()
        .build()
        .unwrap();
    let compared = pipeline.finite_differences(&x, &y, 20).unwrap();
    assert_eq!(compared.len(), 20 + 4 + 4 + 20);
    for own in compared {
        // Losses below 4, see tests/gradients.rs.
        assert!(own.error() < 1e-9, "{own:?}");
    }
}

/// Fails in the backward, in a given way.
#[derive(Clone, Copy)]
enum Wrong {
    Error,
    Panic,
    Shape,
    /// Half of the gradient.
    Half,
}

impl Function for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<Computed, LayerError> {
        let outputs = vec![inputs[0].f_mul_scalar(2.0)?];
        Ok(Computed { outputs, saved: Vec::new() })
    }

    fn backward(
        &self,
        _: &[Tensor],
        grads: &[Option<Tensor>],
        _: &[bool],
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let Some(grad) = &grads[0] else { return Ok(vec![None]) };
        match self {
            Wrong::Error => Err(LayerError::Value("injected".into())),
            Wrong::Panic => panic!("a panic"),
            Wrong::Shape => Ok(vec![Some(grad.f_sum(grad.kind())?)]),
            Wrong::Half => Ok(vec![Some(grad.shallow_clone())]),
        }
    }
}

struct Applies(Wrong);

impl Layer for Applies {
    fn kind(&self) -> &'static str {
        "applies"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(
        &self,
        _: &mut gpipe::Forward,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, LayerError> {
        apply(self.0, &[&inputs[0]])
    }
}

fn wrong(wrong: Wrong) -> Pipeline {
    let model = Sequence::new().push("before", Linear::new(5, 4)).push("own", Applies(wrong));
    Pipeline::builder(model, TensorSpec::new([6, 5], Kind::Double))
        .stages(2)
        .schedule(Schedule::ZbH1)
        .kind(Kind::Double)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()
        .unwrap()
}

#[test]
fn fault_a_failing_backward_names_layer_and_function() {
    let (x, y) = (uniform(&[6, 5], 1, Kind::Double), uniform(&[6, 4], 2, Kind::Double));
    for (own, text) in [
        (Wrong::Error, "layer 'own': 'wrong': injected"),
        (Wrong::Panic, "its code panicked: a panic"),
        (Wrong::Shape, "for input 0"),
    ] {
        let mut pipeline = wrong(own);
        let before = pipeline.parameters().unwrap();
        let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
        assert!(error.contains(text), "{error} lacks {text}");
        common::assert_same_bits(&pipeline.parameters().unwrap(), &before, "nothing changed");
    }
}

/// The check that authors are given finds a backward that is wrong.
#[test]
fn fault_finite_differences_find_a_wrong_backward() {
    let (x, y) = (uniform(&[6, 5], 1, Kind::Double), uniform(&[6, 4], 2, Kind::Double));
    let mut pipeline = wrong(Wrong::Half);
    let before = pipeline.parameters().unwrap();
    let compared = pipeline.finite_differences(&x, &y, 20).unwrap();
    assert!(compared.iter().all(|own| own.name.starts_with("before.")));
    let halved = compared.iter().filter(|own| (own.gradient * 2.0 - own.difference).abs() < 1e-9);
    assert_eq!(halved.count(), compared.len());
    assert!(compared.iter().any(|own| own.error() > 1e-3));
    common::assert_same_bits(&pipeline.parameters().unwrap(), &before, "parameters are as before");
    let sequence = Sequence::new().push("only", Linear::new(5, 4));
    let mut float = Pipeline::builder(sequence, TensorSpec::new([6, 5], Kind::Float))
        .loss(CrossEntropy::default())
        .optimizer(Sgd::new(0.1))
        .build()
        .unwrap();
    let error = float.finite_differences(&x, &y, 20).unwrap_err().to_string();
    assert!(error.contains("kind(Kind::Double)"), "{error}");
}
