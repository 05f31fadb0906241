//! Cutting a sequence of layers into K contiguous cells.
//!
//! GPipe's partitioner "minimizes the variance in the estimated costs of all cells" (Huang et al.
//! 2019, section 2.1). A pipeline runs at the pace of its slowest cell. This module therefore
//! minimizes the largest cost first, and the variance among cuts with an equal largest cost. Both
//! minima are exact: the first is found by bisection, the second by dynamic programming.

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
    let largest = least_largest(&sums, weigh, stages);
    Ok(least_squares(&sums, weigh, stages, largest))
}

fn prefix_sums(costs: &[u64]) -> Vec<u64> {
    let mut sums = vec![0_u64];
    for cost in costs {
        sums.push(sums[sums.len() - 1].saturating_add(*cost));
    }
    sums
}

/// The least possible cost of the largest cell, by bisection.
fn least_largest(sums: &[u64], weigh: impl Fn(usize, u64) -> u128, stages: usize) -> u128 {
    let layers = sums.len() - 1;
    // Whether cells of at most `limit` are enough.
    let fits = |limit: u128| {
        // By layer, whether the stages so far can end before it. Of all places where the stages
        // before end, the last one makes the cheapest cell.
        let mut ends = vec![false; layers + 1];
        ends[0] = true;
        for stage in 0..stages {
            let mut last = None;
            for (end, reached) in ends.iter_mut().enumerate() {
                let fits = |from: usize| weigh(stage, sums[end] - sums[from]) <= limit;
                if std::mem::replace(reached, last.is_some_and(fits)) {
                    last = Some(end);
                }
            }
        }
        ends[layers]
    };
    let all = sums[layers];
    let (mut below, mut enough) =
        (0, (0..stages).map(|stage| weigh(stage, all)).max().unwrap_or_default());
    while below < enough {
        let middle = below + (enough - below) / 2;
        match fits(middle) {
            true => enough = middle,
            false => below = middle + 1,
        }
    }
    enough
}

/// The balance with the least sum of squares whose cells cost at most `largest`.
///
/// Going back through the stages, `best[i]` is the least sum for layers i.. on the stages seen so
/// far. Cells are no longer than `largest` allows: for layers of like cost, all stages together try
/// O(L^2) of them. A layer that outweighs the rest allows long cells, up to O(K L^2) in all.
fn least_squares(
    sums: &[u64],
    weigh: impl Fn(usize, u64) -> u128,
    stages: usize,
    largest: u128,
) -> Vec<usize> {
    let layers = sums.len() - 1;
    let square = |stage: usize, from: usize, to: usize| {
        let cost = weigh(stage, sums[to] - sums[from]);
        (cost <= largest).then(|| cost.saturating_mul(cost))
    };
    let mut best: Vec<Option<u128>> =
        (0..layers).map(|from| square(stages - 1, from, layers)).collect();
    // By stage but the last, and by first layer: the end of the stage's cell.
    let mut ends: Vec<Vec<u32>> = Vec::new();
    for stage in (0..stages - 1).rev() {
        let mut row = vec![(None, layers); layers];
        for (from, found) in row.iter_mut().enumerate() {
            if from < stage {
                continue; // each stage before has a layer
            }
            for (end, rest) in best.iter().enumerate().skip(from + 1) {
                let Some(cell) = square(stage, from, end) else { break };
                let Some(rest) = *rest else { continue };
                let total = cell.saturating_add(rest);
                // Of equal ones the longest first cell.
                if found.0.is_none_or(|least| total <= least) {
                    *found = (Some(total), end);
                }
            }
        }
        ends.push(row.iter().map(|(_, end)| u32::try_from(*end).unwrap_or(u32::MAX)).collect());
        best = row.into_iter().map(|(total, _)| total).collect();
    }
    let mut balance = Vec::with_capacity(stages);
    let mut from = 0;
    for row in ends.iter().rev() {
        let end = row[from] as usize;
        balance.push(end - from);
        from = end;
    }
    balance.push(layers - from);
    balance
}
