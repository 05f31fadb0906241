//! Errors in the library's words: what is wrong, where, once, and the remedy. No flags and no
//! configuration keys of the command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, path::Path};

use common::{cpu, uniform};
use gpipe::{
    Layer, LayerError, Loss, LossContext, MeanSquaredError, Pipeline, PipelineBuilder, Result,
    Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

fn builder(model: Sequence, shape: &[i64]) -> PipelineBuilder {
    Pipeline::builder(model, TensorSpec::new(shape, Kind::Float))
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
}

fn linear() -> Sequence {
    Sequence::new().push("first", Linear::new(5, 4)).push("tanh", Activation::Tanh)
}

fn text<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn fault_an_empty_network() {
    let error = text(builder(Sequence::new(), &[6, 5]).build());
    assert!(error.contains("an empty network: add at least one layer"), "{error}");
}

#[test]
fn fault_a_scalar_has_no_samples() {
    let error = text(builder(linear(), &[]).build());
    assert!(error.contains("input 0 is a scalar, which has no samples"), "{error}");
    let mut pipeline = builder(linear(), &[6, 5]).build().unwrap();
    let (x, scalar) = (uniform(&[6, 5], 1, Kind::Float), Tensor::from(1.0_f32));
    let error = text(pipeline.train_step(&scalar, &x));
    assert!(error.contains("input 0 is a scalar, which has no samples"), "{error}");
    let error = text(pipeline.train_step(&x, &scalar));
    assert!(error.contains("target 0 is a scalar, which has no samples"), "{error}");
}

/// A loss that forgets to add up.
struct NoSum;

impl Loss for NoSum {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        _: &[TensorSpec],
        _: &[TensorSpec],
    ) -> std::result::Result<(), LayerError> {
        Ok(())
    }

    fn sum(
        &self,
        _: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> std::result::Result<Tensor, LayerError> {
        Ok(outputs[0].f_sub(&targets[0])?)
    }

    fn count(
        &self,
        _: &LossContext<'_>,
        targets: &[Tensor],
    ) -> std::result::Result<f64, LayerError> {
        Ok(targets[0].numel() as f64)
    }
}

#[test]
fn fault_a_loss_is_one_number() {
    let mut pipeline = builder(linear(), &[4, 5]).loss(NoSum).build().unwrap();
    let (x, y) = (uniform(&[4, 5], 1, Kind::Float), uniform(&[4, 4], 2, Kind::Float));
    let error = text(pipeline.train_step(&x, &y));
    assert!(error.contains("the loss must be one number, got [4, 4]"), "{error}");
}

/// A layer whose backward fails inside libtorch, so that the error passes through everything.
struct Wide;

impl Layer for Wide {
    fn kind(&self) -> &'static str {
        "wide"
    }

    fn infer(
        &self,
        _: &mut gpipe::Infer,
        inputs: &[TensorSpec],
    ) -> std::result::Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(
        &self,
        _: &mut gpipe::Forward,
        inputs: &[Tensor],
    ) -> std::result::Result<Vec<Tensor>, LayerError> {
        let other = Tensor::zeros([9, 9], cpu(Kind::Float));
        Ok(vec![inputs[0].f_matmul(&other)?])
    }
}

#[test]
fn fault_a_place_is_named_once() {
    let model = linear().push("wide", Wide);
    let mut pipeline = builder(model, &[6, 5]).stages(2).build().unwrap();
    let (x, y) = (uniform(&[6, 5], 1, Kind::Float), uniform(&[6, 4], 2, Kind::Float));
    let error = text(pipeline.train_step(&x, &y));
    for place in ["1F0", "'wide'", "libtorch"] {
        assert_eq!(error.matches(place).count(), 1, "{place} in {error}");
    }
    let error = text(builder(linear().push("first", Linear::new(4, 4)), &[6, 5]).build());
    assert_eq!(error.matches("'first'").count(), 1, "{error}");
    let error = text(builder(linear().push("next", Linear::new(3, 4)), &[6, 5]).build());
    assert_eq!(error.matches("'next'").count(), 1, "{error}");
}

/// The texts of the libraries that a program may use without the command.
#[test]
fn property_no_text_of_the_libraries_names_a_flag_or_key_of_the_command() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut texts = 0;
    for name in ["bridge", "core", "distributed", "gpipe", "models", "runtime"] {
        let mut folders = vec![crates.join(name).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                for (at, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
                    let code = line.trim_start();
                    if code.starts_with("//") || !code.contains('"') {
                        continue;
                    }
                    texts += 1;
                    for word in [" --", "pipeline.", "gpipe train", "gpipe profile", "gpipe plan"] {
                        let inside = code.split('"').skip(1).step_by(2);
                        let found = inside.into_iter().any(|text| text.contains(word));
                        assert!(!found, "{}:{}: {line}", path.display(), at + 1);
                    }
                }
            }
        }
    }
    assert!(texts > 1000, "{texts}");
}
