//! Which micro-batches a program recomputes.

use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
};

/// The set of micro-batches that each stage recomputes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RematSet {
    /// By stage, then by micro-batch. A missing entry is not recomputed.
    stages: Vec<Vec<bool>>,
}

impl RematSet {
    /// Collects the set from actions.
    pub fn from_actions<'a>(actions: impl Iterator<Item = &'a Action>) -> Self {
        let mut stages: Vec<Vec<bool>> = Vec::new();
        for action in actions {
            let Op::Rematerialize(m) = action.op else { continue };
            let (stage, m) = (action.stage.index(), m.index());
            if stages.len() <= stage {
                stages.resize_with(stage + 1, Vec::new);
            }
            if stages[stage].len() <= m {
                stages[stage].resize(m + 1, false);
            }
            stages[stage][m] = true;
        }
        Self { stages }
    }

    /// Whether `stage` recomputes `micro_batch`.
    pub fn contains(&self, stage: StageId, micro_batch: MicroBatch) -> bool {
        let own = self.stages.get(stage.index());
        own.and_then(|own| own.get(micro_batch.index())).copied().unwrap_or(false)
    }

    /// How many micro-batches `stage` recomputes.
    pub fn count(&self, stage: StageId) -> usize {
        let own = self.stages.get(stage.index());
        own.map_or(0, |own| own.iter().filter(|&&again| again).count())
    }
}
