//! Tests of batches: their contents, and that requests have no side effects. Families: `property_`,
//! `oracle_`, `regression_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeSet;

use gpipe_data::{BATCH_TOKENS_MAX, Error, IGNORE, TokenSet, TrainBatches, ValidationBatches};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn config() -> ProptestConfig {
    ProptestConfig {
        rng_seed: RngSeed::Fixed(3),
        failure_persistence: None,
        ..ProptestConfig::with_cases(150)
    }
}

/// Tokens equal to their positions, so that a batch shows where it came from.
fn positions(count: usize) -> TokenSet {
    TokenSet { tokens: (0..count as u32).collect(), bytes: count as u64 }
}

/// Rows of (inputs, targets) of several steps, as one list of samples.
fn samples(
    batches: &TrainBatches<&TokenSet>,
    steps: std::ops::Range<u64>,
) -> Vec<(Vec<i64>, Vec<i64>)> {
    let mut samples = Vec::new();
    for step in steps {
        let batch = batches.batch(step);
        let inputs = batch.inputs.chunks(batch.sequence);
        let targets = batch.targets.chunks(batch.sequence);
        samples.extend(inputs.zip(targets).map(|(i, t)| (i.to_vec(), t.to_vec())));
    }
    samples
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn property_every_window_once_per_epoch(
        count in 2usize..300, sequence in 1usize..20, mini_batch in 1usize..6, seed: u64,
    ) {
        prop_assume!(count > sequence);
        let tokens = positions(count);
        let batches = TrainBatches::new(&tokens, sequence, mini_batch, seed).unwrap();
        let per_epoch = batches.samples_per_epoch() as usize;
        prop_assert_eq!(per_epoch, count / sequence);
        let steps = (3 * per_epoch).div_ceil(mini_batch) as u64;
        let samples = samples(&batches, 0..steps);
        for epoch in samples.chunks(per_epoch).take(3) {
            let mut targets = BTreeSet::new();
            let mut starts = BTreeSet::new();
            for (inputs, row) in epoch {
                starts.insert(inputs[0] as usize);
                for (&input, &target) in inputs.iter().zip(row) {
                    prop_assert_eq!(target, (input + 1) % count as i64);
                    prop_assert!(targets.insert(target), "token {} is a target twice", target);
                }
            }
            // Window starts are a stride apart around the ring, with one common offset.
            prop_assert_eq!(targets.len(), per_epoch * sequence);
            let offset = (0..sequence).find(|offset| {
                (0..per_epoch).all(|w| starts.contains(&((offset + w * sequence) % count)))
            });
            prop_assert!(offset.is_some(), "{:?}", starts);
        }
    }

    #[test]
    fn property_a_batch_does_not_depend_on_what_was_asked_before(
        steps in prop::collection::vec(any::<u64>(), 1..6), seed: u64,
    ) {
        let tokens = positions(101);
        let batches = TrainBatches::new(&tokens, 7, 4, seed).unwrap();
        let forwards: Vec<_> = steps.iter().map(|&step| batches.batch(step)).collect();
        for (&step, batch) in steps.iter().zip(&forwards).rev() {
            let fresh = TrainBatches::new(&tokens, 7, 4, seed).unwrap();
            prop_assert_eq!(&fresh.batch(step), batch);
            prop_assert_eq!(&batches.batch(step), batch);
        }
    }

    #[test]
    fn property_samples_do_not_depend_on_the_mini_batch(seed: u64) {
        let tokens = positions(64);
        let ones = TrainBatches::new(&tokens, 5, 1, seed).unwrap();
        let threes = TrainBatches::new(&tokens, 5, 3, seed).unwrap();
        prop_assert_eq!(samples(&ones, 0..60), samples(&threes, 0..20));
    }

    #[test]
    fn property_a_run_that_goes_on_with_another_size_leaves_no_sample_out(
        first in 1usize..6, then in 1usize..6, steps in 0u64..20, seed: u64,
    ) {
        let tokens = positions(64);
        let all = samples(&TrainBatches::new(&tokens, 5, 1, seed).unwrap(), 0..200);
        let before = TrainBatches::new(&tokens, 5, first, seed).unwrap();
        let seen = before.samples_seen(steps);
        let after = TrainBatches::new(&tokens, 5, then, seed).unwrap().starting_at(steps, seen);
        let mut found = samples(&before, 0..steps);
        found.extend(samples(&after, steps..steps + 10));
        prop_assert_eq!(&found[..], &all[..found.len()]);
        prop_assert_eq!(after.samples_seen(steps + 10), found.len() as u64);
    }

    #[test]
    fn property_counters_are_sums_over_the_steps_before(
        count in 2usize..100, sequence in 1usize..20, mini_batch in 1usize..6, step in 0u64..50,
        seed: u64,
    ) {
        prop_assume!(count > sequence);
        let tokens = positions(count);
        let batches = TrainBatches::new(&tokens, sequence, mini_batch, seed).unwrap();
        let before: Vec<_> = (0..step).map(|step| batches.batch(step)).collect();
        let samples = before.iter().map(|batch| batch.samples).sum::<usize>() as u64;
        prop_assert_eq!(batches.samples_seen(step), samples);
        prop_assert_eq!(
            batches.epoch_of(step),
            batches.samples_seen(step) / batches.samples_per_epoch()
        );
    }

    #[test]
    fn property_validation_has_every_target_once(
        count in 2usize..300, sequence in 1usize..20, mini_batch in 1usize..6,
        cap in prop::option::of(2usize..400),
    ) {
        let tokens = positions(count);
        let batches = ValidationBatches::new(&tokens, sequence, mini_batch, cap).unwrap();
        let covered = cap.unwrap_or(count).min(count);
        prop_assert_eq!(batches.targets(), covered - 1);
        let (announced, mut seen) = (batches.len(), Vec::new());
        let batches: Vec<_> = batches.collect();
        prop_assert_eq!(batches.len(), announced);
        for (number, batch) in batches.iter().enumerate() {
            prop_assert_eq!(batch.inputs.len(), batch.samples * sequence);
            prop_assert_eq!(batch.targets.len(), batch.samples * sequence);
            prop_assert!(batch.samples == mini_batch || number + 1 == announced);
            for (&input, &target) in batch.inputs.iter().zip(&batch.targets) {
                if target == IGNORE {
                    prop_assert_eq!(input, 0);
                } else {
                    prop_assert_eq!(target, input + 1);
                    seen.push(target);
                }
            }
        }
        prop_assert!(seen.into_iter().eq(1..covered as i64));
    }
}

#[test]
fn oracle_validation_by_hand() {
    let tokens = positions(8);
    let mut batches = ValidationBatches::new(&tokens, 3, 2, None).unwrap();
    let first = batches.next().unwrap();
    assert_eq!((first.samples, first.sequence), (2, 3));
    assert_eq!(first.inputs, [0, 1, 2, 3, 4, 5]);
    assert_eq!(first.targets, [1, 2, 3, 4, 5, 6]);
    let last = batches.next().unwrap();
    assert_eq!(last.samples, 1);
    assert_eq!(last.inputs, [6, 0, 0]);
    assert_eq!(last.targets, [7, IGNORE, IGNORE]);
    assert_eq!(batches.next(), None);
}

#[test]
fn property_epochs_and_seeds_differ() {
    let tokens = positions(1000);
    let epoch = |seed, epoch: u64| {
        let batches = TrainBatches::new(&tokens, 10, 1, seed).unwrap();
        samples(&batches, epoch * 100..(epoch + 1) * 100)
    };
    assert_ne!(epoch(1, 0), epoch(1, 1));
    assert_ne!(epoch(1, 0), epoch(2, 0));
    let offset = |e| epoch(1, e)[0].0[0] % 10;
    let offsets: BTreeSet<_> = (0..60).map(offset).collect();
    assert_eq!(offsets.len(), 10, "60 epochs reach each of the 10 offsets");
}

#[test]
fn oracle_a_new_epoch_starts_where_the_counter_says() {
    let tokens = positions(40); // 10 windows of 4 tokens; 5 steps of 2 samples.
    let batches = TrainBatches::new(&tokens, 4, 2, 7).unwrap();
    assert_eq!([0, 4, 5, 9, 10].map(|step| batches.epoch_of(step)), [0, 0, 1, 1, 2]);
    for epoch in 0..4 {
        let targets: BTreeSet<_> =
            (5 * epoch..5 * epoch + 5).flat_map(|step| batches.batch(step).targets).collect();
        assert_eq!(targets.len(), 40, "every token is a target once in epoch {epoch}");
    }
}

#[test]
fn regression_the_least_and_the_greatest() {
    let tokens = positions(5);
    // One window, so each batch spans three epochs.
    let batches = TrainBatches::new(&tokens, 4, 3, 0).unwrap();
    assert_eq!(batches.samples_per_epoch(), 1);
    assert_eq!(batches.batch(u64::MAX).inputs.len(), 12);
    assert_eq!(batches.samples_seen(u64::MAX), u64::MAX);
    assert_eq!((batches.epoch_of(0), batches.epoch_of(5)), (0, 15));
}

#[test]
fn regression_batches_stay_as_they_are() {
    // A run resumed with a newer release must get the same batches, so do not update these values
    // lightly.
    let tokens = positions(40);
    let batches = TrainBatches::new(&tokens, 4, 4, 42).unwrap();
    let starts =
        |step| -> Vec<i64> { batches.batch(step).inputs.chunks(4).map(|row| row[0]).collect() };
    assert_eq!(
        (starts(0), starts(1), starts(2)),
        (vec![14, 6, 18, 2], vec![38, 22, 30, 10], vec![34, 26, 22, 34])
    );
}

#[test]
fn fault_too_few_tokens() {
    let tokens = positions(8);
    let error = TrainBatches::new(&tokens, 8, 1, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there are 8 tokens and a sample needs 9; name more text, lower data.sequence, or raise \
        train.validation_tokens"
    );
    assert!(TrainBatches::new(&tokens, 7, 1, 0).is_ok());
    for (count, cap) in [(1, None), (0, None), (8, Some(1)), (8, Some(0))] {
        let error = ValidationBatches::new(&positions(count), 4, 1, cap).err();
        assert!(matches!(error, Some(Error::TooFewTokens { needed: 2, .. })));
    }
}

#[test]
fn fault_shapes_out_of_range() {
    let tokens = positions(8);
    for (sequence, mini_batch) in [(0, 1), (1, 0), (2, BATCH_TOKENS_MAX), (usize::MAX, 2)] {
        let train = TrainBatches::new(&tokens, sequence, mini_batch, 0).err();
        let validation = ValidationBatches::new(&tokens, sequence, mini_batch, None).err();
        assert!(matches!(train, Some(Error::BatchShape { .. })));
        assert!(matches!(validation, Some(Error::BatchShape { .. })));
    }
}
