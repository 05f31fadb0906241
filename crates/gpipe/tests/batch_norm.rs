//! Batch norm against whole-batch formulas and a plain loop over micro-batches. `transparency.rs`
//! shows that running statistics do not depend on K, schedule, balance or re-materialization.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Named, assert_close, cpu, uniform};
use gpipe::{
    Forward, Infer, Init, Layer, LayerError, MeanSquaredError, NormsFollow, ParameterSpec,
    Pipeline, PipelineBuilder, Remat, Schedule, Sequence, Sgd, TensorSpec,
    layers::{Activation, BatchNorm, Linear},
};
use tch::{Kind, Tensor};

const CHANNELS: i64 = 4;

/// Values whose mean is 35 standard deviations from 0, so that computing the variance as mean
/// square minus squared mean would lose digits.
fn images(samples: i64, seed: u64, kind: Kind) -> Tensor {
    uniform(&[samples, CHANNELS, 3, 5], seed, kind) * 0.5 + 10.0
}

fn builder(model: Sequence, micro_batches: usize, kind: Kind) -> PipelineBuilder {
    Pipeline::builder(model, TensorSpec::new([4, CHANNELS, 3, 5], kind))
        .kind(kind)
        .micro_batches(micro_batches)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.0))
}

fn named(all: &Named, name: &str) -> Tensor {
    let found = all.iter().find(|(own, _)| own == name);
    found.unwrap_or_else(|| panic!("no {name}")).1.to_kind(Kind::Double)
}

#[test]
fn oracle_running_statistics_are_those_of_whole_mini_batches() {
    for momentum in [Some(0.1), None] {
        for (micro_batches, samples) in [(1, 6), (3, 6), (4, 7), (5, 3)] {
            let norm = BatchNorm { momentum, ..BatchNorm::new(CHANNELS) };
            let model = Sequence::new().push("norm", norm).push("tanh", Activation::Tanh);
            // Everything is recomputed, which must not update the statistics a second time.
            let builder = builder(model, micro_batches, Kind::Float).remat(Remat::Always);
            let mut pipeline = builder.stages(2).schedule(Schedule::GPipe).build().unwrap();
            let (mut mean, mut variance) = (
                Tensor::zeros([CHANNELS], cpu(Kind::Double)),
                Tensor::ones([CHANNELS], cpu(Kind::Double)),
            );
            for step in 0..4 {
                let x = images(samples + step, step as u64, Kind::Float);
                pipeline.train_step(&x, x.zeros_like()).unwrap();
                let by_channel = x.to_kind(Kind::Double).transpose(0, 1).reshape([CHANNELS, -1]);
                let share = momentum.unwrap_or(1.0 / (step + 1) as f64);
                let new = by_channel.mean_dim(1, false, Kind::Double);
                mean = &mean * (1.0 - share) + new * share;
                variance = &variance * (1.0 - share) + by_channel.var_dim(1, true, false) * share;
                // Evaluation between two steps updates no statistics.
                pipeline.evaluate(&x, x.zeros_like()).unwrap();
            }
            let all = pipeline.parameters().unwrap();
            let relative = |name: &str, expected: &Tensor| {
                let found = named(&all, name);
                ((found - expected) / expected).abs().max().double_value(&[])
            };
            // libtorch computes a micro-batch's statistics in float32.
            assert!(relative("norm.running_mean", &mean) < 1e-6, "{momentum:?} M={micro_batches}");
            assert!(
                relative("norm.running_variance", &variance) < 1e-6,
                "{momentum:?} M={micro_batches}"
            );
            assert_eq!(named(&all, "norm.running_batches").double_value(&[0]), 4.0);
        }
    }
}

#[test]
fn oracle_running_statistics_may_follow_micro_batches() {
    for (momentum, stages) in [(Some(0.1), 1), (Some(0.1), 2), (None, 2)] {
        let norm = BatchNorm { momentum, ..BatchNorm::new(CHANNELS) };
        let model = Sequence::new().push("norm", norm).push("tanh", Activation::Tanh);
        let builder = builder(model, 3, Kind::Double).remat(Remat::Always).stages(stages);
        let mut pipeline = builder.norms_follow(NormsFollow::MicroBatches).build().unwrap();
        let (mut mean, mut variance) = (
            Tensor::zeros([CHANNELS], cpu(Kind::Double)),
            Tensor::ones([CHANNELS], cpu(Kind::Double)),
        );
        let mut count = 0.0;
        for step in 0..3 {
            let x = images(7, step, Kind::Double);
            pipeline.train_step(&x, x.zeros_like()).unwrap();
            // A plain loop over the micro-batches of 3, 2 and 2 samples.
            for (first, samples) in [(0, 3), (3, 2), (5, 2)] {
                count += 1.0;
                let share = momentum.unwrap_or(1.0 / count);
                let own = x.narrow(0, first, samples).transpose(0, 1).reshape([CHANNELS, -1]);
                mean = &mean * (1.0 - share) + own.mean_dim(1, false, Kind::Double) * share;
                variance = &variance * (1.0 - share) + own.var_dim(1, true, false) * share;
            }
        }
        let all = pipeline.parameters().unwrap();
        for (name, expected) in [("norm.running_mean", &mean), ("norm.running_variance", &variance)]
        {
            let apart = ((named(&all, name) - expected) / expected).abs().max().double_value(&[]);
            assert!(apart < 1e-12, "{momentum:?}, K {stages}: {name} by {apart:e}");
        }
        assert_eq!(named(&all, "norm.running_batches").double_value(&[0]), count);
    }
}

#[test]
fn oracle_evaluation_uses_the_running_statistics() {
    let model = Sequence::new().push("norm", BatchNorm::new(CHANNELS));
    let mut pipeline = builder(model, 3, Kind::Double).build().unwrap();
    let x = images(7, 1, Kind::Double);
    pipeline.train_step(&x, x.zeros_like()).unwrap();
    let all = pipeline.parameters().unwrap();
    let column = |name: &str| named(&all, name).reshape([1, CHANNELS, 1, 1]);
    let expected = (&x - column("norm.running_mean"))
        / (column("norm.running_variance") + 1e-5_f64).sqrt()
        * column("norm.weight")
        + column("norm.bias");
    let found = pipeline.predict(&x).unwrap();
    assert!((&found[0] - expected).abs().max().double_value(&[]) < 1e-10);
}

#[test]
fn oracle_gradients_are_those_of_a_loop_over_the_micro_batches() {
    let model = || {
        Sequence::new()
            .push("first", Linear::new(5, 5))
            .push("norm", BatchNorm::new(CHANNELS))
            .push("tanh", Activation::Tanh)
            .push("last", Linear::new(5, 2))
    };
    let (x, y) = (
        uniform(&[7, CHANNELS, 3, 5], 3, Kind::Double),
        uniform(&[7, CHANNELS, 3, 2], 4, Kind::Double),
    );
    let mut pipeline = builder(model(), 3, Kind::Double).stages(3).build().unwrap();
    pipeline.train_step(&x, &y).unwrap();
    let found = pipeline.gradients().unwrap();

    let values = pipeline.parameters().unwrap(); // a learning rate of 0
    let leaf = |name: &str| {
        let value = values.iter().find(|(own, _)| own == name).unwrap().1.copy();
        value.set_requires_grad(true)
    };
    let names =
        ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"];
    let leaves: Vec<Tensor> = names.iter().map(|name| leaf(name)).collect();
    let mut first = 0;
    for samples in [3, 2, 2] {
        let (x, y) = (x.narrow(0, first, samples), y.narrow(0, first, samples));
        first += samples;
        let h = x.linear(&leaves[0], Some(&leaves[1]));
        let mean = h.mean_dim(&[0_i64, 2, 3][..], true, Kind::Double);
        let variance = (&h - &mean).square().mean_dim(&[0_i64, 2, 3][..], true, Kind::Double);
        let shape = [1, CHANNELS, 1, 1];
        let h = (h - mean) / (variance + 1e-5_f64).sqrt() * leaves[2].reshape(shape)
            + leaves[3].reshape(shape);
        let out = h.tanh().linear(&leaves[4], Some(&leaves[5]));
        let loss = (out - y).square().sum(Kind::Double) / (7 * CHANNELS * 3 * 2) as f64;
        loss.backward();
    }
    let expected: Named =
        names.iter().zip(&leaves).map(|(name, leaf)| ((*name).to_owned(), leaf.grad())).collect();
    assert_close(&found, &expected, 1e-10, "batch norm");
}

#[test]
fn fault_a_failed_step_leaves_the_running_statistics() {
    let model =
        Sequence::new().push("norm", BatchNorm::new(CHANNELS)).push("tanh", Activation::Tanh);
    let mut pipeline = builder(model, 2, Kind::Float).build().unwrap();
    let x = images(6, 1, Kind::Float);
    pipeline.train_step(&x, x.zeros_like()).unwrap();
    let before = pipeline.parameters().unwrap();
    let error = pipeline.train_step(&x, x.full_like(f64::NAN)).unwrap_err();
    assert!(error.is_not_finite(), "{error}");
    common::assert_same_bits(&before, &pipeline.parameters().unwrap(), "after a NaN");
}

/// A layer that claims to have a batch norm, but has other parameters in its place.
struct Misused(Vec<ParameterSpec>);

impl Layer for Misused {
    fn kind(&self) -> &'static str {
        "misused"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.clone()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![ctx.batch_norm(0, &BatchNorm::new(CHANNELS), &inputs[0])?])
    }
}

#[test]
fn fault_parameters_that_are_not_a_batch_norms_are_refused_and_not_overwritten() {
    let own = BatchNorm::new(CHANNELS).parameters("").to_vec();
    let step = |parameters: Vec<ParameterSpec>| {
        let model = Sequence::new().push("misused", Misused(parameters));
        let mut pipeline = builder(model, 2, Kind::Float).build()?;
        let x = images(6, 1, Kind::Float);
        pipeline.train_step(&x, x.zeros_like()).map(|_| ())
    };
    step(own.clone()).unwrap();
    let error = step(own[..4].to_vec()).unwrap_err().to_string();
    assert!(error.contains("none with number 4"), "{error}");
    let mut trained = own.clone();
    trained[2] = ParameterSpec::new("mean", [CHANNELS], Init::Zeros);
    let error = step(trained).unwrap_err().to_string();
    assert!(error.contains("not those of a batch norm"), "{error}");
    let mut tied = own;
    tied[3] = tied[3].clone().tied(Some("variance"));
    let error = step(tied).unwrap_err().to_string();
    assert!(error.contains("'running_variance' is tied"), "{error}");
}

#[test]
fn fault_numbers_of_a_batch_norm_out_of_range() {
    let of = |norm: BatchNorm, part: &str| {
        let spec = TensorSpec::new([4, CHANNELS], Kind::Float);
        let model = Sequence::new().push("norm", norm);
        let error = Pipeline::builder(model, spec).build().err().unwrap().to_string();
        assert!(error.contains("'norm'") && error.contains(part), "{error}");
    };
    of(BatchNorm { momentum: Some(1.5), ..BatchNorm::new(CHANNELS) }, "momentum 1.5: use a number");
    of(BatchNorm { eps: f64::NAN, ..BatchNorm::new(CHANNELS) }, "eps NaN: use at least 0");
}

#[test]
fn fault_one_value_a_channel_and_other_channels() {
    let model = || Sequence::new().push("norm", BatchNorm::new(CHANNELS));
    let spec = TensorSpec::new([4, CHANNELS], Kind::Float);
    let builder = Pipeline::builder(model(), spec).loss(MeanSquaredError).optimizer(Sgd::new(0.1));
    let mut pipeline = builder.micro_batches(4).build().unwrap();
    let x = uniform(&[4, CHANNELS], 1, Kind::Float);
    let error = pipeline.train_step(&x, x.zeros_like()).unwrap_err().to_string();
    assert!(error.contains("layer 'norm'") && error.contains("larger micro-batches"), "{error}");
    let wide = TensorSpec::new([4, 7], Kind::Float);
    let error = Pipeline::builder(model(), wide).build().err().unwrap().to_string();
    assert!(error.contains("4 channels") && error.contains("[4, 7]"), "{error}");
}
