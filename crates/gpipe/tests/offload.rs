//! Activation offload. That it changes no bit is part of every matrix in `common`.
//!
//! Families: `property_` (memory that is held, reports, files), `fault_` (a full disk, a folder
//! that is not there), `transparency_` (a policy for each stage).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::path::Path;

use crate::common::{self, assert_same_bits, uniform};
use gpipe::{
    Adam, Bytes, Error, Forward, Infer, Layer, LayerError, MeanSquaredError, Nanos, Pipeline,
    PipelineBuilder, Remat, Schedule, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 64;
const SAMPLES: i64 = 8 * 128;
const M: usize = 8;
/// The bytes of one layer's outputs for a micro-batch.
const OUTPUTS: u64 = 4 * 128 * WIDTH as u64;

/// Eight layers. In the middle of a stage of four, a micro-batch keeps four outputs.
fn builder(schedule: Schedule, remat: impl Into<gpipe::RematPolicies>) -> PipelineBuilder {
    let model = (0..4).fold(Sequence::new(), |model, _| {
        model.layer(Linear::new(WIDTH, WIDTH)).layer(Activation::Tanh)
    });
    Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], Kind::Float))
        .stages(2)
        .schedule(schedule)
        .remat(remat)
        .micro_batches(M)
        .seed(3)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Adam { lr: 0.01, ..Adam::default() })
}

fn data() -> (Tensor, Tensor) {
    (uniform(&[SAMPLES, WIDTH], 1, Kind::Float), uniform(&[SAMPLES, WIDTH], 2, Kind::Float))
}

fn peaks(pipeline: &mut Pipeline) -> Vec<u64> {
    let (inputs, targets) = data();
    let report = pipeline.train_step(&inputs, &targets).unwrap();
    report.devices.iter().map(|device| device.peak.0).collect()
}

/// All micro-batches are in flight at once under GPipe. `never` holds all of them, `offload` three
/// at most: the one that runs, one on its way out and one on its way back.
#[test]
fn property_memory_does_not_grow_with_micro_batches_in_flight() {
    let never = peaks(&mut builder(Schedule::GPipe, Remat::Never).build().unwrap());
    let offload = peaks(&mut builder(Schedule::GPipe, Remat::Offload).build().unwrap());
    for (never, offload) in never.into_iter().zip(offload) {
        // Besides the four outputs of a stage, its last one waits for its receiver either way.
        assert!(offload + (M as u64 - 3) * 3 * OUTPUTS <= never, "{offload}, {never} with never");
    }
}

#[test]
fn property_reports_count_bytes_and_waits() {
    let (inputs, targets) = data();
    for remat in [Remat::Never, Remat::Offload] {
        let mut pipeline = builder(Schedule::GPipe, remat).build().unwrap();
        let live = pipeline.train_step(&inputs, &targets).unwrap().devices[0].live;
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        // The first stage keeps what it was given and what it sends; the second only what it was
        // given. On the last stage all but the last micro-batch are away.
        let (first, second) = (report.devices[0], report.devices[1]);
        match remat.offloads() {
            true => {
                assert_eq!(first.offloaded, Bytes(M as u64 * 3 * OUTPUTS));
                assert!(second.offloaded >= Bytes((M as u64 - 1) * 3 * OUTPUTS));
                assert!(first.offload_wait > Nanos(0));
                assert!(first.offload_wait <= first.forward + first.recompute);
            }
            false => {
                assert_eq!([first.offloaded, second.offloaded], [Bytes(0); 2]);
                assert_eq!([first.offload_wait, second.offload_wait], [Nanos(0); 2]);
            }
        }
        assert_eq!(first.live, live, "{remat}");
    }
}

/// Also under a schedule that splits backwards.
#[test]
fn transparency_of_stages_with_different_policies() {
    let (inputs, targets) = data();
    let train = |schedule: &Schedule, remat: &str| {
        let remat: gpipe::RematPolicies = remat.parse().unwrap();
        let mut pipeline = builder(schedule.clone(), remat).build().unwrap();
        for _ in 0..2 {
            pipeline.train_step(&inputs, &targets).unwrap();
        }
        (pipeline.gradients().unwrap(), common::flat(&mut pipeline))
    };
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
        let expected = train(&schedule, "never");
        for remat in ["offload,never", "always,offload", "offload,keep:1", "offload"] {
            let found = train(&schedule, remat);
            assert_same_bits(&found.0, &expected.0, &format!("{schedule} {remat}"));
            assert_same_bits(&found.1, &expected.1, &format!("{schedule} {remat}"));
        }
    }
}

#[test]
fn property_a_cap_that_never_exceeds_is_kept_and_no_file_has_a_name() {
    let cap = |remat: Remat| peaks(&mut builder(Schedule::GPipe, remat).build().unwrap());
    let (never, offload) = (cap(Remat::Never), cap(Remat::Offload));
    let between: Vec<Bytes> =
        never.iter().zip(&offload).map(|(never, own)| Bytes((never + own) / 2)).collect();
    let folder = tempfile::tempdir().unwrap();
    let capped = |remat: Remat| {
        let builder = builder(Schedule::GPipe, remat).memory_cap(between.clone());
        builder.offload_folder(folder.path()).build().unwrap()
    };
    let (inputs, targets) = data();
    let error = capped(Remat::Never).train_step(&inputs, &targets).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let mut pipeline = capped(Remat::Offload);
    pipeline.train_step(&inputs, &targets).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let mut expected = builder(Schedule::GPipe, Remat::Never).build().unwrap();
    expected.train_step(&inputs, &targets).unwrap();
    let (found, expected) = (common::flat(&mut pipeline), common::flat(&mut expected));
    assert_same_bits(&found, &expected, "under a cap");
}

/// A layer that saves a number on the CPU for its backward, wherever it runs.
struct TimesNumber;

impl Layer for TimesNumber {
    fn kind(&self) -> &'static str {
        "TimesNumber"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        // Of no memory that anything else refers to.
        let number = Tensor::f_from_slice(&[0.5_f32])?.f_squeeze()?;
        Ok(vec![inputs[0].f_mul(&number)?.f_tanh()?])
    }
}

/// On a GPU, only what is in the GPU's memory leaves it.
#[test]
fn regression_a_number_on_the_cpu_stays_there() {
    let (inputs, targets) = data();
    let train = |remat: Remat| {
        let model = (0..4).fold(Sequence::new(), |model, _| {
            model.layer(Linear::new(WIDTH, WIDTH)).layer(TimesNumber)
        });
        let builder = Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], Kind::Float));
        let builder = builder.stages(2).micro_batches(4).seed(3).remat(remat).keep_gradients();
        let builder = builder.loss(MeanSquaredError).optimizer(Adam::default());
        let mut pipeline = builder.build().unwrap();
        pipeline.train_step(&inputs, &targets).unwrap();
        pipeline.gradients().unwrap()
    };
    assert_same_bits(&train(Remat::Offload), &train(Remat::Never), "offload");
}

/// The step fails as a whole, and the pipeline goes on.
#[test]
fn fault_a_full_disk_fails_the_step_and_changes_nothing() {
    if common::on_gpus() {
        return; // They offload to the host's memory.
    }
    let (inputs, targets) = data();
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
        let builder = builder(schedule.clone(), Remat::Offload).offload_folder("/dev/full");
        let mut pipeline = builder.build().unwrap();
        let before = common::flat(&mut pipeline);
        for _ in 0..2 {
            let error = pipeline.train_step(&inputs, &targets).unwrap_err();
            assert!(matches!(error, Error::Step { .. }), "{error:?}");
            let text = error.to_string();
            let named =
                ["stage 0", "offloaded activations in /dev/full", "No space left", "free space"];
            assert!(named.iter().all(|part| text.contains(part)), "{schedule}: {text}");
            assert_same_bits(&common::flat(&mut pipeline), &before, &schedule.to_string());
        }
        pipeline.evaluate(&inputs, &targets).unwrap();
    }
}

#[test]
fn fault_a_folder_that_is_not_there_is_refused_before_any_step() {
    if common::on_gpus() {
        return; // They offload to the host's memory.
    }
    let gone = Path::new("/no/such/folder");
    let error =
        builder(Schedule::GPipe, Remat::Offload).offload_folder(gone).build().err().unwrap();
    let text = error.to_string();
    assert!(
        text.contains("/no/such/folder") && text.contains("another `offload_folder`"),
        "{text}"
    );
    // No stage offloads, so nothing is made there.
    builder(Schedule::GPipe, Remat::Always).offload_folder(gone).build().unwrap();
}
