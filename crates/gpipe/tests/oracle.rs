//! Family `oracle_`: the pipeline against a simpler computation of the same results.
//!
//! - `oracle_unpipelined_*`: one pass over the whole mini-batch as one graph, written in plain tch
//!   from the formulas. Catches a lost or duplicated sample, a wrong denominator, a cut gradient,
//!   and a tie that is summed twice.
//! - `oracle_loss_*`: the exact loss (invariant 3 in ARCHITECTURE.md). Catches a mean of
//!   micro-batch means.
//! - `oracle_optimizer_*`, `oracle_clipping_*`: update rules and global norm written out in
//!   float64.
//! - `oracle_memory_*`, `oracle_recompute_*`: what re-materialization discards, derived from the
//!   sizes. Catches a leak, and an activation that is both recomputed and kept.

// clippy.toml allows these in test functions, but not in shared helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::common;

use common::{
    FEATURES, Features, LENGTH, Named, Run, assert_close, assert_same_bits, batch, model, uniform,
};
use gpipe::{
    Adam, Balance, Bytes, Forward, Infer, Init, Layer, LayerError, MeanSquaredError, Moments,
    Nanos, Optimizer, ParameterSpec, Pipeline, PipelineBuilder, Remat, Schedule, Sequence, Sgd,
    StepReport, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

/// The model's parameters as leaves of one graph, and the model in plain tch.
struct Plain {
    leaves: Named,
    features: Features,
}

impl Plain {
    fn new(parameters: Named, features: Features) -> Self {
        let leaf = |(name, t): (String, Tensor)| (name, t.detach().set_requires_grad(true));
        Self { leaves: parameters.into_iter().map(leaf).collect(), features }
    }

    fn get(&self, name: &str) -> &Tensor {
        let found = self.leaves.iter().find(|(own, _)| own == name);
        found.map(|(_, leaf)| leaf).unwrap_or_else(|| panic!("no parameter {name}"))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        let [weight, bias] = ["weight", "bias"].map(|part| self.get(&format!("{name}.{part}")));
        x.matmul(&weight.tr()) + bias
    }

    /// (x - mean) / sqrt(variance + 1e-5) weight + bias (Ba, Kiros & Hinton 2016).
    fn norm(&self, x: &Tensor, layer: &str) -> Tensor {
        let [weight, bias] =
            ["weight", "bias"].map(|part| self.get(&format!("{layer}.norm.{part}")));
        let mean = |t: &Tensor| t.mean_dim(-1_i64, true, None::<Kind>);
        let centred = x - mean(x);
        &centred / (mean(&centred.square()) + 1e-5).sqrt() * weight + bias
    }

    /// Causal attention, head by head (Vaswani et al. 2017, equation 1). x: [samples, positions,
    /// features].
    fn attention(&self, x: &Tensor, layer: &str) -> Tensor {
        let qkv = self.linear(&self.norm(x, layer), &format!("{layer}.qkv"));
        let size = FEATURES / 2;
        let future = Tensor::ones([LENGTH, LENGTH], common::cpu(Kind::Bool)).triu(1);
        let heads: Vec<Tensor> = (0..2)
            .map(|head| {
                let [q, k, v] =
                    [0, 1, 2].map(|part| qkv.narrow(-1, part * FEATURES + head * size, size));
                let scores = q.matmul(&k.transpose(1, 2)) / (size as f64).sqrt();
                let weights = scores.masked_fill(&future, f64::NEG_INFINITY).exp();
                let sums = weights.sum_dim_intlist(-1_i64, true, None::<Kind>);
                (weights / sums).matmul(&v)
            })
            .collect();
        x + self.linear(&Tensor::cat(&heads, -1), &format!("{layer}.output"))
    }

    /// gelu(x) = x (1 + erf(x / sqrt 2)) / 2 (Hendrycks & Gimpel 2016).
    fn mlp(&self, x: &Tensor, layer: &str) -> Tensor {
        let h = self.linear(&self.norm(x, layer), &format!("{layer}.hidden"));
        let h = &h * ((&h / 2_f64.sqrt()).erf() + 1.0) / 2.0;
        x + self.linear(&h, &format!("{layer}.output"))
    }

    /// The sum of the losses over the targets that count, and the number of those targets.
    fn sum_and_count(&self, inputs: &Tensor, targets: &Tensor) -> (Tensor, f64) {
        let positions = self.get("embedding.positions").narrow(0, 0, LENGTH);
        let tokens = self.get("embedding.tokens");
        let embedded = tokens.index_select(0, &inputs.reshape([-1]));
        let long = embedded.reshape([-1, LENGTH, FEATURES]) + positions;
        let short = self.mlp(&self.attention(&long, "0.attention"), "0.mlp");
        let mut x = self.attention(&short, "1.attention");
        if self.features.skip {
            x = x + long + short;
        }
        let x = self.norm(&self.mlp(&x, "1.mlp"), "head");
        let projection = if self.features.tied { tokens } else { self.get("head.weight") };
        let logits = x.matmul(&projection.tr());
        let counted = targets.ne(-100);
        let at = targets.clamp_min(0).unsqueeze(-1);
        let losses =
            logits.logsumexp(-1_i64, false) - logits.gather(-1, &at, false).squeeze_dim(-1);
        let count = counted.sum(Kind::Int64).double_value(&[]);
        (losses.masked_fill(&counted.logical_not(), 0.0).sum(logits.kind()), count)
    }

    /// Loss and gradients of the whole mini-batch.
    fn backward(&self, (inputs, targets): &(Tensor, Tensor)) -> (f64, Named) {
        let (sum, count) = self.sum_and_count(inputs, targets);
        let loss = sum / count;
        loss.backward();
        let grad = |(name, leaf): &(String, Tensor)| (name.clone(), leaf.grad());
        (loss.double_value(&[]), self.leaves.iter().map(grad).collect())
    }
}

/// How two sets of gradients are compared: `assert_close`, or `assert_close_in_norm`.
type Compare = fn(&Named, &Named, f64, &str);

/// Asserts |a - b| <= relative max(|b|, 1e-3 global norm), where |.| is the norm of a whole
/// parameter.
///
/// float32 cannot meet a bound for each element. Where the terms of an element's sum cancel, one
/// pass in plain float32 differs from float64 by up to 3.7e-5 max(|b|, 1e-3 global norm).
fn assert_close_in_norm(a: &Named, b: &Named, relative: f64, what: &str) {
    let names = |named: &Named| named.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "{what}");
    let norm =
        |t: &Tensor| t.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]).sqrt();
    let global = b.iter().map(|(_, t)| norm(t).powi(2)).sum::<f64>().sqrt();
    for ((name, x), (_, y)) in a.iter().zip(b) {
        let (error, scale) = (norm(&(x - y)), norm(y).max(1e-3 * global));
        assert!(error <= relative * scale, "{what}: {name} differs by {:e}", error / scale);
    }
}

fn matrix(kind: Kind, tolerance: f64, compare: Compare) {
    for (tied, skip) in [(false, false), (true, false), (false, true), (true, true)] {
        let features = Features { tied, skip, ..Features::plain() };
        // Even; ragged; fewer samples than micro-batches; one sample, with M = 4 and with M = 1.
        for (samples, micro_batches) in [(8, 4), (7, 3), (3, 4), (1, 4), (1, 1)] {
            let data = batch(samples, samples as u64);
            let mut expected = None;
            for (stages, remat) in [(1, Remat::Never), (3, Remat::Always)] {
                for schedule in Schedule::SEARCHED_EXACTLY {
                    let run = Run { stages, schedule, remat, balance: Balance::Uniform };
                    let what = format!("{run:?} {features:?} N={samples} M={micro_batches}");
                    let builder = run.builder(model(features), micro_batches).kind(kind);
                    let mut pipeline = builder.build().unwrap();
                    let (loss, grads) = expected.get_or_insert_with(|| {
                        let parameters = pipeline.parameters().unwrap();
                        Plain::new(parameters, features).backward(&data)
                    });
                    let report = pipeline.train_step(&data.0, &data.1).unwrap();
                    let error = (report.loss - *loss).abs();
                    assert!(error <= tolerance * loss.abs(), "loss differs by {error:e}: {what}");
                    compare(&pipeline.gradients().unwrap(), grads, tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn oracle_unpipelined_pass_in_float32() {
    matrix(Kind::Float, 1e-5, assert_close_in_norm);
}

#[test]
fn oracle_unpipelined_pass_in_float64() {
    matrix(Kind::Double, 1e-10, assert_close);
}

#[test]
fn oracle_loss_is_the_sum_over_the_count_of_the_whole_batch() {
    let features = Features { tied: true, ..Features::plain() };
    let (inputs, targets) = batch(7, 5);
    // The first of 3 micro-batches has 5 + 5 + 5 targets, 13 of them ignored; the others have 10
    // and 8.
    let _ = targets.narrow(0, 0, 2).fill_(-100);
    let _ = targets.narrow(0, 2, 1).narrow(1, 0, 3).fill_(-100);
    let _ = targets.narrow(0, 6, 1).narrow(1, 2, 2).fill_(-100);
    for schedule in Schedule::SEARCHED_EXACTLY {
        let run = Run { stages: 3, schedule, ..Run::plain() };
        let builder = run.builder(model(features), 3).kind(Kind::Double);
        let mut pipeline = builder.build().unwrap();
        let plain = Plain::new(pipeline.parameters().unwrap(), features);
        let part = |first, count| {
            let cut = |t: &Tensor| t.narrow(0, first, count);
            let (sum, count) = plain.sum_and_count(&cut(&inputs), &cut(&targets));
            (sum.double_value(&[]), count)
        };
        let (sum, count) = part(0, 7);
        assert_eq!(count, 20.0);
        let means = [part(0, 3), part(3, 2), part(5, 2)].map(|(sum, count)| sum / count);
        let mean_of_means = means.iter().sum::<f64>() / 3.0;
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        assert_eq!(report.count, count);
        // 35 float64 terms, each good to a few 2^-53, sum to far less than 1e-12 of the loss.
        assert!((report.loss - sum / count).abs() <= 1e-12 * sum / count, "{}", report.loss);
        assert!((report.loss - mean_of_means).abs() > 1e-3, "the batch tells nothing apart");
    }
}

/// A plain update rule: (w, g, two state tensors, update number from 1) -> new w.
type Rule<'a> = &'a dyn Fn(&Tensor, &Tensor, &mut [Tensor; 2], i32) -> Tensor;

/// Runs four steps of `optimizer` on the tied model at K = 3. After each, compares with `rule` in
/// float64, applied to the gradients that the pipeline reports.
fn follow(optimizer: impl Optimizer + Copy, rule: Rule) {
    let features = Features { tied: true, skip: true, dropout: 0.1, ..Features::plain() };
    // The promised tolerances. The rules are a dozen roundings per element and step, far below
    // these tolerances. A wrong constant is far above: a wrong lr, decay or beta changes an update
    // by more than 1e-3 relative.
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::Double, 1e-10)] {
        let run = Run { stages: 3, ..Run::plain() };
        let builder = run.builder(model(features), 3).kind(kind).optimizer(optimizer);
        let mut pipeline = builder.build().unwrap();
        let double = |t: &Tensor| t.to_kind(Kind::Double);
        let mut values: Vec<Tensor> =
            pipeline.parameters().unwrap().iter().map(|(_, t)| double(t)).collect();
        let mut states: Vec<[Tensor; 2]> =
            values.iter().map(|w| [w.zeros_like(), w.zeros_like()]).collect();
        for step in 1..=4 {
            let (inputs, targets) = batch(7, step as u64);
            pipeline.train_step(&inputs, &targets).unwrap();
            let found = pipeline.parameters().unwrap();
            let grads = pipeline.gradients().unwrap();
            let mut expected = Named::new();
            for (at, (name, grad)) in grads.iter().enumerate() {
                assert_eq!(*name, found[at].0, "every parameter has a gradient, a tied one once");
                values[at] = rule(&values[at], &double(grad), &mut states[at], step);
                expected.push((name.clone(), values[at].copy()));
            }
            assert_close(&found, &expected, tolerance, &format!("{kind:?} step {step}"));
        }
    }
}

#[test]
fn oracle_optimizer_sgd() {
    follow(Sgd::new(0.05), &|w, g, _, _| w - g * 0.05);
}

#[test]
fn oracle_optimizer_sgd_with_momentum_and_weight_decay() {
    let sgd = Sgd { lr: 0.05, momentum: 0.9, nesterov: false, weight_decay: 0.1 };
    follow(sgd, &|w, g, state, _| {
        state[0] = &state[0] * 0.9 + (g + w * 0.1);
        w - &state[0] * 0.05
    });
}

/// Kingma & Ba 2015, algorithm 1.
fn adam(g: &Tensor, state: &mut [Tensor; 2], step: i32) -> Tensor {
    state[0] = &state[0] * 0.8 + g * (1.0 - 0.8);
    state[1] = &state[1] * 0.95 + g * g * (1.0 - 0.95);
    let (m, v) = (&state[0] / (1.0 - 0.8_f64.powi(step)), &state[1] / (1.0 - 0.95_f64.powi(step)));
    m / (v.sqrt() + 1e-6)
}

const ADAM: Adam = Adam {
    lr: 0.01,
    beta1: 0.8,
    beta2: 0.95,
    eps: 1e-6,
    weight_decay: 0.1,
    decoupled: false,
    moments: Moments::Full,
};

#[test]
fn oracle_optimizer_adam() {
    follow(ADAM, &|w, g, state, step| w - adam(&(g + w * 0.1), state, step) * 0.01);
}

#[test]
fn oracle_optimizer_adamw() {
    // Loshchilov & Hutter 2019, algorithm 2, with lr in front of both terms as in PyTorch.
    let adamw = Adam { decoupled: true, ..ADAM };
    follow(adamw, &|w, g, state, step| w - w * (0.01 * 0.1) - adam(g, state, step) * 0.01);
}

/// Checks that clipping at `factor` times the norm scales every gradient by the same, correct
/// number.
fn clip(kind: Kind, tolerance: f64, stages: usize, tied: bool, factor: f64) {
    let features = Features { tied, skip: true, ..Features::plain() };
    let run = Run { stages, ..Run::plain() };
    let builder = || run.builder(model(features), 3).kind(kind).optimizer(Sgd::new(0.5));
    let (inputs, targets) = batch(7, 2);
    let double = |named: Named| -> Vec<Tensor> {
        named.iter().map(|(_, tensor)| tensor.to_kind(Kind::Double)).collect()
    };
    let mut unclipped = builder().build().unwrap();
    unclipped.train_step(&inputs, &targets).unwrap();
    let named = unclipped.gradients().unwrap();
    assert_eq!(named.iter().filter(|(name, _)| name == "head.weight").count(), usize::from(!tied));
    let grads = double(named);
    let squares = grads.iter().map(|grad| grad.square().sum(Kind::Double).double_value(&[]));
    let norm = squares.sum::<f64>().sqrt();
    let max = factor * norm;

    let mut pipeline = builder().clip_norm(max).build().unwrap();
    let names: Vec<String> = pipeline.parameters().unwrap().into_iter().map(|(n, _)| n).collect();
    let before = double(pipeline.parameters().unwrap());
    let report = pipeline.train_step(&inputs, &targets).unwrap();
    let what = format!("{kind:?} K={stages} tied={tied} bound={max}");
    assert!((report.grad_norm - norm).abs() <= tolerance * norm, "{what}: {}", report.grad_norm);
    let scale = if norm > max { max / (norm + 1e-6) } else { 1.0 };
    assert!((report.clip_scale - scale).abs() <= tolerance * scale, "{what}");
    assert_eq!(report.clip_scale < 1.0, factor < 1.0, "{what}");
    assert_same_bits(&pipeline.gradients().unwrap(), &unclipped.gradients().unwrap(), &what);
    let updated = before.iter().zip(&grads).map(|(w, g)| w - g * (0.5 * scale));
    let expected: Named = names.into_iter().zip(updated).collect();
    assert_close(&pipeline.parameters().unwrap(), &expected, tolerance, &what);
}

#[test]
fn oracle_clipping_by_the_global_norm() {
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::Double, 1e-10)] {
        for stages in [1, 3] {
            for tied in [false, true] {
                for factor in [1e-3, 0.7, 1.3, 1e3] {
                    clip(kind, tolerance, stages, tied, factor);
                }
            }
        }
    }
}

/// y = x a b, where a and b are the same tied weight.
struct Square;

impl Layer for Square {
    fn kind(&self) -> &'static str {
        "square"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let weight = |name| ParameterSpec::new(name, [3], Init::Uniform { bound: 1.0 });
        ["a", "b"].map(|name| weight(name).tied(Some("both"))).into()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_mul(ctx.parameter(0)?)?.f_mul(ctx.parameter(1)?)?])
    }
}

#[test]
fn oracle_optimizer_two_tied_parameters_of_one_layer_stay_one_weight() {
    let model = Sequence::new().push("square", Square);
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([4, 3], Kind::Double))
        .kind(Kind::Double)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()
        .unwrap();
    let (x, y) = (uniform(&[4, 3], 1, Kind::Double), uniform(&[4, 3], 2, Kind::Double));
    let named = pipeline.parameters().unwrap();
    assert_eq!(named.len(), 1, "a tied weight is there once");
    pipeline.train_step(&x, &y).unwrap();
    // d/dw of mean((x w w - y)^2) = sum over samples of 2 (x w w - y) 2 x w / 12.
    let w = &named[0].1;
    let errors = &x * w * w - &y;
    let sum = (errors * &x * w * 4.0 / 12.0).sum_dim_intlist(0_i64, false, None::<Kind>);
    let updated = w - sum * 0.1;
    let expected = vec![("output".to_owned(), &x * &updated * &updated)];
    let outputs = vec![("output".to_owned(), pipeline.predict(&x).unwrap().remove(0))];
    assert_close(&outputs, &expected, 1e-10, "after one step both uses see the new weight");
}

/// Bytes of one layer's output in the memory model, per micro-batch: 512 samples of 16 float32.
const A: u64 = 512 * 16 * 4;
const M: u64 = 8;

/// `layers` layers, alternately Linear(16, 16) and tanh, each with an output of A bytes. All
/// parameters together, with gradients and SGD's momentum, take less than A.
fn deep(stages: &[usize], schedule: Schedule, remat: Remat) -> PipelineBuilder {
    let model = (0..stages.iter().sum()).fold(Sequence::new(), |model, layer| {
        if layer % 2 == 0 {
            model.layer(Linear::new(16, 16))
        } else {
            model.layer(Activation::Tanh)
        }
    });
    Pipeline::builder(model, TensorSpec::new([512 * M as i64, 16], Kind::Float))
        .stages(stages.len())
        .balance(Balance::Layers(stages.to_vec()))
        .schedule(schedule)
        .remat(remat)
        .micro_batches(M as usize)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.01))
}

fn step(pipeline: &mut Pipeline) -> StepReport {
    let x = uniform(&[512 * M as i64, 16], 1, Kind::Float);
    pipeline.train_step(&x, &x).unwrap()
}

#[test]
fn oracle_memory_rematerialization_discards() {
    let stages = [9, 9];
    let peaks = |remat| {
        let mut pipeline = deep(&stages, Schedule::GPipe, remat).build().unwrap();
        step(&mut pipeline).devices.iter().map(|stage| stage.peak.0).collect::<Vec<_>>()
    };
    let (never, always) = (peaks(Remat::Never), peaks(Remat::Always));
    for stage in 0..2 {
        let layers = stages[stage] as u64;
        // After the last forward, the outputs of every layer and micro-batch are held.
        assert!(never[stage] >= M * layers * A, "stage {stage}: {never:?} of {A}");
        // Held: one boundary value per micro-batch, and one micro-batch's outputs. Temporarily
        // held, 8 A in all: gradients on their way (of a layer's input and output, 2 in the link, 1
        // at each end), a temporary of the layer or the loss, and the parameters with their
        // gradients.
        assert!(always[stage] <= (M + layers + 8) * A, "stage {stage}: {always:?} of {A}");
    }
}

#[test]
fn oracle_memory_segments_bound_a_deep_stage() {
    let (layers, segments) = (48, 6);
    let peak = |remat| {
        let builder = deep(&[1, layers as usize], Schedule::OneFOneB, remat);
        step(&mut builder.build().unwrap()).devices[1].peak.0
    };
    // The last stage of 1F1B holds one micro-batch. Without segments, all its layers' outputs are
    // held at once. With segments, the inputs of each segment and the outputs of one are held. In
    // both cases, 8 A are held temporarily, as above.
    let (whole, parts) = (peak(Remat::Always), peak(Remat::Segments(segments)));
    assert!(whole >= layers * A, "{whole} of {A}");
    let bound = (u64::from(segments) + layers / u64::from(segments) + 8) * A;
    assert!(parts <= bound, "{parts} of {A}");
}

#[test]
fn oracle_memory_a_step_leaves_parameters_and_state_alone() {
    // 9 Linear layers of 16 x 16 + 16 float32; SGD without momentum has no state.
    let parameters = 9 * (16 * 16 + 16) * 4;
    for remat in common::REMATS {
        for schedule in Schedule::SEARCHED_EXACTLY {
            let mut pipeline = deep(&[6, 6, 6], schedule.clone(), remat).build().unwrap();
            for _ in 0..3 {
                let live = step(&mut pipeline).devices.iter().map(|stage| stage.live).sum();
                let live: Bytes = live;
                assert_eq!(live, Bytes(parameters), "{remat} {schedule}");
            }
        }
    }
}

#[test]
fn oracle_recompute_happens_where_the_policy_says() {
    let recomputes = |remat, schedule| -> Vec<Nanos> {
        let mut pipeline = deep(&[3, 3, 3], schedule, remat).build().unwrap();
        step(&mut pipeline).devices.iter().map(|stage| stage.recompute).collect()
    };
    for schedule in Schedule::SEARCHED_EXACTLY {
        assert_eq!(recomputes(Remat::Never, schedule.clone()), [Nanos(0); 3]);
        let always = recomputes(Remat::Always, schedule.clone());
        assert!(always.iter().all(|time| *time > Nanos(0)), "{schedule}: {always:?}");
    }
    // In 1F1B only the last stage's backwards directly follow their forwards.
    let found = recomputes(Remat::UnlessAdjacent, Schedule::OneFOneB);
    assert!(found[0] > Nanos(0) && found[1] > Nanos(0), "{found:?}");
    assert_eq!(found[2], Nanos(0));
}
