//! Where W goes, once the order of F and I is known.

use std::collections::VecDeque;

use super::ActionLists;
use crate::{
    action::{Action, Op},
    ids::MicroBatch,
};

/// Adds the second half of every backward to lists of F and I.
///
/// The lists run on a clock on which every action takes one unit. A device whose next F or I has to
/// wait runs W instead, if it owes one: the oldest. It also does so before an F if it already holds
/// `held_max` micro-batches, from their F to their W, counted on each stage. What is left then
/// comes at the end.
pub(super) fn fill(order: ActionLists, placement: &[usize], held_max: usize) -> ActionLists {
    let mut clock = Clock::new(&order, placement);
    let mut filled: ActionLists =
        order.iter().map(|list| Vec::with_capacity(list.len() * 2)).collect();
    while clock.advance(&order, held_max, &mut filled) {}
    filled
}

#[derive(Default)]
struct DeviceState {
    position: usize,
    held: usize,
    /// The first halves whose second half is still to come, oldest first.
    owed: VecDeque<Action>,
}

struct Clock {
    unit: usize,
    devices: Vec<DeviceState>,
    /// By stage and micro-batch, the unit in which F was done.
    forwards: Vec<Vec<Option<usize>>>,
    /// The same for I.
    inputs: Vec<Vec<Option<usize>>>,
}

impl Clock {
    fn new(order: &ActionLists, placement: &[usize]) -> Self {
        let micro_batch = |action: &Action| action.op.computes().map_or(0, MicroBatch::index);
        let micro_batches = order.iter().flatten().map(micro_batch).max().map_or(0, |m| m + 1);
        let undone = vec![vec![None; micro_batches]; placement.len()];
        Self {
            unit: 0,
            devices: order.iter().map(|_| DeviceState::default()).collect(),
            forwards: undone.clone(),
            inputs: undone,
        }
    }

    /// Lets every device run one unit. Returns whether any did.
    fn advance(&mut self, order: &ActionLists, held_max: usize, out: &mut ActionLists) -> bool {
        let mut moved = false;
        for (device, list) in order.iter().enumerate() {
            let next = list.get(self.devices[device].position).copied();
            let ready = next.filter(|&action| self.is_ready(action));
            let state = &mut self.devices[device];
            let is_full =
                |action: &Action| matches!(action.op, Op::Forward(_)) && state.held >= held_max;
            let run = match (ready.filter(|action| !is_full(action)), state.owed.pop_front()) {
                (Some(action), owed) => {
                    if let Some(owed) = owed {
                        state.owed.push_front(owed);
                    }
                    state.position += 1;
                    action
                }
                (None, Some(owed)) => owed,
                (None, None) => match ready {
                    Some(action) => {
                        state.position += 1;
                        action
                    }
                    None => continue,
                },
            };
            out[device].push(run);
            self.record(device, run);
            moved = true;
        }
        self.unit += 1;
        moved
    }

    /// Whether what the action needs was done before this unit.
    fn is_ready(&self, action: Action) -> bool {
        let (stage, stages) = (action.stage.index(), self.forwards.len());
        let before = |times: &[Vec<Option<usize>>], stage: usize, m: MicroBatch| {
            times[stage][m.index()].is_some_and(|unit| unit < self.unit)
        };
        match action.op {
            Op::Forward(m) => stage == 0 || before(&self.forwards, stage - 1, m),
            Op::BackwardInput(m) if stage + 1 == stages => before(&self.forwards, stage, m),
            Op::BackwardInput(m) => before(&self.inputs, stage + 1, m),
            _ => true,
        }
    }

    fn record(&mut self, device: usize, action: Action) {
        let (stage, state) = (action.stage.index(), &mut self.devices[device]);
        match action.op {
            Op::Forward(m) => {
                state.held += 1;
                self.forwards[stage][m.index()] = Some(self.unit);
            }
            Op::BackwardInput(m) => {
                self.inputs[stage][m.index()] = Some(self.unit);
                state.owed.push_back(Action { op: Op::BackwardWeight(m), ..action });
            }
            _ => state.held -= 1,
        }
    }
}
