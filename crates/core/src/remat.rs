//! Re-materialization: which forwards discard their activations, and where they are recomputed.
//!
//! Adding R to a schedule is one pass here, so no schedule knows of it. R stands directly before B;
//! [`crate::lower`] puts the wait for the gradient between the two, so that the recomputation starts
//! before the gradient arrives (Huang et al. 2019, section 2.3).

use std::{fmt, str::FromStr};

use crate::{
    action::{Action, Op},
    schedule::ActionLists,
};

/// The policy for a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Remat {
    /// Every forward keeps only its inputs; every backward recomputes first.
    Always,
    /// Every forward keeps all its activations.
    Never,
    /// Only where a backward does not directly follow its own forward; there nothing would be saved.
    #[default]
    UnlessAdjacent,
    /// As `Always`, with each stage cut into this many segments that keep their own inputs and are
    /// recomputed one at a time (Chen et al. 2016, arXiv 1604.06174): the peak is one segment's activations.
    Segments(u32),
}

impl Remat {
    /// Adds R before each B whose forward discards. Only F and B are expected in `lists`.
    pub fn apply(self, lists: &ActionLists) -> ActionLists {
        lists.iter().map(|list| self.apply_to_device(list)).collect()
    }

    fn apply_to_device(self, list: &[Action]) -> Vec<Action> {
        let mut result = Vec::with_capacity(list.len() * 2);
        for (position, &action) in list.iter().enumerate() {
            if let Op::Backward(m) = action.op {
                let forward = Action { stage: action.stage, op: Op::Forward(m) };
                let adjacent = position > 0 && list[position - 1] == forward;
                if self.discards(adjacent) {
                    result.push(Action { stage: action.stage, op: Op::Rematerialize(m) });
                }
            }
            result.push(action);
        }
        result
    }

    fn discards(self, adjacent: bool) -> bool {
        match self {
            Remat::Always | Remat::Segments(_) => true,
            Remat::Never => false,
            Remat::UnlessAdjacent => !adjacent,
        }
    }

    /// Into how many segments a stage is cut where it re-materializes.
    pub fn segments(self) -> usize {
        match self {
            Remat::Segments(segments) => segments.max(1) as usize,
            _ => 1,
        }
    }
}

impl fmt::Display for Remat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remat::Always => f.write_str("always"),
            Remat::Never => f.write_str("never"),
            Remat::UnlessAdjacent => f.write_str("unless-adjacent"),
            Remat::Segments(segments) => write!(f, "segments:{segments}"),
        }
    }
}

/// A policy that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no re-materialization '{0}': use always, never, unless-adjacent or segments:N (N from 1 to 1024)"
)]
pub struct UnknownRemat(String);

impl FromStr for Remat {
    type Err = UnknownRemat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || UnknownRemat(text.to_owned());
        match text {
            "always" => Ok(Remat::Always),
            "never" => Ok(Remat::Never),
            "unless-adjacent" => Ok(Remat::UnlessAdjacent),
            _ => {
                let number = text.strip_prefix("segments:").ok_or_else(error)?;
                let segments = number.parse().map_err(|_| error())?;
                if !(1..=1024).contains(&segments) {
                    return Err(error());
                }
                Ok(Remat::Segments(segments))
            }
        }
    }
}
