//! Breadth-first: several stages on each device, all micro-batches on one before the next
//! (Lamy-Poirier 2022, arXiv 2211.05953, section 4).

use super::{action, backward};
use crate::action::{Action, Op};

/// ```text
///             time ->
/// device 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 -   2B1 -   2B2 -   0B0 -   0B1 -   0B2 -
/// device 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 -   3B1 -   3B2 -   1B0 -   1B1 -   1B2 -   .   .
/// ```
///
/// Device d holds V chunks of the model: the stages d, d + K, d + 2K and so on. It runs all
/// forwards of a chunk before those of the next, and likewise backwards, from its last chunk to its
/// first.
///
/// The bubble is that of interleaved 1F1B for M >= K, but all M micro-batches of all V chunks are
/// held, as in GPipe. In return, the backwards of a chunk run in one go: its gradients are complete
/// early, and can be summed over replicas during the backwards of the other chunks.
pub(super) fn actions(
    device: usize,
    devices: usize,
    chunks: usize,
    micro_batches: usize,
) -> Vec<Action> {
    let each = |chunk: usize| (0..micro_batches).map(move |m| (chunk * devices + device, m));
    let forwards = (0..chunks).flat_map(each).map(|(stage, m)| action(stage, Op::Forward, m));
    let backwards = (0..chunks).rev().flat_map(each).map(|(stage, m)| backward(stage, m));
    forwards.chain(backwards).collect()
}
