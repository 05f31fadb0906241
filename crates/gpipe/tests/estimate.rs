//! Estimates from shapes alone: simple cases worked out by hand, and what cannot be estimated.
//! `models/tests/estimates.rs` compares estimates with real stages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{FEATURES, Features, LENGTH, VOCABULARY, model};
use gpipe::{
    Adam, CrossEntropy, Error, Forward, Infer, Init, Kernels, Layer, LayerError, Loss,
    MeanSquaredError, Nanos, ParameterSpec, Sequence, Sgd, TensorSpec,
    estimate::{Rate, Tape, Training, Var, estimate},
    layers::{Activation, Linear},
};
use gpipe_core::cost::ModelCosts;
use tch::{Kind, Tensor};

const RATE: Rate = Rate { flops_per_s: 1e9, bytes_per_s: 1e9, latency: Nanos(100) };

fn training<'a>(losses: &'a [&'a dyn Loss], optimizer: &'a Adam) -> Training<'a> {
    Training {
        kind: Kind::Float,
        kernels: Kernels::Aten,
        losses,
        optimizer,
        average: false,
        loss_rows: None,
    }
}

fn of_model(model: &Sequence, sizes: &[usize]) -> ModelCosts {
    let one = [TensorSpec::new([1, LENGTH], Kind::Int64)];
    let (loss, optimizer) = (CrossEntropy::default(), Adam::default());
    estimate(model, &one, &training(&[&loss], &optimizer), sizes, &RATE).unwrap()
}

fn of_floats(model: &Sequence, features: i64) -> ModelCosts {
    let one = [TensorSpec::new([1, features], Kind::Float)];
    let (loss, optimizer) = (MeanSquaredError, Sgd::new(0.1));
    let (kind, kernels) = (Kind::Float, Kernels::Aten);
    let training = Training {
        kind,
        kernels,
        losses: &[&loss],
        optimizer: &optimizer,
        average: true,
        loss_rows: None,
    };
    estimate(model, &one, &training, &[10], &RATE).unwrap()
}

/// y = x + gelu(x W). Without `told`, it does not record itself.
struct Residual {
    told: bool,
}

impl Layer for Residual {
    fn kind(&self) -> &'static str {
        "residual"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("weight", [8, 8], Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, _: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Err(LayerError::Value("an estimate runs nothing".into()))
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        if !self.told {
            return None;
        }
        let x = *inputs.first()?;
        let h = tape.linear(x, 0, None);
        let active = tape.elementwise(h);
        let sum = tape.add(x, active);
        Some(vec![sum])
    }
}

#[test]
fn oracle_a_residual_by_hand() {
    let model = Sequence::new().layer(Linear::new(8, 8)).layer(Residual { told: true });
    let costs = of_floats(&model, 8);
    let (x, w) = (10 * 8 * 4, 8 * 8 * 4);
    let cost = costs.sizes[&10][1];
    // Kept are h, which gelu saves, and the sum. A variable holds gelu's output only temporarily.
    assert_eq!((cost.kept.0, cost.forward_peak.0), (2 * x, 3 * x));
    assert_eq!((cost.inputs.0, cost.input_gradients.0), (x, x));
    // h's gradient replaces h, which is freed. Then the gradients of x and of the weight are
    // allocated, and h's is freed. x's second gradient is the output's gradient itself, so their
    // sum is a new tensor.
    assert_eq!(cost.backward_peak.0, x + w);
    // The first accumulation copies a transposed gradient after everything else is freed.
    assert_eq!(cost.first_backward_peak.0, (x + w).max(2 * w));
    // The first layer has no input gradient.
    assert_eq!(costs.sizes[&10][0].input_gradients.0, 0);
    assert_eq!(costs.trained_before, [false, true, true]);
}

#[test]
fn oracle_a_layer_that_tells_nothing_counts_its_outputs() {
    let model = Sequence::new().layer(Linear::new(8, 8)).layer(Residual { told: false });
    let costs = of_floats(&model, 8);
    let (x, w) = (10 * 8 * 4, 8 * 8 * 4);
    let cost = costs.sizes[&10][1];
    assert_eq!((cost.kept.0, cost.forward_peak.0, cost.backward_peak.0), (x, x, x + w));
    let state = &costs.layers[1];
    assert_eq!((state.parameters.0, state.gradients.0), (w, w));
    // Plain SGD keeps nothing; the average is the parameter's size.
    assert_eq!(state.optimizer.0, w);
}

#[test]
fn oracle_times_are_the_rooflines() {
    let model = Sequence::new().layer(Linear { bias: false, ..Linear::new(500, 400) });
    let model = model.layer(Activation::Relu);
    let costs = of_floats(&model, 500);
    let [linear, relu, _] = costs.sizes[&10][..] else { panic!("a layer and a loss") };
    // 2 x 10 x 500 x 400 operations at 1 per ns; the weight's 800 kB are read in less.
    assert_eq!(linear.forward, Nanos(4_000_000 + 100));
    // One product for the weight, and none for an input that needs no gradient.
    assert_eq!(linear.backward, Nanos(4_000_000 + 100));
    // 16 kB in, 16 kB out.
    assert_eq!(relu.forward, Nanos(32_000 + 100));
    assert_eq!(relu.backward, Nanos(64_000 + 100));
}

#[test]
fn property_bytes_grow_with_samples_and_parameters_do_not() {
    let features =
        Features { tied: true, skip: true, dropout: 0.1, batch_norm: true, ..Features::plain() };
    let model = model(features);
    let costs = of_model(&model, &[1, 2, 8]);
    costs.check().unwrap();
    let of = |samples: usize| &costs.sizes[&samples];
    for ((one, two), eight) in of(1).iter().zip(of(2)).zip(of(8)) {
        assert!(one.kept <= two.kept && two.kept <= eight.kept);
        // Statistics of batch norms do not grow with the number of samples.
        assert!(eight.kept.0 <= 8 * one.kept.0 && eight.inputs.0 == 8 * one.inputs.0);
        assert!(
            eight.forward_peak >= eight.kept && eight.backward_peak <= eight.first_backward_peak
        );
    }
    let [tie] = &costs.ties[..] else { panic!("one tied weight") };
    assert_eq!(tie.parameters.0, (VOCABULARY * FEATURES * 4) as u64);
    assert_eq!(tie.optimizer.0, 2 * tie.parameters.0);
    let skips: Vec<_> = costs.skips.iter().map(|skip| (skip.stash, skip.pop)).collect();
    assert_eq!(skips.len(), 2);
    assert!(costs.skips.iter().all(|skip| skip.bytes.0 == (LENGTH * FEATURES * 4) as u64));
    assert!(costs.skips.iter().all(|skip| skip.gradient >= skip.bytes));
    let norm = costs.layers.iter().find(|layer| layer.name == "0.norm").unwrap();
    assert_eq!(norm.statistics.0, (2 * LENGTH * 4) as u64);
}

#[test]
fn property_what_is_frozen_has_no_gradient_and_keeps_nothing() {
    let all = of_model(&model(Features::plain()), &[2]);
    let frozen = of_model(&model(Features::plain()).freeze_except(["head*"]), &[2]);
    let last = all.layers.len() - 1;
    for (layer, state) in frozen.layers.iter().enumerate() {
        assert_eq!(state.parameters, all.layers[layer].parameters);
        let (state, cost) = (state, frozen.sizes[&2][layer]);
        if layer < last {
            assert_eq!((state.gradients.0, state.optimizer.0), (0, 0), "{}", state.name);
            // A frozen layer keeps only its output.
            assert_eq!(cost.kept, frozen.sizes[&2][layer + 1].inputs, "{}", state.name);
        } else {
            assert_eq!(state.gradients, all.layers[layer].gradients);
            assert_eq!(cost.input_gradients.0, 0);
        }
    }
}

#[test]
fn fault_what_cannot_be_estimated_says_why() {
    let (loss, optimizer) = (CrossEntropy::default(), Adam::default());
    let losses: [&dyn Loss; 1] = [&loss];
    let fine = training(&losses, &optimizer);
    let model = Sequence::new().push("first", Linear::new(8, 8));
    let floats = |features: i64| [TensorSpec::new([1, features], Kind::Float)];
    let told = |model: &Sequence, features, training, sizes: &[usize], rate| -> String {
        estimate(model, &floats(features), &training, sizes, &rate).unwrap_err().to_string()
    };
    assert!(told(&model, 9, fine, &[1], RATE).contains("first"));
    assert!(told(&model, 8, fine, &[], RATE).contains("at least 1 sample"));
    assert!(told(&model, 8, fine, &[0], RATE).contains("at least 1 sample"));
    assert!(told(&Sequence::new(), 8, fine, &[1], RATE).contains("needs a layer"));
    let integers = Training { kind: Kind::Int64, ..fine };
    assert!(told(&model, 8, integers, &[1], RATE).contains("Int64"));
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let slow = Rate { flops_per_s: bad, ..RATE };
        assert!(told(&model, 8, fine, &[1], slow).contains("flops_per_s"));
        let narrow = Rate { bytes_per_s: bad, ..RATE };
        assert!(told(&model, 8, fine, &[1], narrow).contains("bytes_per_s"));
    }
    // Sizes that no memory could hold must not overflow.
    let huge = Sequence::new().layer(Linear::new(1 << 40, 1 << 40));
    let one = floats(1 << 40);
    let found: Result<ModelCosts, Error> = estimate(&huge, &one, &fine, &[usize::MAX], &RATE);
    assert!(found.unwrap().check().is_ok());
}
