//! A virtual machine that executes an order, action by action.

use super::{Kind, Next, Orders, Problem, Transit};

/// What has not been sent yet.
pub(super) const NEVER: u64 = u64::MAX;

/// The state after some actions.
#[derive(Clone)]
pub(super) struct Machine<'a> {
    pub(super) problem: &'a Problem,
    /// By device: when its last action ended.
    pub(super) free: Vec<u64>,
    /// By stage: how many forwards, input gradients and weight gradients are done.
    pub(super) done: Vec<[usize; 3]>,
    /// By stage and micro-batch: when its input is there.
    pub(super) values: Vec<u64>,
    /// By stage and micro-batch: when the gradient of its output is there.
    pub(super) gradients: Vec<u64>,
    /// By stage but the last, and direction: when the last message has left the link.
    pub(super) links: Vec<[u64; 2]>,
    /// By device: what its stages hold.
    pub(super) held: Vec<u64>,
    /// By device: its last action, if that was a forward.
    pub(super) forwarded: Vec<Option<usize>>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(problem: &'a Problem) -> Self {
        let (stages, devices) = (problem.stages.len(), problem.devices());
        let mut values = vec![NEVER; stages * problem.micro_batches];
        values[..problem.micro_batches.min(stages * problem.micro_batches)].fill(0);
        Self {
            problem,
            free: vec![0; devices],
            done: vec![[0; 3]; stages],
            gradients: vec![NEVER; values.len()],
            values,
            links: vec![[0; 2]; stages.saturating_sub(1)],
            held: vec![0; devices],
            forwarded: vec![None; devices],
        }
    }

    fn at(&self, stage: usize, micro_batch: usize) -> usize {
        stage * self.problem.micro_batches + micro_batch
    }

    /// When `next` can begin: not before its device is free, its input is there and there is room
    /// for what it holds. `None` if that is not known yet.
    pub(super) fn start(&self, next: Next) -> Option<u64> {
        let [forwards, inputs, weights] = self.done[next.stage];
        let device = self.problem.placement[next.stage];
        let free = self.free[device];
        match next.kind {
            Kind::Forward => {
                if forwards == self.problem.micro_batches || !self.has_room(next.stage) {
                    return None;
                }
                let value = self.values[self.at(next.stage, forwards)];
                (value != NEVER).then(|| free.max(value))
            }
            Kind::Weight => (weights < inputs).then_some(free),
            Kind::Input | Kind::Whole => {
                if inputs == forwards || (next.kind == Kind::Whole && weights < inputs) {
                    return None;
                }
                let gradient = self.gradients[self.at(next.stage, inputs)];
                // The recomputation does not wait for the gradient.
                let again = self.again(next.stage, inputs);
                (gradient != NEVER).then(|| free.max(gradient.saturating_sub(again)))
            }
        }
    }

    /// Whether the device has room for another micro-batch of `stage`.
    pub(super) fn has_room(&self, stage: usize) -> bool {
        let device = self.problem.placement[stage];
        let held = self.problem.times(stage, self.done[stage][0]).held;
        self.held[device].saturating_add(held) <= self.problem.room[device]
    }

    /// Whether the first half of the next backward of `stage` makes room.
    pub(super) fn frees(&self, stage: usize) -> bool {
        let times = self.problem.times(stage, self.done[stage][1]);
        times.split < times.held
    }

    /// What the backward of a micro-batch recomputes, if it runs now.
    fn again(&self, stage: usize, micro_batch: usize) -> u64 {
        let device = self.problem.placement[stage];
        let adjacent = self.forwarded[device] == Some(stage)
            && self.done[stage][0] == micro_batch + 1
            && self.problem.keeps_adjacent[stage];
        if adjacent { 0 } else { self.problem.times(stage, micro_batch).again }
    }

    /// How long `next` keeps its device busy.
    pub(super) fn duration(&self, next: Next) -> u64 {
        let [forwards, inputs, weights] = self.done[next.stage];
        let times = |m| self.problem.times(next.stage, m);
        match next.kind {
            Kind::Forward => times(forwards).forward,
            Kind::Weight => times(weights).weight,
            Kind::Input => times(inputs).input + self.again(next.stage, inputs),
            Kind::Whole => times(inputs).backward + self.again(next.stage, inputs),
        }
    }

    /// Runs `next`, which begins at `start`. Returns when it ends.
    pub(super) fn run(&mut self, next: Next, start: u64) -> u64 {
        let stage = next.stage;
        let device = self.problem.placement[stage];
        let end = start + self.duration(next);
        let [forwards, inputs, weights] = self.done[stage];
        match next.kind {
            Kind::Forward => {
                let times = self.problem.times(stage, forwards);
                self.held[device] += times.held;
                self.done[stage][0] += 1;
                if stage + 1 < self.problem.stages.len() {
                    let there = self.sent(stage, 0, end);
                    let at = self.at(stage + 1, forwards);
                    self.values[at] = there;
                }
                if self.problem.gradient_from(stage).is_none() {
                    let at = self.at(stage, forwards);
                    self.gradients[at] = end;
                }
            }
            Kind::Weight => {
                let times = self.problem.times(stage, weights);
                self.held[device] -= times.split;
                self.done[stage][2] += 1;
            }
            Kind::Input | Kind::Whole => {
                let times = self.problem.times(stage, inputs);
                self.held[device] -= times.held;
                self.done[stage][1] += 1;
                if next.kind == Kind::Whole {
                    self.done[stage][2] += 1;
                } else {
                    self.held[device] += times.split;
                }
                if stage > 0 && self.problem.waits_for_gradient[stage - 1] {
                    let there = self.sent(stage - 1, 1, end);
                    let at = self.at(stage - 1, inputs);
                    self.gradients[at] = there;
                }
            }
        }
        self.free[device] = end;
        self.forwarded[device] = (next.kind == Kind::Forward).then_some(stage);
        end
    }

    /// When a message over the boundary after `stage`, forward (0) or back (1), is there.
    fn sent(&mut self, stage: usize, back: usize, time: u64) -> u64 {
        if self.problem.hands_over(stage) {
            return time;
        }
        let Transit { occupied, latency } = self.problem.links[stage][back];
        let link = &mut self.links[stage][back];
        *link = time.max(*link) + occupied;
        *link + latency
    }

    /// Whether every stage has run everything.
    pub(super) fn is_done(&self) -> bool {
        self.done.iter().all(|done| done[2] == self.problem.micro_batches)
    }

    /// The end of the step if nothing more runs.
    pub(super) fn makespan(&self) -> u64 {
        let ready = self.free.iter().zip(&self.problem.norm).map(|(free, norm)| free + norm);
        ready.max().unwrap_or(0) + self.problem.update
    }
}

/// The time of a step in this order; `None` if it deadlocks, is incomplete or needs more room than
/// there is.
pub(super) fn run(problem: &Problem, order: &Orders) -> Option<u64> {
    let mut machine = Machine::new(problem);
    let mut positions = vec![0; order.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for (device, list) in order.iter().enumerate() {
            while let Some(&next) = list.get(positions[device])
                && let Some(start) = machine.start(next)
            {
                machine.run(next, start);
                positions[device] += 1;
                moved = true;
            }
        }
    }
    let all = order.iter().zip(&positions).all(|(list, done)| *done == list.len());
    (all && machine.is_done()).then(|| machine.makespan())
}
