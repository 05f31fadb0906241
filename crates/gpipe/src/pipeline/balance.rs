//! Where a sequence is cut.

use std::{fmt, str::FromStr};

use gpipe_core::{
    StageId,
    lower::RematSet,
    partition::{by_weighted_cost, check_balance, uniform},
    remat::{Remat, RematPolicies},
    schedule::ActionLists,
};

use crate::error::{Error, Result};

/// How to cut a sequence into stages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Balance {
    /// By the layers' estimated costs, so that the most expensive stage is as cheap as possible.
    #[default]
    Cost,
    /// The same number of layers per stage.
    Uniform,
    /// The given number of layers for each stage.
    Layers(Vec<usize>),
}

impl From<Vec<usize>> for Balance {
    fn from(layers: Vec<usize>) -> Self {
        Self::Layers(layers)
    }
}

impl<const K: usize> From<[usize; K]> for Balance {
    fn from(layers: [usize; K]) -> Self {
        Self::Layers(layers.into())
    }
}

impl FromStr for Balance {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cost" => Ok(Balance::Cost),
            "uniform" => Ok(Balance::Uniform),
            _ => {
                let numbers: std::result::Result<Vec<usize>, _> =
                    text.split(',').map(|number| number.trim().parse()).collect();
                numbers.map(Balance::Layers).map_err(|_| {
                    Error::Setting(format!(
                        "'{text}' is no balance: use cost, uniform, or layers per stage such as 3,5"
                    ))
                })
            }
        }
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Balance::Cost => f.write_str("cost"),
            Balance::Uniform => f.write_str("uniform"),
            Balance::Layers(layers) => {
                let numbers: Vec<String> = layers.iter().map(ToString::to_string).collect();
                f.write_str(&numbers.join(","))
            }
        }
    }
}

impl Balance {
    /// Returns the layers per stage. `costs` has the cost of each layer; `weights` has, for each
    /// stage, the factor by which it multiplies costs.
    pub(super) fn cut(
        &self,
        layers: usize,
        costs: impl FnOnce() -> Result<Vec<u64>>,
        weights: &[u64],
    ) -> Result<Vec<usize>> {
        let stages = weights.len();
        Ok(match self {
            Balance::Uniform => uniform(layers, stages)?,
            Balance::Cost => by_weighted_cost(&costs()?, weights)?,
            Balance::Layers(balance) => {
                check_balance(balance, stages, layers)?;
                balance.clone()
            }
        })
    }
}

/// The cost of one step on each stage, per unit of its layers' forward cost.
///
/// Each of the `micro_batches` counts as a forward and a backward of twice its cost, plus a forward
/// if the schedule re-materializes it. Under 1F1B the last stage re-materializes nothing by
/// default. Selective re-materialization is a small part of a forward and is not counted; offload
/// recomputes nothing.
pub(super) fn stage_weights(
    compute: &ActionLists,
    remat: &RematPolicies,
    stages: usize,
    micro_batches: usize,
) -> Vec<u64> {
    let again = RematSet::from_actions(compute.iter().flatten());
    let forwards = |stage: usize| match remat.of(stage) {
        Remat::Selective | Remat::Offload => 0,
        _ => again.count(StageId::from_index(stage)),
    };
    let weight = |stage| (3 * micro_batches + forwards(stage)) as u64;
    (0..stages).map(weight).collect()
}
