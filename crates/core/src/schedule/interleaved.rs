//! Interleaved 1F1B: several stages on each device (Narayanan et al. 2021, arXiv 2104.04473,
//! section 2.2).

use super::{action, without};
use crate::action::{Action, Op};

/// ```text
///             time ->
/// device 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -   0B2 -   0B3 -
/// device 1 | .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -   .   .
/// ```
///
/// Device d holds V chunks of the model: the stages d, d + K, d + 2K and so on.
///
/// Micro-batches pass through a device's chunks in groups of K. A group runs its forwards on the
/// first chunk, then on the second, and so on; its backwards visit the chunks in reverse order.
/// Device d first runs min(VM, 2(K-1-d) + (V-1)K) forwards, then alternates one forward and one
/// backward.
///
/// A stage has 1/V of a device's work, so the bubble is 1/V of 1F1B's. Device d holds up to
/// 2(K-1-d) + (V-1)K + 1 micro-batches of one chunk each. With 1F1B it holds K-d micro-batches of
/// all V chunks.
///
/// If M is not a multiple of K, the last group is smaller. The order is then that of the next
/// multiple, without the missing micro-batches. It takes longer than M micro-batches alone would
/// need, but never longer than 1F1B (shown for K <= 8, M <= 32).
pub(super) fn actions(
    device: usize,
    devices: usize,
    chunks: usize,
    micro_batches: usize,
) -> Vec<Action> {
    let whole = micro_batches.div_ceil(devices) * devices;
    // The chunk and micro-batch of the device's number-th forward or backward.
    let place = |number: usize| {
        let (group, within) = (number / (devices * chunks), number % (devices * chunks));
        (within / devices, group * devices + within % devices)
    };
    let forward = |number: usize| {
        let (chunk, m) = place(number);
        action(chunk * devices + device, Op::Forward, m)
    };
    let backward = |number: usize| {
        let (chunk, m) = place(number);
        action((chunks - 1 - chunk) * devices + device, Op::Backward, m)
    };
    let total = whole * chunks;
    let warm_up = total.min(2 * (devices - 1 - device) + chunks.saturating_sub(1) * devices);
    let warm = (0..warm_up).map(forward);
    let steady = (warm_up..total).flat_map(|n| [forward(n), backward(n - warm_up)]);
    let cool_down = (total - warm_up..total).map(backward);
    without(warm.chain(steady).chain(cool_down), micro_batches)
}
