//! Tests of the image networks: their sizes match the literature, computed from shapes alone, and
//! they train with bit-identical results at every K.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::matrix::{Subject, images, one};
use gpipe::{
    CrossEntropy, Kernels, MeanSquaredError, Pipeline, PipelineBuilder, Sequence, Sgd, TensorSpec,
    TopK, WithAuxiliary,
};
use gpipe_models::{AmoebaNet, ResNet, UNet, Variant};
use tch::{Kind, Tensor};

fn millions(model: &Sequence) -> f64 {
    model.parameter_count() as f64 / 1e6
}

fn amoebanet(variant: Variant, cells: usize, filters: i64) -> Sequence {
    let (channels, classes, drop_path) = (3, 1000, 0.0);
    AmoebaNet { variant, cells, filters, channels, classes, drop_path, auxiliary: false }
        .build()
        .unwrap()
}

#[test]
fn oracle_parameter_counts_are_the_literatures() {
    let close = |found: f64, expected: f64, relative: f64| {
        assert!(
            (found / expected - 1.0).abs() <= relative,
            "{found} instead of {expected} million"
        );
    };
    // Kim et al. 2020, table 2, and GPipe's table 1.
    let table =
        [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1060.0), (72, 512, 1840.0)];
    for (cells, filters, expected) in table {
        close(millions(&amoebanet(Variant::D, cells, filters)), expected, 0.005);
    }
    close(millions(&amoebanet(Variant::B, 18, 512)), 557.0, 0.01);
    // Sizes from torchvision.
    close(millions(&ResNet::resnet50(1000).build().unwrap()), 25.557, 1e-4);
    close(millions(&ResNet::resnet101(1000).build().unwrap()), 44.549, 1e-4);
    close(millions(&UNet::new(6, 72).build().unwrap()), 362.2, 0.001);
}

fn small(variant: Variant) -> AmoebaNet {
    let (cells, filters, auxiliary) = (3, 8, false);
    AmoebaNet { variant, cells, filters, channels: 3, classes: 4, drop_path: 0.3, auxiliary }
}

#[test]
fn oracle_shapes_fit_the_papers_images() {
    // Only shapes are inferred. An error would name the layer.
    for (model, size) in
        [(amoebanet(Variant::D, 18, 208), 224), (amoebanet(Variant::B, 18, 512), 480)]
    {
        let images = TensorSpec::new([2, 3, size, size], Kind::Float);
        assert!(model.costs(&[images], Kind::Float).unwrap().iter().all(|&cost| cost > 1));
    }
    let images = TensorSpec::new([2, 3, 192, 192], Kind::Float);
    UNet::new(5, 64).build().unwrap().costs(&[images], Kind::Float).unwrap();
    let odd = TensorSpec::new([2, 3, 100, 100], Kind::Float);
    let error = UNet::new(5, 64).build().unwrap().costs(&[odd], Kind::Float).unwrap_err();
    assert!(error.to_string().contains("must divide by 2 at every level"), "{error}");
    // A norm of one pixel is 0: everything at the bottom would be 0, and learn nothing.
    let small = TensorSpec::new([2, 3, 32, 32], Kind::Float);
    let error = UNet::new(5, 64).build().unwrap().costs(&[small], Kind::Float).unwrap_err();
    assert!(error.to_string().contains("the norm of a single pixel is 0"), "{error}");
}

#[test]
fn fault_sizes_that_make_no_network() {
    let base = small(Variant::D);
    let refused = |model: AmoebaNet| model.build().err().unwrap().to_string();
    assert!(refused(AmoebaNet { cells: 4, ..base.clone() }).contains("multiple of 3"));
    assert!(refused(AmoebaNet { filters: 6, ..base.clone() }).contains("multiple of 4"));
    assert!(refused(AmoebaNet { classes: 0, ..base.clone() }).contains("classes is 0"));
    assert!(refused(AmoebaNet { drop_path: 1.0, ..base }).contains("drop_path is 1"));
    assert!(UNet::new(2, 7).build().is_err() && UNet::new(0, 8).build().is_err());
    assert!(ResNet { blocks: [1, 0, 1, 1], ..ResNet::resnet50(10) }.build().is_err());
}

/// Images and classes.
fn classified(samples: i64, seed: u64) -> (Tensor, Tensor) {
    let mut random = gpipe_core::splitmix::Stream::new(seed);
    let classes: Vec<i64> = (0..samples).map(|_| random.below(4) as i64).collect();
    (images(samples, 3, 32, seed), Tensor::from_slice(&classes))
}

/// The literature's recipe: SGD with momentum, the auxiliary loss and label smoothing.
fn recipe(builder: PipelineBuilder) -> PipelineBuilder {
    let loss = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
    builder
        .loss(WithAuxiliary { loss, weight: 0.4 })
        .metric(TopK::new(2))
        .training_metrics()
        .optimizer(Sgd { momentum: 0.9, weight_decay: 1e-4, ..Sgd::new(0.05) })
}

/// Compares every `nth` way to run.
fn matrix(name: &str, model: &dyn Fn() -> Sequence, kernels: Kernels, nth: usize) {
    let inputs = vec![TensorSpec::new([2, 3, 32, 32], Kind::Float)];
    let build: &dyn Fn(PipelineBuilder) -> PipelineBuilder =
        &|builder| recipe(builder).kernels(kernels);
    let (batch, what) = (&one(classified), name.to_owned());
    let subject = Subject { model, inputs, batch, build, may_skip: false, what };
    subject.every(nth, &[(vec![7, 6], 3)]);
}

#[test]
fn transparency_of_a_small_amoebanet_d() {
    let network = AmoebaNet { auxiliary: true, ..small(Variant::D) };
    matrix("AmoebaNet-D", &|| network.build().unwrap(), Kernels::OneDnn, 1);
}

/// Its layers are of AmoebaNet-D's kinds, so a part of the matrix is enough. `make soak` runs all.
/// (5 is coprime to the numbers of schedules and of policies, so each of them occurs.)
#[test]
fn transparency_of_a_small_amoebanet_b() {
    matrix("AmoebaNet-B", &|| small(Variant::B).build().unwrap(), Kernels::Aten, 5);
}

#[test]
fn transparency_of_a_small_resnet() {
    let resnet = ResNet { blocks: [1, 1, 1, 1], width: 4, channels: 3, classes: 4 };
    for kernels in [Kernels::OneDnn, Kernels::ChannelsLast] {
        matrix("ResNet", &|| resnet.build().unwrap(), kernels, 1);
    }
}

/// A U-Net whose long skips span every boundary between stages.
#[test]
fn transparency_of_a_small_unet() {
    let inputs = vec![TensorSpec::new([2, 3, 16, 16], Kind::Float)];
    let masks = |samples, seed| {
        let x = images(samples, 3, 16, seed);
        let mask = x.mean_dim(&[1_i64][..], true, None).gt(0.0).to_kind(Kind::Float);
        (x, mask)
    };
    Subject {
        model: &|| UNet { depth: 2, ..UNet::new(2, 4) }.build().unwrap(),
        inputs,
        batch: &one(masks),
        build: &|builder| {
            let builder = builder.loss(MeanSquaredError).optimizer(Sgd::new(0.05));
            builder.kernels(Kernels::OneDnn)
        },
        may_skip: false,
        what: "U-Net".to_owned(),
    }
    .matrix(&[(vec![7, 6], 3)]);
}

#[test]
fn oracle_the_auxiliary_loss_is_a_share_of_the_second_outputs() {
    let network = AmoebaNet { auxiliary: true, drop_path: 0.0, ..small(Variant::D) };
    let input = TensorSpec::new([5, 3, 32, 32], Kind::Float);
    let (x, y) = classified(5, 3);
    let loss = |weight: f64| {
        let loss = WithAuxiliary { loss: CrossEntropy::default(), weight };
        let mut pipeline = Pipeline::builder(network.build().unwrap(), input.clone())
            .stages(2)
            .loss(loss)
            .optimizer(Sgd::new(0.1))
            .build()
            .unwrap();
        let outputs = pipeline.predict(&x).unwrap();
        (pipeline.evaluate(&x, &y).unwrap().loss, outputs)
    };
    let (whole, outputs) = loss(0.4);
    let of = |logits: &Tensor| {
        let logits = logits.to_kind(Kind::Double);
        logits.cross_entropy_for_logits(&y).double_value(&[])
    };
    assert_eq!(outputs.len(), 2, "logits, and the auxiliary head's");
    let expected = of(&outputs[0]) + 0.4 * of(&outputs[1]);
    assert!((whole - expected).abs() < 1e-6 * expected, "{whole} {expected}");
    assert!((loss(0.0).0 - of(&outputs[0])).abs() < 1e-6 * expected);
}

#[test]
fn fault_a_weight_that_is_none() {
    let network = AmoebaNet { auxiliary: true, ..small(Variant::D) };
    for weight in [-0.1, f64::NAN, f64::INFINITY] {
        let builder = Pipeline::builder(
            network.build().unwrap(),
            TensorSpec::new([2, 3, 32, 32], Kind::Float),
        );
        let loss = WithAuxiliary { loss: CrossEntropy::default(), weight };
        let mut pipeline = builder.loss(loss).optimizer(Sgd::new(0.1)).build().unwrap();
        let (x, y) = classified(2, 3);
        let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
        assert!(error.contains("auxiliary loss"), "{error}");
    }
}

/// Gradients of one step with the given dtype and kernels.
fn gradients(model: &Sequence, seed: u64, kind: Kind, kernels: Kernels) -> Vec<(String, Tensor)> {
    let (x, y) = classified(10, seed);
    let mut pipeline = Pipeline::builder(model.clone(), TensorSpec::new([10, 3, 32, 32], kind))
        .kind(kind)
        .kernels(kernels)
        .seed(seed)
        .keep_gradients()
        .loss(CrossEntropy::default())
        .optimizer(Sgd::new(0.0))
        .build()
        .unwrap();
    pipeline.train_step(x.to_kind(kind), y).unwrap();
    pipeline.gradients().unwrap()
}

/// A value near 0 may pass a ReLU with one kernel and not with another, and one of two equal values
/// may be the maximum. This changes some gradients by percents in some of the draws. An incorrect
/// kernel differs in all of them.
#[test]
fn oracle_every_kernel_gives_the_gradients_of_float64() {
    let network = AmoebaNet { filters: 16, drop_path: 0.0, ..small(Variant::D) };
    let resnet = ResNet { blocks: [1, 1, 1, 1], width: 8, channels: 3, classes: 4 };
    for model in [network.build().unwrap(), resnet.build().unwrap()] {
        for kernels in [Kernels::Aten, Kernels::OneDnn] {
            let mut all: Vec<f64> = (0..9)
                .map(|seed| {
                    let exact = gradients(&model, seed, Kind::Double, Kernels::Aten);
                    let found = gradients(&model, seed, Kind::Float, kernels);
                    let norm = |tensors: &mut dyn Iterator<Item = Tensor>| {
                        tensors
                            .map(|t| t.square().sum(Kind::Double).double_value(&[]))
                            .sum::<f64>()
                            .sqrt()
                    };
                    let mut apart = exact.iter().zip(&found).map(|((_, a), (_, b))| a - b);
                    norm(&mut apart) / norm(&mut exact.iter().map(|(_, a)| a.shallow_clone()))
                })
                .collect();
            all.sort_by(f64::total_cmp);
            assert!(all[4] < 1e-4, "{kernels:?}: the middle one of {all:?}");
        }
    }
}
