//! What a stage does for K, M and a schedule under each policy, independent of its layers: which
//! micro-batches it recomputes, and how many actions of each kind lie where in its list.

use std::ops::Range;

use crate::{
    action::{Action, Op},
    remat::Remat,
    schedule::{ActionLists, Schedule},
    simulate::StageCost,
};

/// The most values N of `keep:N` to try for a stage. If there are more, an even selection is tried.
const KEEP_MAX: u32 = 12;
/// Stages of up to this many layers are tried with every number of segments.
const SEGMENTS_ALL: usize = 8;

/// Counts of micro-batches, by size (larger, smaller) and by whether they are recomputed.
type Tally = [[u64; 2]; 2];

/// What one policy recomputes on one stage.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    pub policy: Remat,
    /// By micro-batch.
    discards: Vec<bool>,
    all: Tally,
    /// Forwards of the micro-batches that the last stage runs before its first backward.
    lead: Tally,
    /// Forwards after this stage's first backward.
    late: Tally,
    /// Re-materializations of all micro-batches except the first.
    again: Tally,
}

impl Pattern {
    /// Whether anything is recomputed.
    pub fn recomputes(&self) -> bool {
        self.discards.contains(&true)
    }

    /// Whether both recompute the same micro-batches.
    pub fn recomputes_as(&self, other: &Self) -> bool {
        self.discards == other.discards
    }
}

/// The times of a stage that the bounds use, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Figures {
    /// The first micro-batch's forward.
    pub first: u64,
    /// The last micro-batch's backward.
    pub last: u64,
    /// All forwards, re-materializations and backwards.
    pub work: u64,
    /// Like `work`, without what can run while the first gradient is on its way.
    pub turn: u64,
    /// The time to pass down and back up through the stage on the way to that gradient.
    pub around: u64,
    /// Norm.
    pub norm: u64,
    /// Update.
    pub update: u64,
}

impl Figures {
    /// The minimum of each figure.
    pub fn min(self, other: Self) -> Self {
        Self {
            first: self.first.min(other.first),
            last: self.last.min(other.last),
            work: self.work.min(other.work),
            turn: self.turn.min(other.turn),
            around: self.around.min(other.around),
            norm: self.norm.min(other.norm),
            update: self.update.min(other.update),
        }
    }
}

/// The lists of all stages for K, M and a schedule.
#[derive(Debug)]
pub(super) struct Lists {
    pub lists: ActionLists,
    micro_batches: usize,
    /// The first micro-batch of the smaller size.
    smaller_from: usize,
    pub trains: bool,
    /// Forwards before the last stage's first backward.
    lead: usize,
}

impl Lists {
    pub fn new(schedule: &Schedule, stages: usize, micro_batches: usize, samples: usize) -> Self {
        let lists = schedule.actions(stages, micro_batches);
        let lead = lists.last().map_or(0, |list| before_backward(list));
        let trains = lists.iter().flatten().any(|action| action.op.goes_back().is_some());
        let smaller_from = match samples % micro_batches {
            0 => micro_batches,
            larger => larger,
        };
        Self { lists, micro_batches, smaller_from, trains, lead }
    }

    fn size(&self, micro_batch: usize) -> usize {
        usize::from(micro_batch >= self.smaller_from)
    }

    fn tally(&self, part: Range<usize>, discards: impl Fn(usize) -> bool) -> Tally {
        let mut tally = Tally::default();
        for m in part {
            tally[self.size(m)][usize::from(discards(m))] += 1;
        }
        tally
    }

    /// The pattern of one policy on a stage.
    pub fn pattern(&self, stage: usize, policy: Remat) -> Pattern {
        let mut discards = vec![false; self.micro_batches];
        let applied = policy.apply(&vec![self.lists[stage].clone()]);
        for action in applied.iter().flatten() {
            if let Op::Rematerialize(m) = action.op {
                discards[m.index()] = true;
            }
        }
        let (all, own) = (self.micro_batches, before_backward(&self.lists[stage]));
        let of = |part| self.tally(part, |m| discards[m]);
        let (all, lead, late) = (of(0..all), of(0..self.lead), of(own..all));
        let again = of(1..self.micro_batches);
        Pattern { policy, all, lead, late, again, discards }
    }

    /// The policies of a stage that differ in what they recompute, from the fewest recomputations
    /// on. Segments are left out.
    pub fn patterns(&self, stage: usize) -> Vec<Pattern> {
        let flight = in_flight(&self.lists[stage]);
        let keeps = flight.saturating_sub(1);
        let tried = keeps.min(KEEP_MAX);
        let kept = (1..=tried).rev().map(|step| {
            let kept = u64::from(keeps) * u64::from(step) / u64::from(tried);
            Remat::Keep(u32::try_from(kept).unwrap_or(u32::MAX))
        });
        let ends = [Remat::UnlessAdjacent, Remat::Always];
        let mut patterns = vec![self.pattern(stage, Remat::Never)];
        for policy in kept.chain(ends) {
            let pattern = self.pattern(stage, policy);
            if patterns.iter().all(|other| !other.recomputes_as(&pattern)) {
                patterns.push(pattern);
            }
        }
        patterns
    }

    /// The figures of the stage under a pattern. `costs` is by size.
    pub fn figures(&self, pattern: &Pattern, costs: &[StageCost; 2]) -> Figures {
        let forward = |size: usize, again: bool| match again {
            true => costs[size].forward.0,
            false => costs[size].forward_kept.0,
        };
        let backward = |size: usize, again: bool| match (self.trains, again) {
            (false, _) => 0,
            (true, true) => costs[size].backward.0,
            (true, false) => costs[size].backward_kept.0,
        };
        let remat = |size: usize, again: bool| if again { costs[size].rematerialize.0 } else { 0 };
        let sum = |tally: &Tally, time: &dyn Fn(usize, bool) -> u64| {
            let kinds = [(0, false), (0, true), (1, false), (1, true)];
            let times =
                kinds.map(|(s, again)| tally[s][usize::from(again)].saturating_mul(time(s, again)));
            times.into_iter().fold(0, u64::saturating_add)
        };
        let last = self.micro_batches - 1;
        let (end, start) = ((self.size(last), pattern.discards[last]), pattern.discards[0]);
        let backwards = sum(&pattern.all, &backward);
        let first = forward(0, start);
        let turn = sum(&pattern.lead, &forward).saturating_add(sum(&pattern.late, &forward));
        let turn = turn.saturating_add(sum(&pattern.again, &remat)).saturating_add(backwards);
        let work = sum(&pattern.all, &forward).saturating_add(sum(&pattern.all, &remat));
        Figures {
            first,
            last: backward(end.0, end.1),
            work: work.saturating_add(backwards),
            turn: if self.trains { turn } else { 0 },
            around: first.min(forward(end.0, end.1)).saturating_add(backward(0, start)),
            norm: if self.trains { costs[0].norm.0 } else { 0 },
            update: if self.trains { costs[0].update.0 } else { 0 },
        }
    }

    /// Lower bounds on the figures under any policy.
    pub fn loose(&self, costs: &[StageCost; 2]) -> Figures {
        let forward = |size: usize| costs[size].forward.min(costs[size].forward_kept).0;
        let backward = |size: usize| match self.trains {
            true => costs[size].backward.min(costs[size].backward_kept).0,
            false => 0,
        };
        let total = |size: usize| {
            let cost = &costs[size];
            let kept = cost.forward_kept + cost.backward_kept;
            // With segments, the two parts of a re-materialization are rounded separately.
            let again = cost.forward + cost.rematerialize + cost.backward;
            if self.trains { kept.0.min(again.0.saturating_sub(1)) } else { cost.forward_kept.0 }
        };
        let (larger, smaller) = (self.smaller_from as u64, self.micro_batches - self.smaller_from);
        let work = larger.saturating_mul(total(0));
        let work = work.saturating_add((smaller as u64).saturating_mul(total(1)));
        let end = self.size(self.micro_batches - 1);
        let first = forward(0);
        Figures {
            first,
            last: backward(end),
            work,
            turn: 0,
            around: first.min(forward(end)).saturating_add(backward(0)),
            norm: if self.trains { costs[0].norm.0 } else { 0 },
            update: if self.trains { costs[0].update.0 } else { 0 },
        }
    }
}

/// How the times of one policy of a stage compare with those of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Compared {
    /// It may be slower.
    Open,
    /// Never slower if no send waits for room. A re-materialization may take longer, but by no more
    /// than its backward takes less. The gradient then leaves its link later.
    FasterWithRoom,
    /// No action takes longer, so the step does not either.
    Faster,
}

/// The pairs that occur, by size: whether one pattern recomputes a micro-batch, and whether the
/// other does.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pairs([[[bool; 2]; 2]; 2]);

/// The patterns of a stage, and the pairs for every two of them.
#[derive(Debug)]
pub(super) struct Patterns {
    pub all: Vec<Pattern>,
    pairs: Vec<Vec<Pairs>>,
}

impl Patterns {
    pub fn new(all: Vec<Pattern>, lists: &Lists) -> Self {
        let pairs = |own: &Pattern, other: &Pattern| {
            let mut pairs = Pairs::default();
            for (m, (&a, &b)) in own.discards.iter().zip(&other.discards).enumerate() {
                pairs.0[lists.size(m)][usize::from(a)][usize::from(b)] = true;
            }
            pairs
        };
        let row = |own: &Pattern| all.iter().map(|other| pairs(own, other)).collect();
        Self { pairs: all.iter().map(row).collect(), all }
    }

    /// Compares `own` with `other`. Each is a pattern's index and the costs by size of
    /// micro-batches.
    pub fn compare(
        &self,
        (own, own_costs): (usize, &[StageCost; 2]),
        (other, other_costs): (usize, &[StageCost; 2]),
    ) -> Compared {
        let mut result = Compared::Faster;
        for (size, seen) in self.pairs[own][other].0.iter().enumerate() {
            for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
                if seen[usize::from(a)][usize::from(b)] {
                    let (own, other) = (times(&own_costs[size], a), times(&other_costs[size], b));
                    result = result.min(compare_times(own, other));
                }
            }
        }
        result
    }
}

/// The times of forward, re-materialization and backward.
fn times(cost: &StageCost, again: bool) -> [u64; 3] {
    match again {
        true => [cost.forward.0, cost.rematerialize.0, cost.backward.0],
        false => [cost.forward_kept.0, 0, cost.backward_kept.0],
    }
}

fn compare_times(own: [u64; 3], other: [u64; 3]) -> Compared {
    let [forward, again, backward] = [0, 1, 2].map(|kind| own[kind] <= other[kind]);
    let both = own[1].saturating_add(own[2]) <= other[1].saturating_add(other[2]);
    match (forward && backward, again, both) {
        (true, true, _) => Compared::Faster,
        (true, false, true) => Compared::FasterWithRoom,
        _ => Compared::Open,
    }
}

/// The numbers of segments to try for a stage of `layers` layers.
pub(super) fn segments(layers: usize) -> Vec<Remat> {
    let most = layers.min(1024);
    let mut numbers: Vec<usize> = (2..=most.min(SEGMENTS_ALL)).collect();
    let mut number = SEGMENTS_ALL + SEGMENTS_ALL / 2;
    while number < most {
        numbers.push(number);
        number += number / 2;
    }
    numbers.extend((most > SEGMENTS_ALL).then_some(most));
    numbers.into_iter().map(|n| Remat::Segments(u32::try_from(n).unwrap_or(1))).collect()
}

/// The number of forwards before the first backward.
fn before_backward(list: &[Action]) -> usize {
    list.iter().take_while(|action| matches!(action.op, Op::Forward(_))).count()
}

/// The most micro-batches in flight between their forward and their backward.
fn in_flight(list: &[Action]) -> u32 {
    let (mut now, mut most) = (0_u32, 0);
    for action in list {
        match action.op {
            Op::Forward(_) => now += 1,
            Op::Backward(_) | Op::BackwardWeight(_) => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}
