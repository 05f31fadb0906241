//! Plans that are one move away: a layer across a boundary, or another policy for a stage.

use super::{Move, Plan, PlanError, space::Space};
use crate::{remat::Remat, topology::ranges};

/// The moves from `plan`, ordered by their bounds. The caller checks whether the plans fit. A stage
/// that a layer leaves or joins keeps its policy. With `adapt`, it gets the likely fastest policy
/// that fits.
pub(super) fn neighbours(
    space: &mut Space<'_>,
    plan: &Plan,
    adapt: bool,
) -> Result<Vec<(u64, Move, Plan)>, PlanError> {
    let mut found = Vec::new();
    let policies: Vec<Remat> = (0..plan.balance.len()).map(|k| plan.remat.of(k)).collect();
    for (layer, from, to) in moves(&plan.balance) {
        let mut balance = plan.balance.clone();
        balance[from] -= 1;
        balance[to] += 1;
        let mut policies = policies.clone();
        if adapt {
            let ranges = ranges(&balance);
            for stage in [from, to] {
                let cell = space.cell(stage, ranges[stage].start, ranges[stage].end)?;
                let least = cell.choices.iter().min_by_key(|choice| choice.figures.work);
                policies[stage] = least.map_or(policies[stage], |choice| choice.policy);
            }
        }
        found.push((Move::Layer { layer, from, to }, space.plan(balance, policies)));
    }
    for (stage, range) in ranges(&plan.balance).into_iter().enumerate() {
        for choice in &space.cell(stage, range.start, range.end)?.choices {
            if choice.policy != policies[stage] {
                let mut policies = policies.clone();
                policies[stage] = choice.policy;
                let change = Move::Policy { stage, policy: choice.policy };
                found.push((change, space.plan(plan.balance.clone(), policies)));
            }
        }
    }
    let bounded = found.into_iter().map(|(change, plan)| (space.bound_of(&plan), change, plan));
    let mut bounded: Vec<_> = bounded.collect();
    bounded.sort_by_key(|(bound, ..)| *bound);
    Ok(bounded)
}

/// Lists each layer that can move, with the stages that it leaves and joins.
fn moves(balance: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut moves = Vec::new();
    let mut end = 0;
    for (stage, pair) in balance.windows(2).enumerate() {
        end += pair[0];
        if pair[0] > 1 {
            moves.push((end - 1, stage, stage + 1));
        }
        if pair[1] > 1 {
            moves.push((end, stage + 1, stage));
        }
    }
    moves
}

/// The plan that moves led to.
pub(super) struct Improved {
    pub step: u64,
    pub plan: Plan,
    pub examined: usize,
}

/// Applies the first move that helps, repeatedly, until none helps or `until` actions were
/// simulated.
pub(super) fn improve(
    space: &mut Space<'_>,
    plan: Plan,
    step: u64,
    until: u64,
) -> Result<Improved, PlanError> {
    let mut best = Improved { step, plan, examined: 0 };
    loop {
        let mut better = None;
        for (bound, _, plan) in neighbours(space, &best.plan, true)? {
            if bound >= best.step || space.spent >= until {
                break;
            }
            let allowed = ranges(&plan.balance).into_iter().enumerate();
            if !allowed.into_iter().all(|(k, range)| space.allows(k, range.start, range.end))
                || !space.fits(&plan)?
            {
                continue;
            }
            best.examined += 1;
            let step = space.run(&plan)?.step;
            if step < best.step {
                better = Some((step, plan));
                break;
            }
        }
        match better {
            Some((step, plan)) => best = Improved { step, plan, ..best },
            None => return Ok(best),
        }
    }
}
