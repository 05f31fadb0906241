//! Family `transparency_`, on a model with everything that a plain transformer lacks:
//!
//! - boundaries of several tensors, one of them of integers
//! - a weight used by four layers, and another tied weight beside it
//! - values that are not contiguous
//! - matrix products that ATen dispatches by which inputs require a gradient
//! - frozen parts, other optimizers, float64, and two threads per stage
//!
//! Catches sums, ties and kernels that depend on the cut.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::sync::{Arc, Mutex};

use common::{LENGTH, Named, Run, VOCABULARY, assert_same_bits, batch};
use gpipe::{
    Adam, Forward, Infer, Init, Layer, LayerError, ParameterSpec, Sequence, Sgd, TensorSpec,
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 6;

fn table() -> ParameterSpec {
    ParameterSpec::new("table", [VOCABULARY, WIDTH], Init::Normal { std: 0.3 }).tied(Some("table"))
}

/// Tokens -> (vectors, tokens).
struct Start;

impl Layer for Start {
    fn kind(&self) -> &'static str {
        "start"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![table()]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let mut shape = inputs[0].shape.clone();
        shape.push(WIDTH);
        Ok(vec![TensorSpec::new(shape, ctx.parameter_kind()), inputs[0].clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = Tensor::f_embedding(ctx.parameter(0)?, &inputs[0], -1, false, false)?;
        Ok(vec![x, inputs[0].shallow_clone()])
    }
}

/// (x, tokens) -> (dropout(x + scale table[tokens] + popped), tokens). It may stash x.
struct Again {
    stash: Option<&'static str>,
    pop: Option<&'static str>,
}

impl Layer for Again {
    fn kind(&self) -> &'static str {
        "again"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let scale = ParameterSpec::new("scale", [WIDTH], Init::Uniform { bound: 0.5 });
        vec![scale.tied(Some("scale")), table()]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        if let Some(name) = self.pop {
            ctx.pop(name)?;
        }
        if let Some(name) = self.stash {
            ctx.stash(name, inputs[0].clone())?;
        }
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let again = Tensor::f_embedding(ctx.parameter(1)?, &inputs[1], -1, false, false)?;
        let mut x = inputs[0].f_add(&again.f_mul(ctx.parameter(0)?)?)?;
        if let Some(name) = self.pop {
            x = x.f_add(&ctx.pop(name)?)?;
        }
        let x = ctx.dropout(&x, 0.1)?;
        if let Some(name) = self.stash {
            ctx.stash(name, &x);
        }
        Ok(vec![x, inputs[1].shallow_clone()])
    }
}

/// (x, tokens) -> (tanh((x^T W)^T), tokens), which mixes positions. Its product has a transposed
/// 3-D tensor and a transposed weight, and its output is not contiguous.
struct Mix;

impl Layer for Mix {
    fn kind(&self) -> &'static str {
        "mix"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("weight", [LENGTH, LENGTH], Init::Normal { std: 0.6 })]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let across = inputs[0].f_transpose(1, 2)?;
        let mixed = across.f_matmul(&ctx.parameter(0)?.f_transpose(0, 1)?)?;
        Ok(vec![mixed.f_tanh()?.f_transpose(1, 2)?, inputs[1].shallow_clone()])
    }
}

/// (x, tokens) -> logits, by the tied table.
struct Finish;

impl Layer for Finish {
    fn kind(&self) -> &'static str {
        "finish"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![table()]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![inputs[0].with_last(VOCABULARY)])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_matmul(&ctx.parameter(0)?.f_transpose(0, 1)?)?])
    }
}

fn model() -> Sequence {
    Sequence::new()
        .push("start", Start)
        .push("a", Again { stash: Some("long"), pop: None })
        .push("first mix", Mix)
        .push("b", Again { stash: None, pop: None })
        .push("second mix", Mix)
        .push("c", Again { stash: None, pop: Some("long") })
        .push("finish", Finish)
}

/// How the model is trained. Results may depend on this, but not on the cut.
#[derive(Debug, Clone, Copy)]
struct Training {
    kind: Kind,
    threads: usize,
    momentum: bool,
    /// Parameters whose full name contains one of these are frozen.
    frozen: &'static [&'static str],
    micro_batches: usize,
}

fn train(run: &Run, training: Training) -> (Vec<u64>, Named, Named) {
    let frozen = training.frozen.iter().map(|part| format!("*{part}*"));
    let builder = run
        .builder(model().freeze(frozen), training.micro_batches)
        .kind(training.kind)
        .threads_per_stage(training.threads)
        .clip_norm(0.5);
    let builder = if training.momentum {
        builder.optimizer(Sgd { lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01 })
    } else {
        builder.optimizer(Adam { weight_decay: 0.01, decoupled: true, ..Adam::default() })
    };
    let mut pipeline = builder.build().unwrap();
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for (step, samples) in [7, 2, 5].into_iter().enumerate() {
        let (inputs, targets) = batch(samples, step as u64);
        // Not contiguous, as a user's batch may be.
        let inputs = inputs.transpose(0, 1).contiguous().transpose(0, 1);
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        losses.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
        let named = pipeline.gradients().unwrap();
        gradients.extend(named.into_iter().map(|(name, t)| (format!("step {step} {name}"), t)));
    }
    (losses, gradients, pipeline.parameters().unwrap())
}

fn check(training: Training) {
    let expected = train(&Run::plain(), training);
    assert!(!expected.1.is_empty());
    for run in Run::all(model().len()) {
        let found = train(&run, training);
        let what = format!("{run:?} {training:?}");
        assert_same_bits(&found.1, &expected.1, &what);
        assert_eq!(found.0, expected.0, "losses and norms: {what}");
        assert_same_bits(&found.2, &expected.2, &what);
    }
}

const PLAIN: Training =
    Training { kind: Kind::Float, threads: 1, momentum: false, frozen: &[], micro_batches: 3 };

#[test]
fn transparency_odd_float32_and_float64() {
    check(PLAIN);
    check(Training { kind: Kind::Double, ..PLAIN });
}

#[test]
fn transparency_odd_momentum_and_more_micro_batches_than_samples() {
    check(Training { momentum: true, micro_batches: 4, ..PLAIN });
}

#[test]
fn transparency_odd_two_threads_per_stage() {
    check(Training { threads: 2, ..PLAIN });
}

#[test]
fn transparency_odd_frozen_parts() {
    // One tied weight; the other; both, which freezes the whole front and a skip from it; and
    // weights that are not tied.
    for frozen in [&["table"][..], &["scale"], &["table", "scale"], &["first mix"], &["mix"]] {
        check(Training { frozen, ..PLAIN });
    }
}

/// libtorch keeps the number of threads per thread, but a thread's first kernel adopted the number
/// last set anywhere in the process. A concurrent pipeline with another number then changed this
/// one's last bits.
#[test]
fn regression_the_number_of_threads_is_the_pipelines_own() {
    let run = Run { stages: 2, ..Run::plain() };
    let expected = train(&run, PLAIN);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            for _ in 0..20 {
                train(&run, Training { threads: 2, ..PLAIN });
            }
        });
        for _ in 0..20 {
            assert_same_bits(
                &train(&run, PLAIN).2,
                &expected.2,
                "beside another number of threads",
            );
        }
        beside.join().unwrap();
    });
}

/// x [samples, a, b] -> (x^T W)^T, with W [a, a] and no bias: the product of `Mix`, in sizes that
/// can show a difference.
struct Across {
    size: i64,
    /// Whether each forward has built a graph.
    graphs: Arc<Mutex<Vec<bool>>>,
}

impl Layer for Across {
    fn kind(&self) -> &'static str {
        "across"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("weight", [self.size; 2], Init::Normal { std: 0.1 })]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let across =
            inputs[0].f_transpose(1, 2)?.f_matmul(&ctx.parameter(0)?.f_transpose(0, 1)?)?;
        self.graphs.lock().unwrap().push(across.requires_grad());
        Ok(vec![across.f_transpose(1, 2)?])
    }
}

/// ATen's `matmul` selects another kernel if the weight requires no gradient, so a forward that
/// discards must still run with grad mode on. On many machines both kernels agree to the bit, so
/// the layers also tell whether it was on.
#[test]
fn transparency_odd_products_that_aten_dispatches_by_gradient() {
    for (a, b) in [(7, 33), (64, 48), (300, 37), (1000, 3)] {
        let losses = |remat| {
            let graphs = Arc::<Mutex<Vec<bool>>>::default();
            let across = || Across { size: a, graphs: Arc::clone(&graphs) };
            let model = Sequence::new().push("one", across()).push("two", across());
            let mut pipeline =
                gpipe::Pipeline::builder(model, TensorSpec::new([6, a, b], Kind::Float))
                    .stages(2)
                    .micro_batches(2)
                    .remat(remat)
                    .loss(gpipe::MeanSquaredError)
                    .optimizer(Sgd::new(0.1))
                    .build()
                    .unwrap();
            let x = common::uniform(&[6, a, b], 1, Kind::Float);
            let y = common::uniform(&[6, a, b], 2, Kind::Float);
            let losses: Vec<u64> =
                (0..2).map(|_| pipeline.train_step(&x, &y).unwrap().loss.to_bits()).collect();
            let graphs = graphs.lock().unwrap();
            assert!(graphs.len() >= 8 && graphs.iter().all(|on| *on), "{graphs:?}");
            drop(graphs);
            losses
        };
        assert_eq!(losses(gpipe::Remat::Always), losses(gpipe::Remat::Never), "{a} x {b}");
    }
}
