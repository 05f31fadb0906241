//! Families: `oracle_` (brute force over every contiguous partition), `fault_` (balances that do
//! not fit).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::partition::{PartitionError, by_cost, by_weighted_cost, check_balance, uniform};
use proptest::{prelude::*, test_runner::RngSeed};

/// The largest cell and the sum of squares of a balance. Each cell is weighted by its stage.
fn quality(costs: &[u64], balance: &[usize], weights: &[u64]) -> (u64, u128) {
    let mut rest = costs;
    let cells: Vec<u64> = balance
        .iter()
        .zip(weights)
        .map(|(&n, weight)| {
            let (cell, after) = rest.split_at(n);
            rest = after;
            cell.iter().sum::<u64>() * weight
        })
        .collect();
    assert!(rest.is_empty() && balance.iter().all(|&n| n > 0));
    (*cells.iter().max().unwrap(), cells.iter().map(|&c| u128::from(c) * u128::from(c)).sum())
}

fn all_balances(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![layers]];
    }
    (1..=layers - (stages - 1))
        .flat_map(|first| {
            all_balances(layers - first, stages - 1).into_iter().map(move |mut rest| {
                rest.insert(0, first);
                rest
            })
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        rng_seed: RngSeed::Fixed(11),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]
    #[test]
    fn oracle_by_cost_equals_brute_force(
        costs in prop::collection::vec(prop_oneof![0_u64..6, 0_u64..1000], 1..11),
        stages in 1_usize..8,
    ) {
        prop_assume!(stages <= costs.len());
        let equal = vec![1; stages];
        let all = all_balances(costs.len(), stages);
        let best = all.iter().map(|b| quality(&costs, b, &equal)).min().unwrap();
        prop_assert_eq!(quality(&costs, &by_cost(&costs, stages).unwrap(), &equal), best);
    }

    #[test]
    fn oracle_by_weighted_cost_equals_brute_force(
        costs in prop::collection::vec(prop_oneof![0_u64..6, 0_u64..1000], 1..11),
        weights in prop::collection::vec(1_u64..8, 1..8),
    ) {
        prop_assume!(weights.len() <= costs.len());
        let all = all_balances(costs.len(), weights.len());
        let best = all.iter().map(|b| quality(&costs, b, &weights)).min().unwrap();
        let found = by_weighted_cost(&costs, &weights).unwrap();
        prop_assert_eq!(quality(&costs, &found, &weights), best);
    }
}

/// The search looked at all pairs of layers for each stage: minutes for networks that the bounds
/// allow.
#[test]
fn regression_many_layers_on_many_devices_are_cut() {
    let costs: Vec<u64> = (0..4000).map(|layer| 1000 + layer * 7919 % 997).collect();
    let balance = by_weighted_cost(&costs, &[1; 64]).unwrap();
    assert_eq!(balance.iter().sum::<usize>(), costs.len());
    let (largest, _) = quality(&costs, &balance, &[1; 64]);
    // No cut has a largest cell below the mean; one layer more than that is always enough.
    let mean = costs.iter().sum::<u64>() / 64;
    assert!((mean..mean + 1997).contains(&largest), "{largest} {mean}");
}

/// As long a first cell as fits would leave a heavy layer to a slow stage.
#[test]
fn oracle_a_slow_stage_gets_the_light_layer() {
    assert_eq!(by_weighted_cost(&[1, 0, 1, 5, 5], &[1, 10, 1]).unwrap(), [2, 1, 2]);
}

#[test]
fn fault_balances_that_do_not_fit_say_the_remedy() {
    let text = |balance: &[usize], stages, layers| {
        check_balance(balance, stages, layers).unwrap_err().to_string()
    };
    assert_eq!(
        text(&[3, 2], 2, 6),
        "balance [3, 2] covers 5 layers, the model has 6: add 1 to a stage, or let the costs decide"
    );
    assert!(text(&[3, 4], 2, 6).contains("take 1 from the stages"));
    assert!(text(&[6, 0], 2, 6).contains("leaves stage 1 without a layer"));
    assert!(text(&[6], 2, 6).contains("is for 1 stages, the pipeline has 2"));
    assert!(text(&[usize::MAX, 2], 2, 6).contains("covers"));
    assert_eq!(uniform(3, 4), Err(PartitionError::TooManyStages { stages: 4, layers: 3 }));
    assert_eq!(by_cost(&[1], 0), Err(PartitionError::NoStages));
    assert_eq!(uniform(7, 3), Ok(vec![3, 2, 2]));
    assert_eq!(check_balance(&[2, 4], 2, 6), Ok(()));
}
