//! Forwards only, for evaluation and prediction. Nothing is held.

use super::forward;
use crate::action::Action;

/// ```text
///            time ->
/// stage 0 | F0 F1 F2 F3 .
/// stage 1 | .  F0 F1 F2 F3
/// ```
pub(super) fn actions(stage: usize, _stages: usize, micro_batches: usize) -> Vec<Action> {
    (0..micro_batches).map(|m| forward(stage, m)).collect()
}
