//! The image networks: their sizes against the literature's, from shapes alone; and that they run, train and are the same
//! to the bit at every K.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe::{Balance, MeanSquaredError, Pipeline, Remat, Schedule, Sequence, Sgd, TensorSpec};
use gpipe_models::{AmoebaNet, ResNet, UNet, Variant};
use tch::{Kind, Tensor};

fn millions(model: &Sequence) -> f64 {
    model.parameter_count() as f64 / 1e6
}

fn amoebanet(variant: Variant, cells: usize, filters: i64) -> Sequence {
    let (channels, classes, drop_path) = (3, 1000, 0.0);
    AmoebaNet { variant, cells, filters, channels, classes, drop_path }.build().unwrap()
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
    // torchvision's.
    close(millions(&ResNet::resnet50(1000).build().unwrap()), 25.557, 1e-4);
    close(millions(&ResNet::resnet101(1000).build().unwrap()), 44.549, 1e-4);
    close(millions(&UNet::new(6, 72).build().unwrap()), 362.2, 0.001);
}

fn small(variant: Variant) -> AmoebaNet {
    AmoebaNet { variant, cells: 3, filters: 8, channels: 3, classes: 4, drop_path: 0.3 }
}

#[test]
fn oracle_shapes_fit_the_papers_images() {
    // Only shapes: nothing is built. An error would name the layer.
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

/// Losses, gradients and everything that is kept, of two steps.
fn train(
    model: Sequence,
    stages: usize,
    schedule: Schedule,
    remat: Remat,
    outputs: &[i64],
) -> Vec<(String, Tensor)> {
    let samples = 5;
    let mut random = gpipe_core::splitmix::Stream::new(7);
    let mut tensor = |shape: &[i64]| {
        let count = shape.iter().product::<i64>();
        let values: Vec<f32> =
            (0..count).map(|_| random.next_u64() as f32 / u64::MAX as f32 - 0.5).collect();
        Tensor::from_slice(&values).reshape(shape)
    };
    let x = tensor(&[samples, 3, 32, 32]);
    let y = tensor(&[&[samples], outputs].concat());
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([2, 3, 32, 32], Kind::Float))
        .stages(stages)
        .schedule(schedule)
        .remat(remat)
        .balance(Balance::Cost)
        .micro_batches(2)
        .seed(3)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.01) })
        .build()
        .unwrap();
    let mut all = Vec::new();
    for _ in 0..2 {
        let report = pipeline.train_step(&x, &y).unwrap();
        all.push(("loss".to_owned(), Tensor::from(report.loss)));
        all.extend(pipeline.gradients().unwrap());
    }
    all.extend(pipeline.parameters().unwrap());
    all.extend(
        pipeline.predict(&x).unwrap().into_iter().map(|output| ("output".to_owned(), output)),
    );
    all
}

fn transparent(model: impl Fn() -> Sequence, outputs: &[i64]) {
    let expected = train(model(), 1, Schedule::GPipe, Remat::Never, outputs);
    for (stages, schedule, remat) in [
        (2, Schedule::OneFOneB, Remat::Always),
        (3, Schedule::GPipe, Remat::UnlessAdjacent),
        (4, Schedule::OneFOneB, Remat::Segments(2)),
    ] {
        let found = train(model(), stages, schedule, remat, outputs);
        assert_eq!(found.len(), expected.len());
        for ((name, a), (other, b)) in found.iter().zip(&expected) {
            assert_eq!(name, other);
            assert!(a.equal(b), "{name} at K = {stages} differs by {:?}", (a - b).abs().max());
        }
    }
}

#[test]
fn transparency_of_small_amoebanets() {
    for variant in [Variant::D, Variant::B] {
        let model = || small(variant).build().unwrap();
        transparent(model, &[4]);
    }
}

#[test]
fn transparency_of_a_small_resnet_and_a_small_unet() {
    let resnet =
        || ResNet { blocks: [1, 2, 1, 1], width: 4, channels: 3, classes: 4 }.build().unwrap();
    transparent(resnet, &[4]);
    let unet = || UNet { depth: 2, ..UNet::new(2, 4) }.build().unwrap();
    transparent(unet, &[1, 32, 32]);
}
