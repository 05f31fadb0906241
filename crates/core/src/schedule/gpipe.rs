//! GPipe (Huang et al. 2019, section 2.3 and figure 2c): all forwards, then all backwards.

use super::{backward, forward};
use crate::action::Action;

/// ```text
///            time ->
/// stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
/// stage 1 | .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
/// stage 2 | .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
/// stage 3 | .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
/// ```
///
/// The paper draws the backwards in descending order. Ascending order has the same bubble, and it
/// makes the sum of gradients bit-identical to that of every other schedule.
pub(super) fn actions(stage: usize, _stages: usize, micro_batches: usize) -> Vec<Action> {
    let forwards = (0..micro_batches).map(|m| forward(stage, m));
    let backwards = (0..micro_batches).map(|m| backward(stage, m));
    forwards.chain(backwards).collect()
}
