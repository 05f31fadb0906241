//! 1F1B with a flush (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

use super::{backward, forward};
use crate::action::Action;

/// ```text
///            time ->
/// stage 0 | F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
/// stage 1 | .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
/// stage 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
/// stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
///           warm-up        steady           cool-down
/// ```
///
/// Warm-up is min(M, K-1-k) forwards, so stage k never holds more than min(K-k, M) inputs. GPipe
/// holds M. The bubble is the same.
pub(super) fn actions(stage: usize, stages: usize, micro_batches: usize) -> Vec<Action> {
    let warm_up = micro_batches.min(stages - 1 - stage);
    let warm = (0..warm_up).map(|m| forward(stage, m));
    let steady =
        (warm_up..micro_batches).flat_map(|m| [forward(stage, m), backward(stage, m - warm_up)]);
    let cool_down = (micro_batches - warm_up..micro_batches).map(|m| backward(stage, m));
    warm.chain(steady).chain(cool_down).collect()
}
