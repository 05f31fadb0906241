//! Depth-first search of the plans of one K, M and schedule, the least bound first.

use super::{
    Plan, PlanError,
    bound::{NONE, Prefix, Tables},
    space::{Choice, Space},
};
use crate::remat::Remat;

/// The result of an exploration.
#[derive(Debug, Default)]
pub(super) struct Explored {
    /// The best plan and its step.
    pub best: Option<(u64, Plan)>,
    /// The least step that a plan which was not ruled out may have.
    pub open: u64,
    /// The number of plans that were simulated.
    pub examined: usize,
}

struct Explorer<'s, 'a> {
    space: &'s mut Space<'a>,
    tables: Tables,
    /// Only plans that take less than this are of interest.
    below: u64,
    /// Ends the search when this many actions were simulated.
    until: u64,
    /// Ends the search at the first plan that fits.
    first_only: bool,
    balance: Vec<usize>,
    policies: Vec<Remat>,
    /// By stage, whether its cell left out policies that are certainly slower only if no send
    /// waits.
    with_room: Vec<bool>,
    explored: Explored,
}

/// A candidate for the next stage. Children are tried from the least bound up.
struct Child {
    bound: u64,
    end: usize,
    choice: Choice,
    prefix: Prefix,
    with_room: bool,
}

/// Finds a plan that takes less than `below` and has a low bound, from stages that take little
/// longer than necessary.
pub(super) fn first_plan(
    space: &mut Space<'_>,
    below: u64,
    until: u64,
) -> Result<Option<(u64, Plan)>, PlanError> {
    space.estimate(true);
    let loose = space.loose_bound();
    let mut limit = loose.saturating_add(loose / 4);
    loop {
        let tables = space.tables(limit.min(below))?;
        let explored = explore(space, tables, below, until, true)?;
        if explored.best.is_some() || limit >= below || space.spent > until {
            return Ok(explored.best);
        }
        limit = limit.saturating_mul(2).max(1);
    }
}

/// Finds the best plan that takes less than `below`.
pub(super) fn all_plans(
    space: &mut Space<'_>,
    below: u64,
    until: u64,
) -> Result<Explored, PlanError> {
    space.estimate(false);
    let tables = space.tables(below)?;
    explore(space, tables, below, until, false)
}

fn explore(
    space: &mut Space<'_>,
    tables: Tables,
    below: u64,
    until: u64,
    first_only: bool,
) -> Result<Explored, PlanError> {
    let root = tables.root;
    let explored = Explored { open: NONE, ..Explored::default() };
    let (balance, policies, with_room) = (Vec::new(), Vec::new(), Vec::new());
    let mut explorer = Explorer {
        space,
        tables,
        below,
        until,
        first_only,
        balance,
        policies,
        with_room,
        explored,
    };
    let done = root >= below || explorer.descend(Prefix::default(), 0)?;
    let mut explored = explorer.explored;
    if !done {
        explored.open = explored.open.min(root);
    }
    Ok(explored)
}

impl Explorer<'_, '_> {
    /// Goes through all plans that start with the chosen stages. Returns whether it finished.
    fn descend(&mut self, prefix: Prefix, start: usize) -> Result<bool, PlanError> {
        if prefix.stages == self.space.stages() {
            return self.leaf();
        }
        for child in self.children(prefix, start)? {
            if child.bound >= self.below {
                break;
            }
            self.balance.push(child.end - start);
            self.policies.push(child.choice.policy);
            self.with_room.push(child.with_room);
            let done = self.descend(child.prefix, child.end)?;
            self.balance.pop();
            self.policies.pop();
            self.with_room.pop();
            if !done {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn children(&mut self, prefix: Prefix, start: usize) -> Result<Vec<Child>, PlanError> {
        let (stages, layers, stage) = (self.space.stages(), self.space.layers(), prefix.stages);
        let rest = stages - 1 - stage;
        let mut children = Vec::new();
        let first = if rest == 0 { layers } else { start + 1 };
        for end in first..=layers - rest {
            if !self.space.allows(stage, start, end) {
                continue;
            }
            if self.space.loose(stage, start, end).work >= self.below {
                break;
            }
            let cell = self.space.cell(stage, start, end)?;
            self.space.spent += 1;
            for &choice in &cell.choices {
                let next = (rest > 0).then_some(end);
                let prefix = prefix.with(&choice.figures, next, &self.space.cuts);
                let bound = self.tables.bound(&prefix, end);
                let with_room = cell.with_room;
                if bound < self.below {
                    children.push(Child { bound, end, choice, prefix, with_room });
                }
            }
        }
        children.sort_by_key(|child| child.bound);
        Ok(children)
    }

    /// Simulates a complete plan. Returns whether to continue.
    fn leaf(&mut self) -> Result<bool, PlanError> {
        let plan = self.space.plan(self.balance.clone(), self.policies.clone());
        let may_fit = self.space.is_plain() || self.space.fits(&plan)?;
        if may_fit {
            let run = self.space.run(&plan)?;
            self.explored.examined += 1;
            if self.with_room.contains(&true) && run.unblocked < run.step {
                self.explored.open = self.explored.open.min(run.unblocked);
            }
            if run.step < self.below {
                self.below = run.step;
                self.explored.best = Some((run.step, plan));
                if self.first_only {
                    return Ok(false);
                }
            }
        }
        Ok(self.space.spent < self.until)
    }
}
