//! The last layer and the losses on some rows at a time. `oracle_`: as on all rows;
//! `transparency_`: the same bits at every cut, schedule and policy; `fault_`: what cannot be
//! computed so.

use gpipe::{
    Accuracy, Adam, CrossEntropy, IntoTensors, LayerError, Loss, LossContext, MeanSquaredError,
    Pipeline, PipelineBuilder, Sequence, Sgd, TensorSpec, TopK,
    estimate::Rate,
    layers::{Head, Linear, TokenTable},
};
use gpipe_models::Llama;
use tch::{Kind, Tensor};

use crate::{
    common::{Run, assert_same_bits},
    llama::{LENGTH, after_two_steps, inputs, model, tokens},
    lora::transformer,
};

/// A table and a head whose logits are clipped.
fn clipped() -> Sequence {
    let (vocabulary, features, tie) = (31, 6, None);
    let table = TokenTable { vocabulary, features, std: 1.0, tie: tie.clone(), padding: None };
    let head = Head { features, vocabulary, std: 1.0, logit_clip: 1.5, tie };
    Sequence::new().push("table", table).push("head", head)
}

fn targets(samples: i64, seed: i64) -> Tensor {
    let all = tokens(samples, LENGTH, seed);
    all.masked_fill(&all.remainder(4).eq(0), -100)
}

/// The loss and metrics of a training step and of an evaluation, and the gradients.
fn measured(builder: PipelineBuilder, rows: Option<usize>) -> (Vec<f64>, Vec<(String, Tensor)>) {
    let builder = match rows {
        Some(rows) => builder.loss_rows(rows),
        None => builder,
    };
    let builder = builder.metric(Accuracy::default()).metric(TopK::new(3)).training_metrics();
    let mut pipeline = builder.keep_gradients().optimizer(Sgd::new(0.1)).build().unwrap();
    let mut numbers = Vec::new();
    let report = pipeline.train_step(tokens(7, LENGTH, 1), targets(7, 4)).unwrap();
    numbers.push(report.loss);
    numbers.extend(report.metrics.iter().map(|metric| metric.value()));
    let gradients = pipeline.gradients().unwrap();
    let evaluation = pipeline.evaluate(tokens(7, LENGTH, 2), targets(7, 3)).unwrap();
    numbers.push(evaluation.loss);
    numbers.extend(evaluation.metrics.iter().map(|metric| metric.value()));
    assert_eq!(numbers.len(), 6);
    (numbers, gradients)
}

#[test]
fn oracle_some_rows_at_a_time_are_as_all() {
    let untied = || Llama { tied: false, ..model() }.build().unwrap();
    let tied = || model().build().unwrap();
    let whole = || transformer(0.0).build().unwrap();
    let models: [&dyn Fn() -> Sequence; 4] = [&tied, &untied, &whole, &clipped];
    for (number, model) in models.into_iter().enumerate() {
        for (rows, micro_batches) in [(1, 1), (5, 1), (9, 3), (13, 2), (1000, 3)] {
            let label_smoothing = if rows == 5 { 0.1 } else { 0.0 };
            let builder = || {
                let builder = Pipeline::builder(model(), inputs()).kind(Kind::Double);
                let loss = CrossEntropy { label_smoothing, ..CrossEntropy::default() };
                builder.loss(loss).micro_batches(micro_batches).seed(3)
            };
            let (expected, all) = measured(builder(), None);
            let (found, own) = measured(builder(), Some(rows));
            for (a, b) in found.iter().zip(&expected) {
                assert!(
                    (a - b).abs() <= 1e-12 * b.abs(),
                    "{number} {rows}: {found:?} {expected:?}"
                );
            }
            assert_eq!(own.len(), all.len());
            for ((name, a), (_, b)) in own.iter().zip(&all) {
                let (apart, size) = ((a - b).abs().max(), b.abs().max().double_value(&[]));
                assert!(
                    apart.double_value(&[]) <= 1e-10 * size.max(1e-6),
                    "{number} {rows} {name}"
                );
            }
        }
    }
}

#[test]
fn transparency_of_rows() {
    let llama = || model().build().unwrap();
    let other = || transformer(0.1).build().unwrap();
    let models: [(&dyn Fn() -> Sequence, Kind); 3] =
        [(&llama, Kind::Float), (&llama, Kind::BFloat16), (&other, Kind::Float)];
    for (model, kind) in models {
        let trained = |run: &Run| {
            let builder = run.builder_of(model(), inputs(), 3).kind(kind).loss_rows(5);
            let builder = builder.optimizer(Adam::default()).clip_norm(1.0);
            let mut pipeline = builder.metric(Accuracy::default()).build().unwrap();
            let evaluation = pipeline.evaluate(tokens(5, LENGTH, 9), targets(5, 8)).unwrap();
            let mut all = vec![
                ("evaluation".to_owned(), Tensor::from(evaluation.loss)),
                ("accuracy".to_owned(), Tensor::from(evaluation.metrics[0].sum)),
            ];
            all.extend(after_two_steps(pipeline, |step| {
                (tokens(7, LENGTH, step).into_tensors(), targets(7, step + 5))
            }));
            all
        };
        let expected = trained(&Run::plain());
        for run in Run::all(model().len()).into_iter().step_by(3) {
            assert_same_bits(&trained(&run), &expected, &format!("{run:?} {kind:?}"));
        }
    }
}

/// Rows whose loss is a constant have no gradient. What had been in memory there went to the layer
/// before as their gradient.
#[test]
fn regression_rows_without_a_gradient_have_a_gradient_of_0() {
    /// Cross entropy, which is a constant where no target counts.
    struct OfTargets;
    impl Loss for OfTargets {
        fn check(
            &self,
            ctx: &LossContext<'_, TensorSpec>,
            outputs: &[TensorSpec],
            targets: &[TensorSpec],
        ) -> Result<(), LayerError> {
            CrossEntropy::default().check(ctx, outputs, targets)
        }
        fn sum(
            &self,
            ctx: &LossContext<'_>,
            outputs: &[Tensor],
            targets: &[Tensor],
        ) -> Result<Tensor, LayerError> {
            match targets[0].ge(0).any().int64_value(&[]) {
                0 => Ok(Tensor::zeros([], (outputs[0].kind(), outputs[0].device()))),
                _ => CrossEntropy::default().sum(ctx, outputs, targets),
            }
        }
        fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
            CrossEntropy::default().count(ctx, targets)
        }
        fn by_rows(&self) -> bool {
            true
        }
    }
    let gradients = |rows: Option<usize>| {
        let model =
            Sequence::new().push("first", Linear::new(3, 4)).push("last", Linear::new(4, 5));
        let builder = Pipeline::builder(model, TensorSpec::new([6, 3], Kind::Float)).seed(3);
        let builder = builder.loss(OfTargets).optimizer(Sgd::new(0.1)).keep_gradients();
        let builder = match rows {
            Some(rows) => builder.loss_rows(rows),
            None => builder,
        };
        let mut pipeline = builder.build().unwrap();
        let x = Tensor::arange(18, (Kind::Float, tch::Device::Cpu)).sin().reshape([6, 3]);
        // Memory with other numbers in it, for what is not written.
        drop(Tensor::full([6, 4], f64::NAN, (Kind::Float, tch::Device::Cpu)));
        pipeline.train_step(&x, Tensor::from_slice(&[-100_i64, -100, 1, 4, -100, -100])).unwrap();
        pipeline.gradients().unwrap()
    };
    for ((name, own), (_, whole)) in gradients(Some(2)).iter().zip(&gradients(None)) {
        let apart = (own - whole).abs().max().double_value(&[]);
        assert!(apart < 1e-6, "{name}: {apart}"); // roundings of sums in another order
    }
}

/// A loss that is not finite is found before anything is updated.
#[test]
fn fault_a_loss_that_is_not_finite_leaves_everything_as_it_was() {
    let model = Sequence::new().push("first", Linear::new(3, 4)).push("last", Linear::new(4, 5));
    let builder = Pipeline::builder(model, TensorSpec::new([4, 3], Kind::Float)).stages(2);
    let builder = builder.loss(CrossEntropy::default()).loss_rows(2).optimizer(Sgd::new(0.1));
    let mut pipeline = builder.micro_batches(2).build().unwrap();
    let bias = |value: f32| {
        let values = Tensor::from_slice(&[0.0, value, 0.0, 0.0, 0.0]);
        vec![("last.bias".to_owned(), values)]
    };
    pipeline.set_parameters(&bias(f32::INFINITY)).unwrap();
    let before = pipeline.parameters().unwrap();
    let x = Tensor::from_slice(&[1.0_f32; 12]).reshape([4, 3]);
    let targets = Tensor::from_slice(&[0_i64, 1, 2, 3]);
    let error = pipeline.train_step(&x, &targets).unwrap_err().to_string();
    assert!(error.contains("the loss (") && error.contains("micro-batch 0"), "{error}");
    assert_same_bits(&pipeline.parameters().unwrap(), &before, "after the failed step");
    pipeline.set_parameters(&bias(0.0)).unwrap();
    pipeline.train_step(&x, &targets).unwrap();
}

#[test]
fn fault_what_cannot_be_computed_by_rows_is_refused() {
    let linear = || Sequence::new().push("last", Linear::new(3, 3));
    let refused = |builder: PipelineBuilder, part: &str| {
        let error = builder.build().err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    let builder = || Pipeline::builder(linear(), TensorSpec::new([4, 3], Kind::Float)).loss_rows(2);
    refused(builder().loss(MeanSquaredError), "the loss 'loss'");
    let mut estimated = builder().loss(MeanSquaredError).optimizer(Sgd::new(0.1));
    let error = estimated.estimate(&[1], &Rate::default()).err().unwrap().to_string();
    assert!(error.contains("the loss 'loss'"), "{error}");
    refused(builder().loss(CrossEntropy::default()).loss_rows(0), "loss_rows is 0");
    let images = gpipe_models::ResNet { blocks: [1; 4], width: 4, channels: 3, classes: 5 };
    let spec = TensorSpec::new([2, 3, 32, 32], Kind::Float);
    let images = Pipeline::builder(images.build().unwrap(), spec).loss_rows(2);
    refused(images.loss(CrossEntropy::default()), "the last layer");
}
