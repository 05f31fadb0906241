//! A pipeline inside a program that owns its parameters, its updates and its Ctrl-C, as the Python
//! package does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::common::{
    Features, LENGTH, Run, VOCABULARY, assert_close, assert_same_bits, batch, bits, is_about_cpus,
    model,
};
use gpipe::{
    CrossEntropy, Forward, Infer, Init, Interrupt, Layer, LayerError, LayerEvent, Observer,
    ParameterSpec, Pass, Pipeline, Schedule, Sequence, Sgd, TensorSpec, When,
};
use tch::{Device, Kind, Tensor};

const LR: f64 = 0.1;

/// Random operators of libtorch, and dropout of a part that draws apart from the rest.
struct Noise;

impl Layer for Noise {
    fn kind(&self) -> &'static str {
        "noise"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = inputs[0].f_dropout(0.2, true)?;
        let x = x.f_mul(&x.f_rand_like()?.f_add_scalar(0.5)?)?;
        let mut apart = ctx.random().fork();
        let x = apart.dropout(&x, 0.1)?;
        let _scope = apart.enter()?;
        Ok(vec![x.f_add(&x.f_randn_like()?.f_mul_scalar(0.01)?)?])
    }
}

fn noisy() -> gpipe::Sequence {
    model(Features { dropout: 0.1, ..Features::plain() }).push("noise", Noise)
}

#[test]
fn transparency_of_random_operators_in_layers() {
    let trained = |run: &Run| {
        let mut pipeline = run.builder(noisy(), 3).build().unwrap();
        let losses: Vec<u64> = (0..2)
            .map(|seed| {
                let (x, y) = batch(7, seed);
                pipeline.train_step(&x, &y).unwrap().loss.to_bits()
            })
            .collect();
        (losses, pipeline.parameters().unwrap())
    };
    let (losses, parameters) = trained(&Run::plain());
    assert_ne!(losses[0], losses[1]);
    let layers = noisy().len();
    for run in Run::all(layers).iter().filter(|run| run.stages != 1) {
        let (own, values) = trained(run);
        assert_eq!(own, losses, "{run:?}");
        assert_same_bits(&values, &parameters, &format!("{run:?}"));
    }
}

#[test]
fn oracle_parameters_are_read_by_pattern() {
    let features = Features { tied: true, batch_norm: true, ..Features::plain() };
    let run = Run { stages: 3, ..Run::plain() };
    let mut pipeline = run.builder(model(features), 3).build().unwrap();
    let all = pipeline.parameters().unwrap();
    for end in ["", "weight", "running_mean", "num_batches_tracked", "nothing"] {
        let expected: Vec<_> = all
            .iter()
            .filter(|(name, _)| name.ends_with(end))
            .map(|(name, value)| (name.clone(), value.shallow_clone()))
            .collect();
        let found = pipeline.parameters_matching(&format!("*{end}")).unwrap();
        assert_same_bits(&found, &expected, end);
    }
}

/// The caller's tensors for the parameters of a pipeline.
fn own_values(run: &Run, features: Features) -> Vec<(String, Tensor)> {
    let mut pipeline = run.builder(model(features), 3).build().unwrap();
    pipeline.parameters().unwrap()
}

#[test]
fn transparency_of_parameters_that_the_caller_owns() {
    let why = "stages on a GPU have parameters of their own";
    if is_about_cpus("transparency_of_parameters_that_the_caller_owns", why) {
        return;
    }
    let features = Features { tied: true, batch_norm: true, ..Features::plain() };
    let plain = Run::plain();
    let mut reference = plain.builder(model(features), 3).build().unwrap();
    let step = |pipeline: &mut gpipe::Pipeline, seed| {
        let (x, y) = batch(7, seed);
        pipeline.train_step(&x, &y).unwrap().loss.to_bits()
    };
    let losses: Vec<u64> = (0..3).map(|seed| step(&mut reference, seed)).collect();
    let trained = reference.parameters().unwrap();
    for run in Run::all(model(features).len()).into_iter().step_by(3) {
        let values = own_values(&plain, features);
        let mut pipeline = run.builder(model(features), 3).given_parameters().build().unwrap();
        pipeline.share_parameters(&values).unwrap();
        let own: Vec<u64> = (0..3).map(|seed| step(&mut pipeline, seed)).collect();
        assert_eq!(own, losses, "{run:?}");
        let pairs = values.iter().map(|(name, own)| (name.clone(), own.detach()));
        assert_same_bits(&pairs.collect(), &trained, &format!("{run:?}"));
        // What the caller writes, the next step sees.
        for (_, value) in &values {
            let _no_grad = tch::no_grad_guard();
            let _ = value.shallow_clone().zero_();
        }
        pipeline.refresh_parameters().unwrap();
        let zeros = pipeline.parameters().unwrap();
        assert!(zeros.iter().all(|(_, own)| own.abs().sum(Kind::Double).double_value(&[]) == 0.0));
    }
}

/// Parameters without initial values that are given one by one were counted as nobody's memory: a
/// stage held less than was predicted, and could exceed its cap unnoticed. And the two uses of a
/// tied weight on one stage got memory of their own, so that updates reached only one of them.
#[test]
fn regression_given_parameters_are_memory_of_their_stage() {
    let why = "on a GPU, parameters have memory before they have values";
    if is_about_cpus("regression_given_parameters_are_memory_of_their_stage", why) {
        return;
    }
    for stages in [1, 2, 3] {
        for kind in [Kind::Float, Kind::BFloat16] {
            given_one_by_one(stages, kind);
        }
    }
}

fn given_one_by_one(stages: usize, kind: Kind) {
    // Across stages, a tied gradient may still be on its way when a stage looks at its memory.
    let features = Features { tied: stages == 1, ..Features::plain() };
    let run = Run { stages, ..Run::plain() };
    let builder = || run.builder(model(features), 3).kind(kind);
    let mut usual = builder().build().unwrap();
    let values = usual.parameters().unwrap();
    let mut given = builder().given_parameters().build().unwrap();
    for value in values {
        given.set_parameters(&[value]).unwrap();
    }
    let held = |pipeline: &mut gpipe::Pipeline| {
        let (x, y) = batch(7, 1);
        let first = pipeline.train_step(&x, &y).unwrap().loss.to_bits();
        let report = pipeline.train_step(&x, &y).unwrap();
        (first, report.devices.iter().map(|device| device.live).collect::<Vec<_>>())
    };
    assert_eq!(held(&mut given), held(&mut usual), "{stages} stages, {kind:?}");
    let what = format!("{stages} stages, {kind:?}");
    assert_same_bits(&given.parameters().unwrap(), &usual.parameters().unwrap(), &what);
}

/// A parameter whose last axis has one element, such as the kernel of a pointwise convolution, was
/// not seen to be without memory, and could not be set.
#[test]
fn regression_given_parameters_may_end_with_an_axis_of_one() {
    for shape in [&[4, 1][..], &[1, 4], &[4, 3, 1, 1], &[1], &[1, 1], &[3]] {
        let model = Sequence::new().push("shaped", Shaped(shape.to_vec()));
        let input = TensorSpec::new([2, 1], Kind::Float);
        let mut pipeline = Pipeline::builder(model, input).given_parameters().build().unwrap();
        let count: i64 = shape.iter().product();
        let value = Tensor::arange(count, (Kind::Float, Device::Cpu)).reshape(shape);
        pipeline.set_parameters(&[("shaped.w".to_owned(), value.shallow_clone())]).unwrap();
        assert_eq!(pipeline.parameters().unwrap()[0].1, value, "{shape:?}");
        let sums = pipeline.predict(Tensor::zeros([2, 1], (Kind::Float, Device::Cpu))).unwrap();
        assert_eq!(sums[0].double_value(&[0, 0]), (count * (count - 1) / 2) as f64, "{shape:?}");
    }
}

/// Adds the sum of a parameter of this shape.
struct Shaped(Vec<i64>);

impl Layer for Shaped {
    fn kind(&self) -> &'static str {
        "shaped"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("w", &self.0[..], Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let w = ctx.parameter(0)?;
        Ok(vec![inputs[0].f_add(&w.f_sum(w.kind())?)?])
    }
}

#[test]
fn oracle_the_callers_own_updates_equal_the_pipelines() {
    let why = "stages on a GPU have parameters of their own";
    if is_about_cpus("oracle_the_callers_own_updates_equal_the_pipelines", why) {
        return;
    }
    let features = Features { batch_norm: true, ..Features::plain() };
    let run = Run { stages: 3, schedule: Schedule::OneFOneB, ..Run::plain() };
    let builder = |run: &Run| run.builder(model(features), 3).optimizer(Sgd::new(LR));
    let mut engine = builder(&run).build().unwrap();
    let mut own = builder(&run).build().unwrap();
    let values = own.parameters().unwrap();
    own.share_parameters(&values).unwrap();
    for seed in 0..3 {
        let (x, y) = batch(7, seed);
        let report = engine.train_step(&x, &y).unwrap();
        let found = own.accumulate(&x, &y, gpipe::Count::Total(own.count_of(&y).unwrap())).unwrap();
        let gradients = own.take_gradients().unwrap();
        if seed == 0 {
            // Later ones come from values that differ in their rounding.
            assert_eq!(found.loss.to_bits(), report.loss.to_bits());
            assert_same_bits(&gradients, &engine.gradients().unwrap(), "gradients");
        }
        let _no_grad = tch::no_grad_guard();
        for (name, gradient) in &gradients {
            let (_, value) = values.iter().find(|(own, _)| own == name).unwrap();
            let _ = value.shallow_clone().f_sub_(&(gradient * LR)).unwrap();
        }
        // Running statistics are applied when gradients are taken.
        assert_close(&own.parameters().unwrap(), &engine.parameters().unwrap(), 1e-6, "values");
    }
    assert_eq!(own.steps(), 0, "the caller's updates are not the pipeline's");
}

#[test]
fn property_statistics_of_a_forward_are_applied_once() {
    let features = Features { batch_norm: true, ..Features::plain() };
    let run = Run { stages: 2, ..Run::plain() };
    let build = || run.builder(model(features), 3).optimizer(Sgd::new(0.0)).build().unwrap();
    let (mut now, mut late) = (build(), build());
    let (x, y) = batch(7, 0);
    late.train_step(&x, &y).unwrap();
    let outputs = now.forward(&x).unwrap();
    now.apply_statistics(&outputs).unwrap();
    let applied = now.parameters().unwrap();
    assert_same_bits(&applied, &late.parameters().unwrap(), "statistics");
    let gradients: Vec<Option<Tensor>> =
        outputs.tensors().iter().map(|own| Some(own.ones_like())).collect();
    now.backward(&outputs, gradients).unwrap();
    now.take_gradients().unwrap();
    assert_same_bits(&now.parameters().unwrap(), &applied, "after the backward");
}

#[test]
fn property_open_forwards_outlive_taken_gradients() {
    let run = Run { stages: 2, ..Run::plain() };
    let mut pipeline = run.builder(model(Features::plain()), 2).build().unwrap();
    let ((x, _), (z, _)) = (batch(4, 0), batch(4, 1));
    let back = |pipeline: &mut gpipe::Pipeline, outputs: &gpipe::Outputs| {
        let ones: Vec<Option<Tensor>> =
            outputs.tensors().iter().map(|own| Some(own.ones_like())).collect();
        pipeline.backward(outputs, ones).unwrap();
        pipeline.take_gradients().unwrap()
    };
    let (first, second) = (pipeline.forward(&x).unwrap(), pipeline.forward(&z).unwrap());
    let of_first = back(&mut pipeline, &first);
    let of_second = back(&mut pipeline, &second);
    let alone = pipeline.forward(&z).unwrap();
    assert_same_bits(&back(&mut pipeline, &alone), &of_second, "the second forward");
    assert!(bits(&of_first[0].1) != bits(&of_second[0].1));
    assert!(pipeline.take_gradients().is_err(), "they have been taken");
}

/// Sets the interrupt at the `at`-th layer of a step.
struct PressesCtrlC {
    interrupt: Interrupt,
    layers: Arc<AtomicUsize>,
    at: usize,
}

impl Observer for PressesCtrlC {
    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        if event.when != When::Before {
            return Ok(());
        }
        assert!(matches!(event.pass, Pass::Forward | Pass::Recompute | Pass::Backward));
        if self.layers.fetch_add(1, Ordering::SeqCst) == self.at {
            self.interrupt.set();
        }
        Ok(())
    }
}

#[test]
fn fault_an_interrupted_step_changes_nothing() {
    let run = Run { stages: 2, schedule: Schedule::OneFOneB, ..Run::plain() };
    let (x, y) = batch(7, 0);
    for at in [0, 5, 20, 35] {
        let (interrupt, layers) = (Interrupt::default(), Arc::new(AtomicUsize::new(0)));
        let observer =
            PressesCtrlC { interrupt: interrupt.clone(), layers: Arc::clone(&layers), at };
        let builder = run.builder(model(Features::plain()), 3);
        let mut pipeline = builder.interrupt(&interrupt).observer(observer).build().unwrap();
        let before = pipeline.parameters().unwrap();
        let error = pipeline.train_step(&x, &y).unwrap_err();
        assert!(error.is_interrupted(), "{error}");
        assert!(error.to_string().contains("interrupted"), "{error}");
        let seen = layers.load(Ordering::SeqCst);
        assert!(seen <= at + 1 + run.stages, "{seen} layers began, {at} before the interrupt");
        assert_same_bits(&pipeline.parameters().unwrap(), &before, "parameters");
        assert!(pipeline.evaluate(&x, &y).is_err(), "until it is cleared");
        interrupt.clear();
        assert_eq!(pipeline.train_step(&x, &y).unwrap().step, 1);
    }
}

#[test]
fn fault_tensors_that_cannot_be_shared_are_refused() {
    let run = Run { stages: 2, ..Run::plain() };
    let mut pipeline = run.builder(model(Features::plain()), 2).build().unwrap();
    let values = pipeline.parameters().unwrap();
    let (name, value) = values.iter().find(|(_, own)| own.dim() == 2).unwrap();
    let refused = |pipeline: &mut gpipe::Pipeline, value: Tensor| {
        pipeline.share_parameters(&[(name.clone(), value)]).unwrap_err().to_string()
    };
    let turned = value.transpose(0, 1).contiguous().transpose(0, 1);
    assert!(refused(&mut pipeline, turned).contains("not contiguous"));
    assert!(refused(&mut pipeline, value.to_kind(Kind::Double)).contains("float64"));
    assert!(refused(&mut pipeline, value.narrow(0, 0, 1)).contains("the value for it"));
    let (x, y) = batch(4, 0);
    pipeline.train_step(&x, &y).unwrap();
}

#[test]
fn oracle_accumulating_needs_no_optimizer() {
    let builder = gpipe::Pipeline::builder(
        model(Features::plain()),
        TensorSpec::new([4, LENGTH], Kind::Int64),
    );
    let mut pipeline = builder.stages(2).loss(CrossEntropy::default()).build().unwrap();
    let (x, y) = batch(4, 0);
    let found = pipeline.accumulate(&x, &y, gpipe::Count::Unknown).unwrap();
    assert!((found.loss - (VOCABULARY as f64).ln()).abs() < 1.0, "{}", found.loss);
    assert!(!pipeline.take_gradients().unwrap().is_empty());
    assert!(pipeline.train_step(&x, &y).is_err());
}

/// The tensors that were shared first were copied over those that were shared later.
#[test]
fn regression_tied_weights_may_be_shared_again() {
    let why = "stages on a GPU have parameters of their own";
    if is_about_cpus("regression_tied_weights_may_be_shared_again", why) {
        return;
    }
    let features = Features { tied: true, ..Features::plain() };
    let run = Run { stages: 3, ..Run::plain() };
    let mut pipeline = run.builder(model(features), 3).given_parameters().build().unwrap();
    let first = own_values(&run, features);
    let second: Vec<_> = first.iter().map(|(name, own)| (name.clone(), own.copy())).collect();
    pipeline.share_parameters(&first).unwrap();
    pipeline.share_parameters(&second).unwrap();
    for (_, value) in &second {
        let _no_grad = tch::no_grad_guard();
        let _ = value.shallow_clone().fill_(0.25);
    }
    pipeline.refresh_parameters().unwrap();
    for (name, own) in second.iter().chain(&pipeline.parameters().unwrap()) {
        assert_eq!(own.min().double_value(&[]), 0.25, "{name}");
        assert_eq!(own.max().double_value(&[]), 0.25, "{name}");
    }
}
