//! Tests that columns that are padding in all rows of a micro-batch are removed.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use gpipe::{Balance, CrossEntropy, Padding, Pipeline, RematPolicies, Schedule, Sgd, TensorSpec};
use gpipe_models::Translation;
use tch::{Kind, Tensor};

const PAD: i64 = 1;
const IGNORE: i64 = -100;
const VOCABULARY: i64 = 17;

fn pipeline(balance: &[usize], schedule: Schedule, remat: &str, trims: bool) -> Pipeline {
    let model = Translation {
        source_vocabulary: VOCABULARY,
        target_vocabulary: VOCABULARY,
        pad: PAD,
        features: 8,
        heads: 2,
        head_size: 4,
        hidden: 12,
        encoder_layers: 1,
        decoder_layers: 1,
        dropout: 0.2,
        attention_dropout: 0.0,
        logit_clip: 0.0,
        tied: true,
        shared: false,
        split_blocks: true,
    };
    let inputs = vec![TensorSpec::new([7, 9], Kind::Int64), TensorSpec::new([7, 8], Kind::Int64)];
    let builder = Pipeline::builder(model.build().unwrap(), inputs)
        .stages(balance.len())
        .balance(Balance::Layers(balance.to_vec()))
        .schedule(schedule)
        .remat(remat.parse::<RematPolicies>().unwrap())
        .micro_batches(3)
        .loss(CrossEntropy::default())
        .optimizer(Sgd::new(0.1))
        .kind(Kind::Double)
        .keep_gradients();
    let padding = Padding { inputs: vec![Some(PAD); 2], targets: vec![Some(IGNORE)] };
    let builder = if trims { builder.padding(padding) } else { builder };
    builder.build().unwrap()
}

/// Seven sentences of increasing length, so that the three micro-batches end at different columns.
/// Returns source, decoder input and targets.
fn batch(columns: i64) -> (Vec<Tensor>, Tensor) {
    let row = |seed: i64, length: i64, fill: i64| {
        let tokens = (0..length).map(move |i| 2 + (seed * 5 + i * 3) % (VOCABULARY - 2));
        tokens.chain(std::iter::repeat_n(fill, (columns - length) as usize)).collect::<Vec<_>>()
    };
    let rows = |lengths: [i64; 7], fill, seed| {
        let rows: Vec<i64> = lengths
            .iter()
            .zip(seed..)
            .flat_map(|(&length, seed)| row(seed, length, fill))
            .collect();
        Tensor::from_slice(&rows).reshape([7, columns])
    };
    let (sources, targets) = ([2, 2, 3, 4, 5, 7, 8], [1, 3, 3, 2, 4, 6, 5]);
    (vec![rows(sources, PAD, 1), rows(targets, PAD, 20)], rows(targets, IGNORE, 40))
}

struct Ran {
    loss: f64,
    gradients: Vec<(String, Tensor)>,
    sent: u64,
}

fn step(mut pipeline: Pipeline, columns: i64) -> Ran {
    let (inputs, targets) = batch(columns);
    let report = pipeline.train_step(inputs, targets).unwrap();
    let sent = report.devices.iter().map(|stage| stage.sent.0).sum();
    Ran { loss: report.loss, gradients: pipeline.gradients().unwrap(), sent }
}

#[test]
fn oracle_trimmed_micro_batches_are_the_same_on_every_cut() {
    let expected = step(pipeline(&[8], Schedule::GPipe, "never", true), 9);
    for (balance, schedule, remat) in [
        (&[3, 5][..], Schedule::OneFOneB, "always"),
        (&[2, 3, 3], Schedule::GPipe, "segments:2"),
        (&[1, 4, 2, 1], Schedule::OneFOneB, "never"),
    ] {
        let found = step(pipeline(balance, schedule, remat, true), 9);
        assert_eq!(found.loss.to_bits(), expected.loss.to_bits(), "{balance:?}");
        for ((name, a), (_, b)) in found.gradients.iter().zip(&expected.gradients) {
            assert_eq!(a, b, "{name} {balance:?}");
        }
    }
}

#[test]
fn oracle_trimming_changes_no_more_than_rounding() {
    let trimmed = step(pipeline(&[3, 5], Schedule::OneFOneB, "never", true), 9);
    let whole = step(pipeline(&[3, 5], Schedule::OneFOneB, "never", false), 9);
    assert!((trimmed.loss - whole.loss).abs() < 1e-12, "{} {}", trimmed.loss, whole.loss);
    for ((name, a), (_, b)) in trimmed.gradients.iter().zip(&whole.gradients) {
        let apart = (a - b).abs().max().double_value(&[]);
        assert!(apart < 1e-12, "{name} {apart}");
    }
    assert!(trimmed.sent < whole.sent, "shorter micro-batches are smaller messages");
    // The amount of padding does not matter.
    let longer = step(pipeline(&[3, 5], Schedule::OneFOneB, "never", true), 30);
    assert_eq!((longer.loss.to_bits(), longer.sent), (trimmed.loss.to_bits(), trimmed.sent));
}

#[test]
fn fault_padding_of_what_is_no_token_batch_is_refused() {
    let mut pipeline = pipeline(&[8], Schedule::GPipe, "never", true);
    let (inputs, _) = batch(9);
    let targets = Tensor::zeros([7], (Kind::Int64, tch::Device::Cpu));
    let error = pipeline.train_step(inputs, targets).unwrap_err().to_string();
    assert!(error.contains("[7]"), "{error}");
}

#[test]
fn fault_padding_of_another_number_of_tensors_is_refused() {
    let mut pipeline = pipeline(&[8], Schedule::GPipe, "never", true);
    let (inputs, targets) = batch(9);
    let more = vec![targets.shallow_clone(), targets];
    let error = pipeline.train_step(inputs, more).unwrap_err().to_string();
    assert!(error.contains("1 targets") || error.contains("takes"), "{error}");
}
