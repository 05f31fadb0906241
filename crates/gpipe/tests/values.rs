//! Inputs and targets without a sample axis: a mask for all samples, a number for each step.
//!
//! - `transparency_`: equal at every K, and not dependent on M but for rounding
//! - `oracle_`: against the same network by autograd
//! - `fault_`: positions that do not fit
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Named, Run, assert_close, assert_same_bits, uniform};
use gpipe::{
    Adam, Infer, Init, Layer, LayerError, Loss, LossContext, ParameterSpec, Pipeline,
    PipelineBuilder, Sequence, TensorSpec,
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 6;

/// x [samples, WIDTH], mask [WIDTH, WIDTH], scale []: x tanh(scale * (W . mask)^T), mask, scale.
struct Masked {
    last: bool,
}

impl Layer for Masked {
    fn kind(&self) -> &'static str {
        "masked"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("weight", [WIDTH, WIDTH], Init::Normal { std: 0.5 })]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs[..if self.last { 1 } else { 3 }].to_vec())
    }

    fn forward(
        &self,
        ctx: &mut gpipe::Forward,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, LayerError> {
        let [x, mask, scale] = inputs else { return Err(LayerError::Shape("three".into())) };
        let weight = ctx.parameter(0)?.f_mul(mask)?.f_mul(scale)?.f_tr()?;
        let y = x.f_matmul(&weight)?.f_tanh()?;
        Ok(match self.last {
            true => vec![y],
            false => vec![y, mask.shallow_clone(), scale.shallow_clone()],
        })
    }
}

/// The squared distance from a target, weighted by a shared target [WIDTH].
struct Weighted;

impl Loss for Weighted {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        _: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        match targets.len() {
            2 => Ok(()),
            _ => Err(LayerError::Shape("it takes a target and its weights".into())),
        }
    }

    fn sum(
        &self,
        _: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let square = outputs[0].f_sub(&targets[0])?.f_square()?;
        Ok(square.f_mul(&targets[1])?.f_sum(outputs[0].kind())?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(targets[0].numel() as f64)
    }
}

fn network() -> Sequence {
    (0..4).fold(Sequence::new(), |model, at| {
        model.push(format!("layer {at}"), Masked { last: at == 3 })
    })
}

fn builder(run: &Run, micro_batches: usize, kind: Kind) -> PipelineBuilder {
    let inputs = vec![
        TensorSpec::new([7, WIDTH], kind),
        TensorSpec::new([WIDTH, WIDTH], kind),
        TensorSpec::new([], kind),
    ];
    Pipeline::builder(network(), inputs)
        .shared_inputs([1, 2])
        .shared_targets([1])
        .stages(run.stages)
        .schedule(run.schedule.clone())
        .remat(run.remat)
        .balance(run.balance.clone())
        .micro_batches(micro_batches)
        .kind(kind)
        .loss(Weighted)
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
        .input_gradients()
        .keep_gradients()
}

fn data(seed: u64, kind: Kind) -> (Vec<Tensor>, Vec<Tensor>) {
    let mask = uniform(&[WIDTH, WIDTH], 50, kind).gt(-0.4).to_kind(kind);
    let scale = Tensor::from(0.7 + seed as f64).to_kind(kind);
    let weights = uniform(&[WIDTH], 60, kind).abs();
    (
        vec![uniform(&[7, WIDTH], seed, kind), mask, scale],
        vec![uniform(&[7, WIDTH], 100 + seed, kind), weights],
    )
}

fn trained(run: &Run, micro_batches: usize, kind: Kind) -> (Named, Named) {
    let mut pipeline = builder(run, micro_batches, kind).build().unwrap();
    for seed in 0..3 {
        let (inputs, targets) = data(seed, kind);
        pipeline.train_step(inputs, targets).unwrap();
    }
    (pipeline.parameters().unwrap(), pipeline.gradients().unwrap())
}

#[test]
fn transparency_of_shared_tensors() {
    let expected = trained(&Run::plain(), 3, Kind::Float);
    for run in Run::all(network().len()) {
        let found = trained(&run, 3, Kind::Float);
        assert_same_bits(&found.0, &expected.0, &format!("{run:?}"));
        assert_same_bits(&found.1, &expected.1, &format!("{run:?}"));
    }
    let whole = trained(&Run::plain(), 1, Kind::Double);
    for micro_batches in 2..5 {
        let found = trained(&Run::plain(), micro_batches, Kind::Double);
        assert_close(&found.1, &whole.1, 1e-10, "M");
    }
}

#[test]
fn oracle_gradients_of_shared_inputs_are_sums() {
    let kind = Kind::Double;
    let (inputs, _) = data(1, kind);
    let mut expected: Option<Named> = None;
    for run in Run::all(network().len()).iter().step_by(5) {
        let mut pipeline = builder(run, 3, kind).build().unwrap();
        let outputs = pipeline.forward(&inputs[..]).unwrap();
        outputs.tensors()[0].square().sum(kind).backward();
        let found = pipeline.backward(&outputs, outputs.gradients()).unwrap();
        let names = ["x", "mask", "scale"].map(str::to_owned);
        let found: Named = names.into_iter().zip(found.into_iter().map(Option::unwrap)).collect();
        let leaves: Vec<Tensor> =
            inputs.iter().map(|input| input.copy().set_requires_grad(true)).collect();
        let parameters = pipeline.parameters().unwrap();
        let step = |x: Tensor, (_, weight): &(String, Tensor)| {
            x.matmul(&(weight * &leaves[1] * &leaves[2]).tr()).tanh()
        };
        let plain = parameters.iter().fold(leaves[0].shallow_clone(), step);
        plain.square().sum(kind).backward();
        let wanted: Named =
            found.iter().zip(&leaves).map(|((n, _), l)| (n.clone(), l.grad())).collect();
        assert_close(&found, &wanted, 1e-12, &format!("{run:?}"));
        let expected = expected.get_or_insert_with(|| {
            found.iter().map(|(name, grad)| (name.clone(), grad.shallow_clone())).collect()
        });
        assert_same_bits(&found, expected, &format!("{run:?}"));
    }
}

#[test]
fn fault_positions_of_shared_tensors_are_checked() {
    let run = Run::plain();
    let build = |shared: &[usize]| {
        let error = builder(&run, 3, Kind::Float).shared_inputs(shared).build().err().unwrap();
        error.to_string()
    };
    assert!(build(&[1, 3]).contains("shared input 3: there are 3 inputs"), "{}", build(&[1, 3]));
    assert!(build(&[0, 1, 2]).contains("at least one needs samples"), "{}", build(&[0, 1, 2]));
    assert!(build(&[1]).contains("declare it as shared (shared_inputs)"), "{}", build(&[1]));
    let mut pipeline = builder(&run, 3, Kind::Float).build().unwrap();
    let (mut inputs, targets) = data(0, Kind::Float);
    inputs[0] = uniform(&[5, WIDTH], 1, Kind::Float);
    let error = pipeline.train_step(inputs, targets).unwrap_err().to_string();
    assert!(error.contains("the first input has 5 samples, target 0 is [7, 6]"), "{error}");
}

/// The mask and the scale are as large for 4 samples as for 1.
#[test]
fn oracle_estimates_do_not_scale_shared_inputs() {
    let mut built = builder(&Run::plain(), 3, Kind::Float);
    let costs = built.estimate(&[1, 4], &gpipe::estimate::Rate::default()).unwrap();
    for samples in [1_u64, 4] {
        let (own, width) = (&costs.sizes[&(samples as usize)], WIDTH as u64);
        for layer in &own[..4] {
            assert_eq!(layer.inputs.0, 4 * (samples * width + width * width + 1));
        }
    }
}

/// An error after the forward itself leaves nothing open: an output without a sample axis cannot be
/// joined over micro-batches.
#[test]
fn regression_a_forward_whose_outputs_cannot_be_joined_is_not_open() {
    let model = Sequence::new().push("only", Masked { last: false });
    let inputs = vec![
        TensorSpec::new([7, WIDTH], Kind::Float),
        TensorSpec::new([WIDTH, WIDTH], Kind::Float),
        TensorSpec::new([], Kind::Float),
    ];
    let mut pipeline = Pipeline::builder(model, inputs)
        .shared_inputs([1, 2])
        .micro_batches(2)
        .open_forwards(1)
        .optimizer(Adam::default())
        .build()
        .unwrap();
    let (inputs, _) = data(0, Kind::Float);
    for _ in 0..3 {
        let error = pipeline.forward(&inputs[..]).err().unwrap().to_string();
        assert!(!error.contains("forwards are open"), "{error}");
    }
}

/// x, plus what another input gives if any of its samples is marked.
struct Gated;

impl Layer for Gated {
    fn kind(&self) -> &'static str {
        "gated"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![inputs[0].clone()])
    }

    fn forward(
        &self,
        _: &mut gpipe::Forward,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, LayerError> {
        let marked = inputs[1].f_narrow(1, 0, 1)?.f_gt(0.0)?;
        match marked.f_any()?.f_int64_value(&[])? {
            0 => Ok(vec![inputs[0].f_mul_scalar(2.0)?]),
            _ => Ok(vec![inputs[0].f_add(&inputs[1].f_mul(&marked.f_to_kind(Kind::Double)?)?)?]),
        }
    }
}

/// The gradient of an input that only some micro-batches use had the rows of those alone, which the
/// caller took for its first rows.
#[test]
fn regression_an_input_that_some_micro_batches_use_has_a_whole_gradient() {
    let (x, other) = (uniform(&[6, 3], 1, Kind::Double), uniform(&[6, 3], 2, Kind::Double).abs());
    let _ = other.narrow(0, 0, 3).fill_(-1.0);
    let found = |micro_batches: usize| {
        let specs = vec![TensorSpec::of(&x), TensorSpec::of(&other)];
        let model =
            Sequence::new().push("gated", Gated).push("tanh", gpipe::layers::Activation::Tanh);
        let mut pipeline = Pipeline::builder(model, specs)
            .kind(Kind::Double)
            .micro_batches(micro_batches)
            .input_gradients()
            .build()
            .unwrap();
        let outputs = pipeline.forward(vec![x.shallow_clone(), other.shallow_clone()]).unwrap();
        outputs.tensors()[0].sum(Kind::Double).backward();
        pipeline.backward(&outputs, outputs.gradients()).unwrap().remove(1).unwrap()
    };
    let halves = found(2);
    assert_eq!(halves.size(), [6, 3]);
    assert_eq!(halves.narrow(0, 0, 3).abs().sum(Kind::Double).double_value(&[]), 0.0);
    assert_eq!(halves.narrow(0, 3, 3), found(1).narrow(0, 3, 3));
}
