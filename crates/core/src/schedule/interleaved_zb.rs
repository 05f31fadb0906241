//! Interleaved 1F1B with each backward in two halves (Qi et al. 2023, arXiv 2401.10241, applied to
//! Narayanan et al. 2021).

use super::{fill::fill, interleaved, round_robin};
use crate::action::{ActionLists, Op};

/// ```text
///             time ->
/// device 0 | 0F0 0F1 2F0 2F1 0F2 2I0 2W0 0F3 2I1 2W1 2F2 0I0 0W0 2F3 0I1 2I2 0W1 2W2 2I3 0I2 0I3 2W3 0W2 0W3 .
/// device 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 1F2 1I0 3W0 1F3 1I1 3W1 3F2 3I2 1W0 3F3 3I3 1I2 1I3 1W1 3W2 3W3 1W2 1W3
/// ```
///
/// F and I have the order of interleaved 1F1B's F and B. W fills what would be bubble, or makes
/// room: a device holds at most what interleaved 1F1B's first device holds, 2(K-1) + (V-1)K + 1
/// micro-batches of one chunk each. If F, I and W take the same time and M is a multiple of K, the
/// bubble is K-1 times one of them; interleaved 1F1B's is 3(K-1).
pub(super) fn actions(devices: usize, chunks: usize, micro_batches: usize) -> ActionLists {
    let order = |device: usize| {
        let mut list = interleaved::actions(device, devices, chunks, micro_batches);
        for action in &mut list {
            if let Op::Backward(m) = action.op {
                action.op = Op::BackwardInput(m);
            }
        }
        list
    };
    let held_max = 2 * devices.saturating_sub(1) + chunks.saturating_sub(1) * devices + 1;
    let lists = (0..devices).map(order).collect();
    fill(lists, &round_robin(devices, chunks), held_max)
}
