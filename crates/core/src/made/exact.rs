//! Branch and bound: the best order, where the problem is small.
//!
//! The search builds active schedules (Giffler and Thompson 1960): of all actions that could run
//! next, the one that would end first is found, and one branch is opened for each action that could
//! begin on its device before that end. Some best order is active, because moving an action earlier
//! never hurts. There are two exceptions. A forward may take the room that another stage of its
//! device needs: leaving it out for now is a branch, too. And a backward may be shorter right after
//! its own forward ([`Problem::keeps_adjacent`]): then nothing is proven.
//!
//! A branch ends if its bound is no less than the best step, or if the same actions were done
//! before with no device, message or link later.

use std::collections::HashMap;

use super::{
    Candidate, Kind, Next, Orders, Problem,
    bound::{Path, again, backward, gradient},
    machine::{Machine, NEVER},
};

/// Problems of up to this many forwards are searched.
const FORWARDS_MAX: usize = 16;
/// States to compare with for each set of done actions.
const KEPT_MAX: usize = 64;
/// Branches that are always tried: more than small problems need.
const BRANCHES_MIN: u64 = 50_000;
/// A branch counts as this many simulated actions.
const BRANCH_ACTIONS: u64 = 200;
/// Sets of done actions that are remembered.
const SETS_MAX: usize = 1 << 20;

/// Whether the search can be expected to finish.
pub(super) fn is_small(problem: &Problem) -> bool {
    problem.stages.len() * problem.micro_batches <= FORWARDS_MAX
}

/// Improves `best` until it is optimal or the budget, in simulated actions, is spent. Returns the
/// best order, and the bound: the time of the best order if the search finished.
pub(super) fn search(
    problem: &Problem,
    best: Candidate,
    bound: u64,
    budget: u64,
) -> (Candidate, u64) {
    let path = Path::of(problem);
    let order = vec![Vec::new(); problem.devices()];
    let left = BRANCHES_MIN + budget / BRANCH_ACTIONS;
    let mut search = Search { path, best, bound, left, order, seen: HashMap::new(), problem };
    search.descend(&Machine::new(problem), &mut Vec::new());
    let is_proven = search.left > 0 && !depends_on_neighbours(problem);
    let proven = if is_proven { search.best.makespan } else { bound };
    (search.best, proven)
}

/// Whether a backward takes less time right after its own forward.
fn depends_on_neighbours(problem: &Problem) -> bool {
    let times = problem.stages.iter().zip(&problem.smaller).zip(&problem.keeps_adjacent);
    times.into_iter().any(|((own, smaller), keeps)| *keeps && own.again.max(smaller.again) > 0)
}

struct Search<'a> {
    problem: &'a Problem,
    path: Path<'a>,
    best: Candidate,
    bound: u64,
    /// How many branches may still be tried.
    left: u64,
    order: Orders,
    /// By what is done: the times of states that were searched.
    seen: HashMap<Vec<u8>, Vec<Vec<u64>>>,
}

impl Search<'_> {
    /// `passed`: forwards that were left out although they could run, by stage and number.
    fn descend(&mut self, machine: &Machine<'_>, passed: &mut Vec<(usize, usize)>) {
        if self.left == 0 || self.best.makespan <= self.bound {
            return;
        }
        if machine.is_done() {
            let makespan = machine.makespan();
            if makespan < self.best.makespan {
                self.best = Candidate { order: self.order.clone(), makespan };
            }
            return;
        }
        if self.lower(machine) >= self.best.makespan || self.was_better(machine, passed) {
            return;
        }
        let possible = self.possible(machine, passed);
        let ends = possible.iter().map(|&(next, start)| start + machine.duration(next));
        let first = possible.iter().zip(ends).min_by_key(|(_, end)| *end);
        let Some((&(first, _), end)) = first else { return };
        let device = self.problem.placement[first.stage];
        let mut branches: Vec<(u64, Next)> = possible
            .iter()
            .filter(|(next, start)| self.problem.placement[next.stage] == device && *start < end)
            .map(|&(next, start)| (start, next))
            .collect();
        branches.sort_by_key(|&(start, next)| (start, urgency(next.kind), next.stage));
        for &(start, next) in &branches {
            self.left = self.left.saturating_sub(1);
            let mut after = machine.clone();
            after.run(next, start);
            self.order[device].push(next);
            // What was left out may run again once there is more room.
            let frees = match next.kind {
                Kind::Forward => false,
                Kind::Input => machine.frees(next.stage),
                Kind::Weight | Kind::Whole => true,
            };
            let mut still = if frees { Vec::new() } else { passed.clone() };
            self.descend(&after, &mut still);
            self.order[device].pop();
        }
        let shares = self.problem.placement.iter().filter(|own| **own == device).count() > 1;
        if shares && first.kind == Kind::Forward {
            let own = (first.stage, machine.done[first.stage][0]);
            passed.push(own);
            self.descend(machine, passed);
            passed.pop();
        }
    }

    fn possible(&self, machine: &Machine<'_>, passed: &[(usize, usize)]) -> Vec<(Next, u64)> {
        let kinds: &[Kind] = match self.problem.splits {
            true => &[Kind::Forward, Kind::Input, Kind::Weight, Kind::Whole],
            false => &[Kind::Forward, Kind::Whole],
        };
        let stages = 0..self.problem.stages.len();
        let all = stages.flat_map(|stage| kinds.iter().map(move |&kind| Next { kind, stage }));
        let is_left_out = |next: &Next| {
            next.kind == Kind::Forward
                && passed.contains(&(next.stage, machine.done[next.stage][0]))
        };
        all.filter(|next| !is_left_out(next))
            .filter_map(|next| machine.start(next).map(|start| (next, start)))
            .collect()
    }

    /// No order that begins like `machine` takes less.
    fn lower(&self, machine: &Machine<'_>) -> u64 {
        let problem = self.problem;
        let (mut rest, mut gradients) = (machine.free.clone(), machine.free.clone());
        // From the lowest stage of a device that still has gradients to compute.
        let mut tails = vec![None; rest.len()];
        let earliest = self.earliest(machine);
        for device in 0..rest.len() {
            rest[device] = rest[device].max(earliest[device]);
            gradients[device] = rest[device];
        }
        for (stage, &[forwards, inputs, weights]) in machine.done.iter().enumerate() {
            let device = problem.placement[stage];
            for m in weights..problem.micro_batches {
                let times = problem.times(stage, m);
                let forward = if m >= forwards { times.forward } else { 0 };
                let own = again(problem, stage, times);
                let (back, all) = match m >= inputs {
                    true => (gradient(problem, times) + own, backward(problem, times) + own),
                    false => (0, times.weight),
                };
                rest[device] += forward + all;
                gradients[device] += forward + back;
            }
            if inputs < problem.micro_batches {
                let end = self.path.tail[stage] + self.path.norm_of_0(stage);
                tails[device].get_or_insert(end);
            }
        }
        let work = rest.iter().zip(&problem.norm).map(|(rest, norm)| rest + norm);
        let tails = gradients.iter().zip(&tails);
        let tails = tails.filter_map(|(gradients, tail)| Some(gradients + (*tail)?));
        work.chain(tails).max().unwrap_or(0) + problem.update
    }

    /// By device: when it can begin its next action at the earliest.
    fn earliest(&self, machine: &Machine<'_>) -> Vec<u64> {
        let problem = self.problem;
        let stages = problem.stages.len();
        let mut earliest = vec![NEVER; problem.devices()];
        let mut forward = vec![NEVER; stages];
        for stage in 0..stages {
            let [forwards, inputs, weights] = machine.done[stage];
            let device = problem.placement[stage];
            if weights < inputs {
                earliest[device] = machine.free[device];
            }
            if forwards == problem.micro_batches {
                continue;
            }
            let known = machine.values[stage * problem.micro_batches + forwards];
            let value = match known {
                NEVER => {
                    let before = problem.times(stage - 1, forwards).forward;
                    forward[stage - 1] + before + problem.transit(stage - 1, 0)
                }
                known => known,
            };
            forward[stage] = value.max(machine.free[device]);
            earliest[device] = earliest[device].min(forward[stage]);
        }
        let mut back = vec![NEVER; stages];
        for stage in (0..stages).rev() {
            let [forwards, inputs, _] = machine.done[stage];
            let device = problem.placement[stage];
            if inputs == problem.micro_batches {
                continue;
            }
            let times = problem.times(stage, inputs);
            let known = machine.gradients[stage * problem.micro_batches + inputs];
            let gradient = match known {
                NEVER if problem.gradient_from(stage).is_none() => forward[stage] + times.forward,
                NEVER => {
                    let own = gradient(problem, problem.times(stage + 1, inputs));
                    back[stage + 1] + own + problem.transit(stage, 1)
                }
                known => known,
            };
            let after = if forwards == inputs { forward[stage] + times.forward } else { 0 };
            back[stage] = gradient.max(machine.free[device]).max(after);
            let start = machine.free[device].max(gradient.saturating_sub(times.again)).max(after);
            earliest[device] = earliest[device].min(start);
        }
        for (own, free) in earliest.iter_mut().zip(&machine.free) {
            *own = if *own == NEVER { *free } else { (*own).max(*free) };
        }
        earliest
    }

    /// Whether the same actions were done before, and nothing was later.
    fn was_better(&mut self, machine: &Machine<'_>, passed: &[(usize, usize)]) -> bool {
        let counts = machine.done.iter().flatten().map(|&count| count as u8);
        let mut key: Vec<u8> = counts.collect();
        key.extend(machine.forwarded.iter().map(|last| last.map_or(u8::MAX, |own| own as u8)));
        key.push(u8::MAX);
        key.extend(passed.iter().flat_map(|&(stage, m)| [stage as u8, m as u8]));
        let mut times = machine.free.clone();
        for (stage, &[forwards, inputs, _]) in machine.done.iter().enumerate() {
            let row = stage * self.problem.micro_batches..(stage + 1) * self.problem.micro_batches;
            let known = |time: &&u64| **time != NEVER;
            let values = machine.values[row.clone()].iter().skip(forwards).filter(known);
            times.extend(values);
            times.extend(machine.gradients[row].iter().skip(inputs).filter(known));
        }
        times.extend(machine.links.iter().flatten());
        if self.seen.len() >= SETS_MAX && !self.seen.contains_key(&key) {
            return false;
        }
        let known = self.seen.entry(key).or_default();
        let is_within =
            |a: &[u64], b: &[u64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a <= b);
        if known.iter().any(|own| is_within(own, &times)) {
            return true;
        }
        known.retain(|own| !is_within(&times, own));
        if known.len() < KEPT_MAX {
            known.push(times);
        }
        false
    }
}

/// Branches are tried in this order if they begin together.
fn urgency(kind: Kind) -> u8 {
    match kind {
        Kind::Input => 0,
        Kind::Whole => 1,
        Kind::Forward => 2,
        Kind::Weight => 3,
    }
}
