//! List scheduling: at each moment, the device that can begin first takes the most urgent action.

use super::{Kind, Next, Orders, Problem, machine::Machine};

/// How a device chooses among the actions that it could begin.
#[derive(Debug, Clone, Copy)]
struct Rule {
    /// Whether backwards are split.
    splits: bool,
    /// Whether a forward comes before a gradient if both can begin.
    forwards_first: bool,
    /// A device begins no forward of its first stage while it holds this many micro-batches.
    held_max: usize,
    /// A weight gradient runs in a gap that is at least this many eighths of its time.
    gap_eighths: u64,
}

/// Maximum number of looks at a device by all rules together; a step takes one for each action and
/// device. Large problems have fewer rules, so that this stays below some seconds.
const LOOKS_MAX: u64 = 50_000_000;
/// Minimum number of rules.
const RULES_MIN: u64 = 4;

/// The order of each rule that completes a step.
pub(super) fn all(problem: &Problem) -> impl Iterator<Item = Orders> {
    let rules = chosen(rules(problem), problem.devices(), most(problem));
    rules.into_iter().filter_map(|rule| order(problem, rule))
}

/// All rules, or where these are too many the `most` that usually win: those that hold as many
/// micro-batches as there are devices, or any number, or twice as many as devices.
fn chosen(mut rules: Vec<Rule>, devices: usize, most: u64) -> Vec<Rule> {
    if rules.len() as u64 > most {
        let usual = [devices, usize::MAX, 2 * devices];
        let place = |held_max| usual.iter().position(|own| *own == held_max);
        rules.sort_by_key(|rule| place(rule.held_max).unwrap_or(usual.len()));
        rules.truncate(usize::try_from(most).unwrap_or(usize::MAX));
    }
    rules
}

/// The number of looks of all rules that [`all`] tries.
pub(super) fn cost(problem: &Problem) -> u64 {
    looks(problem).saturating_mul(most(problem).min(rules(problem).len() as u64))
}

/// Maximum number of rules.
fn most(problem: &Problem) -> u64 {
    (LOOKS_MAX / looks(problem)).max(RULES_MIN)
}

/// The number of looks of one rule.
fn looks(problem: &Problem) -> u64 {
    let kinds = if problem.splits { 3 } else { 2 };
    let actions = kinds * problem.stages.len() as u64 * problem.micro_batches as u64;
    actions.saturating_mul(problem.devices() as u64).max(1)
}

fn rules(problem: &Problem) -> Vec<Rule> {
    let stages = problem.stages.len();
    let mut caps = vec![1, 2, 3, 4, 5, 6, 8, usize::MAX];
    let devices = problem.devices();
    caps.extend([devices, devices + 1, devices + 2, 2 * devices, stages, stages + 1, 2 * stages]);
    caps.retain(|&cap| cap == usize::MAX || cap <= 2 * stages);
    caps.sort_unstable();
    caps.dedup();
    let splits: &[bool] = if problem.splits { &[true, false] } else { &[false] };
    let mut rules = Vec::new();
    for &splits in splits {
        let gaps: &[u64] = if splits { &[8, 4, 0] } else { &[8] };
        for &gap_eighths in gaps {
            for &held_max in &caps {
                for forwards_first in [false, true] {
                    rules.push(Rule { splits, forwards_first, held_max, gap_eighths });
                }
            }
        }
    }
    rules
}

/// An action that a device could run next.
struct Choice {
    next: Next,
    start: u64,
}

fn order(problem: &Problem, rule: Rule) -> Option<Orders> {
    let mut machine = Machine::new(problem);
    let mut order: Orders = vec![Vec::new(); problem.devices()];
    let on = |device: usize| {
        let stages = 0..problem.stages.len();
        stages.filter(|&stage| problem.placement[stage] == device).collect::<Vec<_>>()
    };
    let stages: Vec<Vec<usize>> = (0..problem.devices()).map(on).collect();
    while !machine.is_done() {
        let choices = stages.iter().enumerate();
        let choices = choices.filter_map(|(device, own)| {
            let choice = choose(&machine, own, rule)?;
            Some((choice.start, device, choice.next))
        });
        let (start, device, next) = choices.min_by_key(|(start, device, _)| (*start, *device))?;
        machine.run(next, start);
        order[device].push(next);
    }
    Some(order)
}

/// What a device runs next, as far as is known.
fn choose(machine: &Machine<'_>, stages: &[usize], rule: Rule) -> Option<Choice> {
    let start = |kind: Kind, stage: usize| {
        let next = Next { kind, stage };
        machine.start(next).map(|start| Choice { next, start })
    };
    let in_flight: usize =
        stages.iter().map(|&stage| machine.done[stage][0] - machine.done[stage][2]).sum();
    let is_full = in_flight >= rule.held_max;
    let backward = if rule.splits { Kind::Input } else { Kind::Whole };
    // Later stages first: their results are needed longest.
    let gradients = stages.iter().rev().filter_map(|&stage| start(backward, stage));
    let gradient = gradients.min_by_key(|choice| choice.start);
    let lowest = stages.first().copied();
    let forwards = stages.iter().rev().filter(|&&stage| !(is_full && Some(stage) == lowest));
    let forward =
        forwards.filter_map(|&stage| start(Kind::Forward, stage)).min_by_key(|own| own.start);
    let weights = stages.iter().filter_map(|&stage| start(Kind::Weight, stage));
    let weight = weights.min_by_key(|choice| machine.done[choice.next.stage][2]);
    let urgent = match (gradient, forward) {
        (Some(gradient), Some(forward)) => {
            let forward_wins = match rule.forwards_first {
                true => forward.start <= gradient.start,
                false => forward.start < gradient.start,
            };
            Some(if forward_wins { forward } else { gradient })
        }
        (gradient, forward) => gradient.or(forward),
    };
    match (urgent, weight) {
        (Some(urgent), Some(weight)) => {
            let gap = urgent.start - weight.start;
            let needed = machine.duration(weight.next).saturating_mul(rule.gap_eighths) / 8;
            Some(if gap > 0 && gap >= needed { weight } else { urgent })
        }
        (urgent, weight) => urgent.or(weight),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An even choice among the rules was of those that hold one micro-batch at a time.
    #[test]
    fn regression_few_rules_are_those_that_usually_win() {
        let all = || {
            let of = |held_max| {
                [false, true].map(|forwards_first| Rule {
                    splits: false,
                    forwards_first,
                    held_max,
                    gap_eighths: 8,
                })
            };
            [1, 2, 8, 16, usize::MAX].into_iter().flat_map(of).collect::<Vec<_>>()
        };
        let held = |rules: Vec<Rule>| -> Vec<(usize, bool)> {
            rules.into_iter().map(|rule| (rule.held_max, rule.forwards_first)).collect()
        };
        let few = held(chosen(all(), 8, 4));
        assert_eq!(few, [(8, false), (8, true), (usize::MAX, false), (usize::MAX, true)]);
        assert_eq!(held(chosen(all(), 8, 10)), held(all()));
    }
}
