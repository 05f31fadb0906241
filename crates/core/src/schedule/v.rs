//! Schedules whose stages lie in a V: device d holds stage d on the way down and stage 2K-1-d on
//! the way up. The last device thus hands its activations over to itself, and the first device
//! holds both the first and the last stage, so the loss is computed where the batch was read.
//!
//! Each backward is split. The order of F and I is here; [`super::fill`] adds W where a device
//! would wait. F, I and W each take one unit in these drawings.

use super::{action, fill::fill, without};
use crate::action::{Action, ActionLists, Op};

/// ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6), for K = 2 and M = 4:
///
/// ```text
///            time ->
/// device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3 .
/// device 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
/// ```
///
/// Device d runs 2(K-d)-1 forwards on its first stage, then d times a forward of each stage, then
/// K-d forwards of its second stage, each followed by its I. From there it alternates F and I on
/// both stages.
///
/// Each device holds up to 2K half-stages, what 1F1B's first device holds. If F, I and W take the
/// same time, the idle time of a step is K-1 of them for M >= K, which no schedule with this
/// placement can undercut: the last device begins that late. For M >= 2K-1 no device waits between
/// its first and its last action.
pub(super) fn zb_v(devices: usize, micro_batches: usize) -> ActionLists {
    // The warm-up runs this many. Micro-batches that do not exist are left out at the end.
    let whole = micro_batches.max(2 * devices);
    let order = |device: usize| {
        let [down, up] = stages(device, devices);
        let mut list = Vec::with_capacity(4 * whole);
        let mut next = [0; 4];
        let mut push = |list: &mut Vec<Action>, kind: Kind| {
            let at = &mut next[kind as usize];
            if *at < whole {
                list.push(kind.action([down, up], *at));
                *at += 1;
            }
        };
        for _ in 0..2 * (devices - device) - 1 {
            push(&mut list, Kind::ForwardDown);
        }
        for _ in 0..device {
            push(&mut list, Kind::ForwardUp);
            push(&mut list, Kind::ForwardDown);
        }
        for _ in device..devices {
            push(&mut list, Kind::ForwardUp);
            push(&mut list, Kind::InputUp);
        }
        for _ in 0..whole {
            push(&mut list, Kind::ForwardDown);
            push(&mut list, Kind::InputDown);
            push(&mut list, Kind::ForwardUp);
            push(&mut list, Kind::InputUp);
        }
        without(list.into_iter(), micro_batches)
    };
    let lists = (0..devices).map(order).collect();
    fill(lists, &placement(devices), 2 * devices)
}

/// V-Half (Qi et al. 2024, arXiv 2405.15362, section 3): about half of 1F1B's memory.
///
/// A micro-batch takes two units from device to device on the way down and one on the way up, both
/// in forwards and in backwards. The next micro-batch follows six units later. Before W is added,
/// one micro-batch looks like this for K = 3:
///
/// ```text
///            time ->
/// device 0 | 0F .  .  .  .  .  .  5F 5I .  .  .  .  .  .  .  0I
/// device 1 | .  .  1F .  .  .  4F .  .  .  4I .  .  .  .  1I .
/// device 2 | .  .  .  .  2F 3F .  .  .  .  .  .  3I .  2I .  .
/// ```
///
/// Both stages of a device together hold a micro-batch for about 6K units, so a device holds at
/// most K + 2 half-stages; 1F1B's first device holds 2K. If F, I and W take the same time, the idle
/// time is 3K-5 of them for K >= 3; 1F1B's is 6(K-1).
pub(super) fn v_half(devices: usize, micro_batches: usize) -> ActionLists {
    repeated(devices, micro_batches, &Pattern::half(devices), devices + 2)
}

/// V-Min (Qi et al. 2024, arXiv 2405.15362, section 3): about a third of 1F1B's memory.
///
/// Like V-Half, but a micro-batch takes one unit from device to device, which is the least. For
/// K = 4:
///
/// ```text
///            time ->
/// device 0 | 0F .  .  .  .  .  .  7F 7I .  .  .  .  .  .  0I
/// device 1 | .  1F .  .  .  .  6F .  .  6I .  .  .  .  1I .
/// device 2 | .  .  2F .  .  5F .  .  .  .  5I .  .  2I .  .
/// device 3 | .  .  .  3F 4F .  .  .  .  .  .  4I 3I .  .  .
/// ```
///
/// Both stages of a device together hold a micro-batch for about 4K units, so a device holds at
/// most 2K/3 + 3 half-stages. If F, I and W take the same time, the idle time is 4K-5 of them for
/// K >= 3; 1F1B's is 6(K-1). If their times differ, the idle time grows with M (section 3.2).
pub(super) fn v_min(devices: usize, micro_batches: usize) -> ActionLists {
    repeated(devices, micro_batches, &Pattern::min(devices), (2 * devices).div_ceil(3) + 2)
}

/// The device of each of the 2K stages.
pub(super) fn placement(devices: usize) -> Vec<usize> {
    (0..devices).chain((0..devices).rev()).collect()
}

/// The two stages of a device.
fn stages(device: usize, devices: usize) -> [usize; 2] {
    [device, 2 * devices - 1 - device]
}

/// What a device does with a micro-batch, besides W.
#[derive(Clone, Copy)]
enum Kind {
    ForwardDown,
    ForwardUp,
    InputUp,
    InputDown,
}

impl Kind {
    fn action(self, [down, up]: [usize; 2], micro_batch: usize) -> Action {
        let (stage, op): (_, fn(_) -> Op) = match self {
            Kind::ForwardDown => (down, Op::Forward),
            Kind::ForwardUp => (up, Op::Forward),
            Kind::InputUp => (up, Op::BackwardInput),
            Kind::InputDown => (down, Op::BackwardInput),
        };
        action(stage, op, micro_batch)
    }
}

/// The unit in which a device does each [`Kind`] of micro-batch 0. Micro-batch m follows
/// [`Pattern::PERIOD`] x m units later. No device has two actions in one unit.
struct Pattern {
    /// Units from device to device on the way down. On the way up it is one.
    down: usize,
    /// Units from the end of the way down to the way up, in forwards and in backwards.
    turns: [usize; 2],
}

impl Pattern {
    /// F, I and W of both stages.
    const PERIOD: usize = 6;

    fn half(devices: usize) -> Self {
        let turns = if devices % 2 == 1 { [1, 2] } else { [4, 5] };
        Self { down: 2, turns }
    }

    fn min(devices: usize) -> Self {
        let turns = if devices.is_multiple_of(3) { [3, 3] } else { [1, 1] };
        Self { down: 1, turns }
    }

    fn units(&self, device: usize, devices: usize) -> [usize; 4] {
        let (above, below) = (device, devices - 1 - device);
        let way_down = self.down * (devices - 1);
        let forward_up = way_down + self.turns[0];
        let input_up = forward_up + devices;
        let input_down = input_up + way_down + self.turns[1];
        [self.down * above, forward_up + below, input_up + self.down * above, input_down + below]
    }
}

/// The order in which micro-batches that start one period after another run, with W in between.
fn repeated(
    devices: usize,
    micro_batches: usize,
    pattern: &Pattern,
    held_max: usize,
) -> ActionLists {
    let kinds = [Kind::ForwardDown, Kind::ForwardUp, Kind::InputUp, Kind::InputDown];
    let order = |device: usize| {
        let mut timed: Vec<(usize, Action)> = Vec::with_capacity(4 * micro_batches);
        for m in 0..micro_batches {
            for (kind, unit) in kinds.iter().zip(pattern.units(device, devices)) {
                let action = kind.action(stages(device, devices), m);
                timed.push((unit + m * Pattern::PERIOD, action));
            }
        }
        timed.sort_by_key(|(unit, _)| *unit);
        timed.into_iter().map(|(_, action)| action).collect()
    };
    let lists = (0..devices).map(order).collect();
    fill(lists, &placement(devices), held_max)
}
