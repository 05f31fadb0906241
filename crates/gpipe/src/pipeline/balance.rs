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

/// Where to cut.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Balance {
    /// By the layers' cost estimates, so that the most expensive stage costs least.
    #[default]
    Cost,
    /// The same number of layers per stage.
    Uniform,
    /// Layers per stage.
    Layers(Vec<usize>),
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
    /// Layers per stage. `costs` are the layers' and `weights` what a unit of them takes each
    /// stage.
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

/// What a unit of a layer's forward costs each stage in a step of `micro_batches` micro-batches: a
/// forward and a backward of twice that for each, and the forwards that it runs again. Under 1F1B
/// the last stage runs none again unless told to. A selective one is a small part of a forward, and
/// does not count.
pub(super) fn stage_weights(
    compute: &ActionLists,
    remat: &RematPolicies,
    stages: usize,
    micro_batches: usize,
) -> Vec<u64> {
    let again = RematSet::from_actions(compute.iter().flatten());
    let forwards = |stage: usize| match remat.of(stage) {
        Remat::Selective => 0,
        _ => again.count(StageId::from_index(stage)),
    };
    let weight = |stage| (3 * micro_batches + forwards(stage)) as u64;
    (0..stages).map(weight).collect()
}
