//! Families `transparency_` and `oracle_`, for the choice of float32 kernels. The model is wide
//! enough that its products use oneDNN on any processor; the models of the other tests are too
//! small.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Named, REMATS, assert_same_bits, uniform};
use gpipe::{
    Adam, Kernels, MeanSquaredError, Pipeline, Remat, Schedule, Sequence, TensorSpec,
    layers::{Activation, LayerNorm, Linear},
};
use tch::Kind;

const WIDTH: i64 = 128;

/// How the model is run.
#[derive(Debug, Clone)]
struct Way {
    kernels: Kernels,
    stages: usize,
    schedule: Schedule,
    remat: Remat,
    threads: usize,
}

const PLAIN: Way = Way {
    kernels: Kernels::OneDnn,
    stages: 1,
    schedule: Schedule::GPipe,
    remat: Remat::Never,
    threads: 1,
};

/// The gradients of three steps with ragged micro-batches of 48, 48 and 36 rows, and the parameters
/// after them.
fn train(way: &Way) -> Named {
    let model = Sequence::new()
        .push("in", Linear::new(WIDTH, 4 * WIDTH))
        .push("gelu", Activation::Gelu)
        .push("out", Linear { inputs: 4 * WIDTH, outputs: WIDTH, bias: false })
        .push("norm", LayerNorm { features: WIDTH })
        .push("last", Linear::new(WIDTH, 3 * WIDTH));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([4, 12, WIDTH], Kind::Float))
        .stages(way.stages)
        .micro_batches(3)
        .schedule(way.schedule.clone())
        .remat(way.remat)
        .threads_per_stage(way.threads)
        .kernels(way.kernels)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
        .build()
        .unwrap();
    let x = uniform(&[11, 12, WIDTH], 1, Kind::Float);
    let y = uniform(&[11, 12, 3 * WIDTH], 2, Kind::Float);
    let mut all = Vec::new();
    for step in 0..3 {
        pipeline.train_step(&x, &y).unwrap();
        let gradients = pipeline.gradients().unwrap().into_iter();
        all.extend(gradients.map(|(name, gradient)| (format!("step {step}: {name}"), gradient)));
    }
    all.extend(pipeline.parameters().unwrap());
    all
}

#[test]
fn transparency_of_onednn_products() {
    for threads in [1, 2] {
        let plain = Way { threads, ..PLAIN };
        let expected = train(&plain);
        for stages in 1..=3 {
            for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
                for remat in REMATS {
                    let way = Way { stages, schedule: schedule.clone(), remat, ..plain };
                    assert_same_bits(&train(&way), &expected, &format!("{way:?}"));
                }
            }
        }
    }
}

#[test]
fn oracle_onednn_and_aten_agree_but_for_rounding() {
    let (onednn, aten) = (train(&PLAIN), train(&Way { kernels: Kernels::Aten, ..PLAIN }));
    let first = |named: &Named| named.iter().take(6).map(|(_, t)| t.copy()).collect::<Vec<_>>();
    for ((a, b), (name, _)) in first(&onednn).iter().zip(&first(&aten)).zip(&onednn) {
        // Compares the first step's gradients, which start from the same parameters, by the norm of
        // the difference.
        let relative = (a - b).norm().double_value(&[]) / b.norm().double_value(&[]);
        assert!(relative < 1e-5, "{name}: {relative:e}");
    }
}
