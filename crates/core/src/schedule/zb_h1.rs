//! ZB-H1: 1F1B with each backward in two halves (Qi et al. 2023, arXiv 2401.10241, section 2.3,
//! figure 2).

use super::{action, forward};
use crate::action::{Action, Op};

/// ```text
///            time ->
/// stage 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
/// stage 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
/// stage 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
/// stage 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
/// ```
///
/// Only I, the input gradients, is on the way back to stage 0. W, the weight gradients, fills what
/// would be bubble. F and I have the order of 1F1B. In the steady phase, stage k's W is k
/// micro-batches behind its I. No stage therefore holds more than min(K, M) micro-batches, as many
/// as 1F1B's first stage. The remaining W fill the cool-down. If F, I and W take the same time and
/// M >= K, the bubble is (K-1) of these times; 1F1B's is 3 (K-1).
pub(super) fn actions(stage: usize, stages: usize, micro_batches: usize) -> Vec<Action> {
    let warm_up = micro_batches.min(stages - 1 - stage);
    let input = |m| action(stage, Op::BackwardInput, m);
    let weight = |m| action(stage, Op::BackwardWeight, m);
    let mut list: Vec<Action> = (0..warm_up).map(|m| forward(stage, m)).collect();
    let mut weights = 0;
    for inputs in 0..micro_batches {
        let steady = warm_up + inputs < micro_batches;
        if steady {
            list.push(forward(stage, warm_up + inputs));
        }
        list.push(input(inputs));
        if !steady || inputs >= weights + stage {
            list.push(weight(weights));
            weights += 1;
        }
    }
    list.extend((weights..micro_batches).map(weight));
    list
}
