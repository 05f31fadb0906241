//! Schedules that are made for measured costs, with a proof of how good they are.
//!
//! A named schedule is good where all stages take the same time. Here the order comes from the
//! times themselves. Given are the stages, their devices and the room of each device ([`Problem`]).
//! [`make`] searches the order of F, B, I and W:
//!
//! 1. `list`: list scheduling, with several rules. Each device takes the most urgent action that
//!    can begin. The named schedules are candidates, too, so the result is never worse than they
//!    are.
//! 2. `improve`: local search. Actions of a critical path move within their device's list.
//! 3. `exact`: branch and bound, where the problem is small enough to finish.
//! 4. `bound`: a time that no order can undercut. The gap to it is the proof ([`Made::gap`]).
//!
//! Micro-batches of a stage run in ascending order, as [`crate::validate`] requires of backwards.
//! Where all micro-batches have the same size, another order of forwards gains nothing.
//!
//! `machine` executes an order on a virtual clock. It knows compute, messages and room, but neither
//! skips nor the bounded number of messages of a link. [`crate::simulate`] knows those, so the
//! planner prices what is made with it.
//!
//! The idea to solve for an order is that of Qi et al. 2023 (arXiv 2401.10241, section 3.1),
//! OptPipe (arXiv 2510.05186) and AdaPtis (arXiv 2509.23722).

mod bound;
mod exact;
mod improve;
mod list;
mod machine;

use crate::{
    action::{Action, ActionLists, Op},
    ids::{MicroBatch, StageId},
};

/// Times and bytes of a stage's actions, per micro-batch. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTimes {
    /// A forward.
    pub forward: u64,
    /// What a backward recomputes first, without waiting for its gradient. 0 if activations are
    /// kept.
    pub again: u64,
    /// A whole backward.
    pub backward: u64,
    /// The first half of a split backward.
    pub input: u64,
    /// The second half of a split backward.
    pub weight: u64,
    /// What the stage holds from the forward to the backward, or to its first half.
    pub held: u64,
    /// What it holds between the halves.
    pub split: u64,
}

/// A message between a stage and the next one. Between stages of one device, there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Transit {
    /// How long a message occupies the link. The link carries one at a time in each direction.
    pub occupied: u64,
    /// The time from when it leaves the link to when it is there.
    pub latency: u64,
}

/// What an order is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// By stage.
    pub stages: Vec<StageTimes>,
    /// Like `stages`, for micro-batches from `smaller_from` on.
    pub smaller: Vec<StageTimes>,
    /// The first micro-batch of the smaller size; M if all have the same size.
    pub smaller_from: usize,
    /// The number of micro-batches, M.
    pub micro_batches: usize,
    /// The device of each stage.
    pub placement: Vec<usize>,
    /// By stage but the last: messages to the next stage, and back.
    pub links: Vec<[Transit; 2]>,
    /// By stage but the last: whether its backward waits for the gradient of the next stage. Not
    /// where nothing up to it is trained.
    pub waits_for_gradient: Vec<bool>,
    /// By device: how much its stages may hold together, in the unit of [`StageTimes::held`].
    pub room: Vec<u64>,
    /// By device: the time after its last action until it is ready for the update (the norm).
    pub norm: Vec<u64>,
    /// The time of the longest update.
    pub update: u64,
    /// Whether a backward may run in two halves.
    pub splits: bool,
    /// By stage: a backward that directly follows its own forward recomputes nothing.
    pub keeps_adjacent: Vec<bool>,
}

/// An order, and what is proven of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// The compute actions of each device: F and B, or F, I and W.
    pub lists: ActionLists,
    /// The time of a step in this order.
    pub makespan: u64,
    /// No order of the same stages takes less.
    pub bound: u64,
}

impl Made {
    /// How much longer the step takes than the bound, as a share of the bound. No order of the same
    /// stages is better by more.
    pub fn gap(&self) -> f64 {
        if self.bound == 0 { 0.0 } else { self.makespan as f64 / self.bound as f64 - 1.0 }
    }

    /// Whether no order takes less.
    pub fn is_optimal(&self) -> bool {
        self.makespan <= self.bound
    }
}

/// A default [`make`] budget: a few seconds.
pub const BUDGET: u64 = 100_000_000;

/// Makes an order for `problem`. `starts` are orders to begin with, such as those of named
/// schedules; those that do not fit are left out. `budget` is roughly how many actions may be
/// simulated.
///
/// Returns `None` if no order was found that keeps to the room.
pub fn make(problem: &Problem, starts: &[ActionLists], budget: u64) -> Option<Made> {
    let bound = bound::of(problem);
    let mut best: Option<Candidate> = None;
    let mut take = |own: Option<Candidate>| {
        if let Some(own) = own
            && best.as_ref().is_none_or(|best| own.makespan < best.makespan)
        {
            best = Some(own);
        }
    };
    for start in starts {
        take(Candidate::new(problem, orders_of(start)));
    }
    list::all(problem).for_each(|order| take(Candidate::new(problem, order)));
    let best = best?;
    let improved = match best.makespan <= bound {
        true => best,
        false => improve::improve(problem, best, bound, budget),
    };
    let (best, bound) = match exact::is_small(problem) && improved.makespan > bound {
        true => exact::search(problem, improved, bound, budget),
        false => (improved, bound),
    };
    Some(Made { lists: lists_of(&best.order), makespan: best.makespan, bound })
}

/// Roughly how many actions [`make`] simulates for `problem` beside its budget.
pub fn cost(problem: &Problem) -> u64 {
    list::cost(problem)
}

/// A time that no order of `problem` undercuts. It takes no search.
pub fn lower_bound(problem: &Problem) -> u64 {
    bound::of(problem)
}

/// What a device does next. The micro-batch is the next one of this kind on this stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Next {
    kind: Kind,
    stage: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Forward,
    Input,
    Weight,
    Whole,
}

/// By device, what it does.
type Orders = Vec<Vec<Next>>;

/// An order and the time that it takes.
#[derive(Debug, Clone)]
struct Candidate {
    order: Orders,
    makespan: u64,
}

impl Candidate {
    /// `None` if the order deadlocks, leaves something out or needs more room than there is.
    fn new(problem: &Problem, order: Orders) -> Option<Self> {
        let makespan = machine::run(problem, &order)?;
        Some(Self { order, makespan })
    }
}

/// Leaves out the micro-batches, which ascend.
fn orders_of(lists: &ActionLists) -> Orders {
    let next = |action: &Action| {
        let kind = match action.op {
            Op::Forward(_) => Kind::Forward,
            Op::BackwardInput(_) => Kind::Input,
            Op::BackwardWeight(_) => Kind::Weight,
            Op::Backward(_) => Kind::Whole,
            _ => return None,
        };
        Some(Next { kind, stage: action.stage.index() })
    };
    lists.iter().map(|list| list.iter().filter_map(next).collect()).collect()
}

/// Numbers the micro-batches.
fn lists_of(orders: &Orders) -> ActionLists {
    let number = |order: &Vec<Next>| {
        let mut done: Vec<[usize; 3]> = Vec::new();
        let action = |next: &Next| {
            if done.len() <= next.stage {
                done.resize(next.stage + 1, [0; 3]);
            }
            let [forwards, inputs, weights] = &mut done[next.stage];
            let (count, op): (_, fn(MicroBatch) -> Op) = match next.kind {
                Kind::Forward => (forwards, Op::Forward),
                Kind::Input => (inputs, Op::BackwardInput),
                Kind::Weight => (weights, Op::BackwardWeight),
                Kind::Whole => {
                    *weights += 1;
                    (inputs, Op::Backward)
                }
            };
            let micro_batch = MicroBatch::from_index(*count);
            *count += 1;
            Action { stage: StageId::from_index(next.stage), op: op(micro_batch) }
        };
        order.iter().map(action).collect()
    };
    orders.iter().map(number).collect()
}

impl Problem {
    fn times(&self, stage: usize, micro_batch: usize) -> StageTimes {
        let stages = if micro_batch < self.smaller_from { &self.stages } else { &self.smaller };
        stages.get(stage).copied().unwrap_or_default()
    }

    fn devices(&self) -> usize {
        self.room.len()
    }

    /// Whether a stage and the next one are on one device.
    fn hands_over(&self, stage: usize) -> bool {
        self.placement[stage] == self.placement[stage + 1]
    }

    /// The stage whose result a backward of `stage` waits for; `None` for its own forward.
    fn gradient_from(&self, stage: usize) -> Option<usize> {
        self.waits_for_gradient.get(stage).filter(|waits| **waits).map(|_| stage + 1)
    }

    /// The least time of a message from `stage` to the next one (0) or back (1).
    fn transit(&self, stage: usize, back: usize) -> u64 {
        if self.hands_over(stage) {
            return 0;
        }
        let Transit { occupied, latency } = self.links[stage][back];
        occupied + latency
    }
}
