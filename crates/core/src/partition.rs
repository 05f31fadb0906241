//! Cutting a sequence of layers into K contiguous cells.
//!
//! GPipe's partitioner "minimizes the variance in the estimated costs of all cells" (Huang et al.
//! 2019, section 2.1). A pipeline runs at the pace of its slowest cell. This module therefore
//! minimizes the largest cost first, and the variance among cuts with an equal largest cost. Both
//! minima are exact, found by dynamic programming in O(K L^2).

/// A balance that does not fit the model or the pipeline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// There are more stages than layers.
    #[error(
        "{stages} stages need at least {stages} layers, the model has {layers}: use at most \
        {layers} stages"
    )]
    TooManyStages {
        /// The number of stages, K.
        stages: usize,
        /// The number of layers, L.
        layers: usize,
    },
    /// There are no stages.
    #[error("a pipeline needs at least one stage: use 1 or more stages")]
    NoStages,
    /// The balance does not have one entry per stage.
    #[error("balance {balance:?} is for {} stages, the pipeline has {stages}: give one number per \
        stage", balance.len())]
    WrongLength {
        /// The balance.
        balance: Vec<usize>,
        /// The number of stages, K.
        stages: usize,
    },
    /// The balance does not add up to the number of layers.
    #[error("balance {balance:?} covers {} layers, the model has {layers}: {}, or let \
        the costs decide",
        balance.iter().fold(0_usize, |sum, n| sum.saturating_add(*n)), remedy(balance, *layers))]
    WrongSum {
        /// The balance.
        balance: Vec<usize>,
        /// The number of layers, L.
        layers: usize,
    },
    /// A stage has no layers.
    #[error("balance {balance:?} leaves stage {stage} without a layer: give each stage at least 1")]
    EmptyStage {
        /// The balance.
        balance: Vec<usize>,
        /// The first empty stage.
        stage: usize,
    },
}

fn remedy(balance: &[usize], layers: usize) -> String {
    let sum = balance.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
    if sum < layers {
        format!("add {} to a stage", layers - sum)
    } else {
        format!("take {} from the stages", sum - layers)
    }
}

/// Checks a balance given by the user: layers per cell, for `stages` cells and `layers` layers.
///
/// # Errors
/// [`PartitionError`], with the remedy.
pub fn check_balance(
    balance: &[usize],
    stages: usize,
    layers: usize,
) -> Result<(), PartitionError> {
    check_counts(stages, layers)?;
    let balance = balance.to_vec();
    if balance.len() != stages {
        return Err(PartitionError::WrongLength { balance, stages });
    }
    if balance.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n)) != Some(layers) {
        return Err(PartitionError::WrongSum { balance, layers });
    }
    if let Some(stage) = balance.iter().position(|&cell| cell == 0) {
        return Err(PartitionError::EmptyStage { balance, stage });
    }
    Ok(())
}

fn check_counts(stages: usize, layers: usize) -> Result<(), PartitionError> {
    if stages == 0 {
        return Err(PartitionError::NoStages);
    }
    if stages > layers {
        return Err(PartitionError::TooManyStages { stages, layers });
    }
    Ok(())
}

/// Cuts into cells of equal size; the first `layers % stages` cells get one more layer.
///
/// # Errors
/// [`PartitionError::TooManyStages`] and [`PartitionError::NoStages`].
pub fn uniform(layers: usize, stages: usize) -> Result<Vec<usize>, PartitionError> {
    check_counts(stages, layers)?;
    Ok((0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect())
}

/// Returns the balance (layers per cell) that minimizes the largest cell cost. Ties go to the least
/// variance of cell costs, then to the most layers in the earliest cells.
///
/// ```
/// use gpipe_core::partition::by_cost;
/// assert_eq!(by_cost(&[1, 1, 1, 3], 2).unwrap(), [3, 1]);
/// ```
///
/// # Errors
/// [`PartitionError::TooManyStages`] and [`PartitionError::NoStages`].
pub fn by_cost(costs: &[u64], stages: usize) -> Result<Vec<usize>, PartitionError> {
    by_weighted_cost(costs, &vec![1; stages])
}

/// Like [`by_cost`], but a layer's cost counts `weights[k]` times on stage k. There is one stage
/// per weight. Weights express that a stage which recomputes nothing (the last one in 1F1B, for
/// example) is cheaper, or that a slower device is more expensive.
///
/// ```
/// use gpipe_core::partition::by_weighted_cost;
/// // Stage 0: forward, recompute and backward (1 + 1 + 2). Stage 1: forward and backward (1 + 2).
/// assert_eq!(by_weighted_cost(&[1; 14], &[4, 3]).unwrap(), [6, 8]);
/// ```
///
/// # Errors
/// [`PartitionError::TooManyStages`] and [`PartitionError::NoStages`].
pub fn by_weighted_cost(costs: &[u64], weights: &[u64]) -> Result<Vec<usize>, PartitionError> {
    let stages = weights.len();
    check_counts(stages, costs.len())?;
    let sums = prefix_sums(costs);
    let weigh = |stage: usize, cell: u64| u128::from(cell) * u128::from(weights[stage]);
    // [1] Find the least possible largest cell. [2] Find the least sum of squares under that limit;
    //     the mean is fixed, so this is the least variance. A single DP over the pair would not be
    //     exact: a prefix with a larger cell and less variance can still win if a later cell is
    //     larger anyway.
    let largest = least(&sums, stages, u128::max, |stage, cell| Some(weigh(stage, cell))).cost;
    let squares = least(
        &sums,
        stages,
        |a, b| a.saturating_add(b),
        |stage, cell| {
            let cost = weigh(stage, cell);
            (cost <= largest).then(|| cost.saturating_mul(cost))
        },
    );
    Ok(squares.balance)
}

fn prefix_sums(costs: &[u64]) -> Vec<u64> {
    let mut sums = vec![0_u64];
    for cost in costs {
        sums.push(sums[sums.len() - 1].saturating_add(*cost));
    }
    sums
}

struct Least {
    cost: u128,
    balance: Vec<usize>,
}

/// Minimizes the `join` of all cells' `cost` over all contiguous partitions; a cost of `None`
/// forbids a cell. `best[k][i]` is the least cost of cutting layers i.. into k + 1 cells, and the
/// end of the first of those cells.
fn least(
    sums: &[u64],
    stages: usize,
    join: impl Fn(u128, u128) -> u128,
    cost: impl Fn(usize, u64) -> Option<u128>,
) -> Least {
    let layers = sums.len() - 1;
    let cell = |stage: usize, from: usize, to: usize| cost(stage, sums[to] - sums[from]);
    let last: Vec<_> =
        (0..layers).map(|i| cell(stages - 1, i, layers).map(|c| (c, layers))).collect();
    let mut best = vec![last];
    for k in 1..stages {
        let (rest, stage) = (&best[k - 1], stages - 1 - k);
        let row = (0..layers)
            .map(|i| {
                // Try the longest first cell first; only a strictly better one replaces it.
                (i + 1..layers).rev().fold(None, |found: Option<(u128, usize)>, end| {
                    let total =
                        rest[end].and_then(|(rest, _)| Some(join(cell(stage, i, end)?, rest)));
                    match (found, total) {
                        (Some((least, _)), Some(total)) if total >= least => found,
                        (_, Some(total)) => Some((total, end)),
                        (_, None) => found,
                    }
                })
            })
            .collect();
        best.push(row);
    }
    let mut balance = Vec::with_capacity(stages);
    let mut from = 0;
    for k in (0..stages).rev() {
        let end = best[k].get(from).copied().flatten().map_or(layers, |(_, end)| end);
        balance.push(end - from);
        from = end;
    }
    Least { cost: best[stages - 1][0].map_or(u128::MAX, |(cost, _)| cost), balance }
}
