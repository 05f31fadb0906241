//! Local search: small changes of an order, mostly on its critical path.
//!
//! A step cannot become shorter unless something on a critical path does. A path is followed back
//! from the last action: to the action before it on its device if that made it wait, otherwise to
//! the one whose result it waited for. A random action on the path moves earlier in its list, or
//! the action before it moves later, or a backward is split or put together.
//!
//! A change that takes longer is kept, too, if it takes longer by less than a threshold that falls
//! to zero (threshold accepting: Dueck and Scheuer 1990). The best order of all is returned.

use super::{Candidate, Kind, Next, Orders, Problem, machine::Machine};
use crate::splitmix::Stream;

/// How far an action moves in its list, at most.
const DISTANCE_MAX: usize = 12;
/// The threshold at first, as a part of the bound.
const THRESHOLD_PARTS: u64 = 200;

/// Changes the order of `best` until it reaches `bound` or `budget` actions were simulated.
pub(super) fn improve(problem: &Problem, best: Candidate, bound: u64, budget: u64) -> Candidate {
    let size: usize = best.order.iter().map(Vec::len).sum();
    let rounds = budget / (size.max(1) as u64);
    let mut random = Stream::new(size as u64);
    let (mut current, mut best) = (best.clone(), best);
    let Some(mut path) = Path::of(problem, &current.order) else { return best };
    for round in 0..rounds {
        if best.makespan <= bound || path.0.is_empty() {
            break;
        }
        let threshold = bound / THRESHOLD_PARTS * (rounds - round) / rounds;
        let order = changed(problem, &mut random, &current.order, &path);
        let Some(found) = order.and_then(|order| Candidate::new(problem, order)) else { continue };
        if found.makespan > current.makespan.max(best.makespan.saturating_add(threshold)) {
            continue;
        }
        if found.makespan < best.makespan {
            best = found.clone();
        }
        if let Some(new) = Path::of(problem, &found.order) {
            (current, path) = (found, new);
        }
    }
    best
}

/// A random change near the critical path; `None` if it makes no sense.
fn changed(problem: &Problem, random: &mut Stream, order: &Orders, path: &Path) -> Option<Orders> {
    let (device, at) = path.0[random.below(path.0.len())];
    let list = &order[device];
    let mut order = order.clone();
    match random.below(if problem.splits { 8 } else { 5 }) {
        0..=2 => {
            let to = at.checked_sub(1 + random.below(DISTANCE_MAX.min(at.max(1))))?;
            let next = order[device].remove(at);
            order[device].insert(to, next);
        }
        3..=4 => {
            // What made it wait moves behind it.
            let from = at.checked_sub(1 + random.below(3))?;
            let far = random.below(DISTANCE_MAX.min(list.len() - at));
            let next = order[device].remove(from);
            order[device].insert(at + far, next);
        }
        5..=6 => {
            let whole = (at..list.len().min(at + 3)).find(|&at| list[at].kind == Kind::Whole)?;
            let stage = list[whole].stage;
            order[device][whole] = Next { kind: Kind::Input, stage };
            let to = (whole + 1 + random.below(DISTANCE_MAX)).min(list.len());
            order[device].insert(to, Next { kind: Kind::Weight, stage });
        }
        _ => join(&mut order[device], at)?,
    }
    Some(order)
}

/// Puts the halves of the backward at `at` together.
fn join(list: &mut Vec<Next>, at: usize) -> Option<()> {
    let Next { kind: Kind::Input, stage } = list[at] else { return None };
    let is_of = |next: &&Next, kinds: [Kind; 2]| next.stage == stage && kinds.contains(&next.kind);
    let number = list[..at].iter().filter(|next| is_of(next, [Kind::Input, Kind::Whole])).count();
    let mut weights =
        list.iter().enumerate().filter(|(_, next)| is_of(next, [Kind::Weight, Kind::Whole]));
    let (own, next) = weights.nth(number)?;
    if next.kind != Kind::Weight || own <= at {
        return None;
    }
    list.remove(own);
    list[at].kind = Kind::Whole;
    Some(())
}

/// A critical path: devices and positions of its actions.
struct Path(Vec<(usize, usize)>);

impl Path {
    /// `None` if the order does not complete.
    fn of(problem: &Problem, order: &Orders) -> Option<Self> {
        let mut machine = Machine::new(problem);
        let mut times: Vec<Vec<(u64, u64)>> =
            order.iter().map(|list| Vec::with_capacity(list.len())).collect();
        // By stage and micro-batch: where the forward and the gradient are made.
        let places = problem.stages.len() * problem.micro_batches;
        let mut made = [vec![None; places], vec![None; places]];
        let mut moved = true;
        while moved {
            moved = false;
            for (device, list) in order.iter().enumerate() {
                while let Some(&next) = list.get(times[device].len())
                    && let Some(start) = machine.start(next)
                {
                    let place = (device, times[device].len());
                    let at = next.stage * problem.micro_batches;
                    let [forwards, inputs, _] = machine.done[next.stage];
                    match next.kind {
                        Kind::Forward => made[0][at + forwards] = Some(place),
                        Kind::Input | Kind::Whole => made[1][at + inputs] = Some(place),
                        Kind::Weight => {}
                    }
                    let end = machine.run(next, start);
                    times[device].push((start, end));
                    moved = true;
                }
            }
        }
        if !machine.is_done() {
            return None;
        }
        Some(Self(follow(problem, order, &times, &made)))
    }
}

/// Follows the path from the last action back to the start of the step.
fn follow(
    problem: &Problem,
    order: &Orders,
    times: &[Vec<(u64, u64)>],
    made: &[Vec<Option<(usize, usize)>>; 2],
) -> Vec<(usize, usize)> {
    let ends = times.iter().enumerate().filter_map(|(device, times)| {
        let (_, end) = times.last()?;
        Some((end + problem.norm[device], device, times.len() - 1))
    });
    let mut path = Vec::new();
    let mut place = ends.max().map(|(_, device, at)| (device, at));
    let stages = problem.stages.len();
    // The micro-batch of an action is how many of its kind come before it.
    let numbers: Vec<Vec<usize>> = order.iter().map(|list| numbered(list, stages)).collect();
    while let Some((device, at)) = place {
        path.push((device, at));
        let start = times[device][at].0;
        let Next { kind, stage } = order[device][at];
        let m = numbers[device][at];
        place = match at.checked_sub(1) {
            Some(before) if times[device][before].1 == start => Some((device, before)),
            _ if start == 0 => None,
            _ => match kind {
                Kind::Forward => {
                    stage.checked_sub(1).and_then(|s| made[0][s * problem.micro_batches + m])
                }
                _ => match problem.gradient_from(stage) {
                    Some(from) => made[1][from * problem.micro_batches + m],
                    None => made[0][stage * problem.micro_batches + m],
                },
            },
        };
    }
    path
}

fn numbered(list: &[Next], stages: usize) -> Vec<usize> {
    let mut done = vec![[0; 3]; stages];
    let number = |next: &Next| {
        let counts = &mut done[next.stage];
        let which = match next.kind {
            Kind::Forward => 0,
            Kind::Input | Kind::Whole => 1,
            Kind::Weight => 2,
        };
        counts[which] += 1;
        counts[which] - 1
    };
    list.iter().map(number).collect()
}
