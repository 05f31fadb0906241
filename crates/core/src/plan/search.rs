//! The search for the plan with the least predicted step: branch and bound over cuts and policies,
//! for each K, M and schedule.
//!
//! 1. Combinations of K, M and schedule are bounded without looking at memory, and tried from the
//!    least bound up. A combination whose bound is no less than the best step is skipped.
//! 2. Within a combination, stages are chosen from the first on, depth first and with the least
//!    bound first. The bounds cover the remaining layers.
//! 3. The search ends at the latest when its budget of simulated actions is spent. If plans are
//!    left that were not ruled out, single moves improve the best plan. The least bound of the
//!    plans that are left says how much better a plan might be.
//! 4. Schedules other than GPipe and 1F1B are searched by `heuristic`, which is not exact. So are
//!    models of so many layers that the stages to choose from would take too much memory.
//! 5. If the request asks for it, `auto` makes orders for the best plans.

use std::collections::BTreeSet;

use super::{
    Advice, Limit, Plan, PlanDevice, PlanError, Prediction, advice, auto, bound, explore,
    heuristic, limit, neighbours, predict,
    rejected::Rejected,
    request::{Key, Request, keys},
    shortage,
    space::{Frame, Space},
};
use crate::{partition::PartitionError, remat::Remat, schedule::Schedule, units::Nanos};

/// The number of best alternatives to report.
const REJECTED_MAX: usize = 8;
/// Up to this many alternatives, the best one with each further K or M is reported, too.
const TOLD_MAX: usize = 32;
/// One combination may use one part in this many of the remaining budget.
const SHARE: u64 = 2;
/// Each alternative that was not searched may use one part in this many of the budget.
const OTHERS_SHARE: u64 = 64;

/// The best plan that was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// How to run.
    pub plan: Plan,
    /// What it will take and hold.
    pub prediction: Prediction,
    /// The names of the model's layers. [`super::explain()`] prints them.
    pub layers: Vec<String>,
    /// The devices that the plan uses.
    pub devices: Vec<PlanDevice>,
    /// Whether no plan of the request takes less, among the policies that are tried. For each stage
    /// these are `keep:N` with up to 12 values of N, and numbers of segments: all up to 8, and some
    /// above.
    pub exact: bool,
    /// A lower bound on the step of every plan of the request.
    pub bound: Nanos,
    /// The number of plans that were simulated.
    pub examined: usize,
    /// Alternatives, the best first, and why they lost. Each requested schedule, K and M is in the
    /// plan or in one of these.
    pub rejected: Vec<Rejected>,
    /// The number of combinations of K, M and schedule that are neither the plan nor in `rejected`.
    /// None of them takes less than the best.
    pub others: usize,
    /// The quartiles of the step, if the costs include their spread.
    pub interval: Option<[Nanos; 2]>,
    /// A plan that takes less, but by no more than the uncertainty of the costs.
    pub faster: Option<Faster>,
    /// If an order was made: how good it is.
    pub made: Option<MadeOrder>,
    /// What keeps the step from being shorter.
    pub limits: Limit,
    /// One better move, if the search was not exact and there is one.
    pub advice: Vec<Advice>,
}

/// What a search for a better order found: one that was made for the plan, or none that is better
/// than the plan's schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeOrder {
    /// No order of the plan's stages takes less, on the same devices with the same M, policies and
    /// costs.
    pub bound: Nanos,
    /// The best plan with a named schedule, and its step.
    pub named: (Plan, Nanos),
}

/// A plan that takes less than the usual one, if the costs are right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faster {
    /// The plan.
    pub plan: Plan,
    /// Its step.
    pub step: Nanos,
    /// The quartiles of its step.
    pub interval: [Nanos; 2],
}

struct Best {
    step: u64,
    key: Key,
    plan: Plan,
}

struct Search<'r, 'a> {
    request: &'r Request<'a>,
    best: Option<Best>,
    examined: usize,
    spent: u64,
    /// The least step that a plan which was not ruled out may have.
    open: u64,
    /// The best step of each combination that was tried.
    tried: Vec<(Key, Option<(u64, Plan)>)>,
    /// Impossible combinations, and why.
    misfits: Vec<(Key, PlanError)>,
    /// Requested values that no combination can use.
    omitted: Vec<Rejected>,
}

/// Finds the plan with the least predicted step that respects every device's cap. Ties go to fewer
/// stages, then fewer micro-batches, then the earlier schedule.
///
/// # Errors
/// [`PlanError`] if settings do not fit each other. [`PlanError::Memory`] if no plan fits, with the
/// smallest caps that work.
pub fn search(request: &Request<'_>) -> Result<Found, PlanError> {
    let (keys, omitted) = keys(request)?;
    let mut search = Search {
        request,
        best: None,
        examined: 0,
        spent: 0,
        open: bound::NONE,
        tried: Vec::new(),
        misfits: Vec::new(),
        omitted,
    };
    let bounds = keys.iter().map(|&key| (Space::new(search.frame(key)).loose_bound(), key));
    let mut bounds: Vec<(u64, Key)> = bounds.collect();
    bounds.sort_unstable();
    for &(bound, key) in &bounds {
        if bound < search.threshold(key) {
            search.combination(key)?;
        }
    }
    let others = search.others()?;
    if search.best.is_none() {
        search.least_memory(&keys)?;
    }
    search.improve()?;
    bounds.extend(others);
    let plans = search.plans();
    let found = search.found(&bounds)?;
    if request.makes_orders { auto::with_order(request, plans, found) } else { Ok(found) }
}

impl<'r> Search<'r, '_> {
    /// The best plan of each combination that was tried, the best first.
    fn plans(&self) -> Vec<Plan> {
        let tried = self.tried.iter().filter_map(|(key, own)| own.as_ref().map(|own| (own, *key)));
        let mut plans: Vec<(u64, Key, &Plan)> =
            tried.map(|((step, plan), key)| (*step, key, plan)).collect();
        plans.extend(self.best.iter().map(|best| (best.step, best.key, &best.plan)));
        plans.sort_by_key(|(step, key, _)| (*step, *key));
        plans.into_iter().map(|(.., plan)| plan.clone()).collect()
    }

    fn frame(&self, (stages, micro_batches, schedule): Key) -> Frame<'r> {
        let request = self.request;
        Frame {
            model: request.model,
            devices: &request.devices[..stages],
            samples: request.samples,
            micro_batches,
            schedule: &request.schedules[schedule],
            balance: request.balance.as_deref(),
            remat: request.remat.as_ref(),
        }
    }

    fn is_exact(&self, (stages, _, schedule): Key) -> bool {
        self.request.is_exact(stages, &self.request.schedules[schedule])
    }

    /// Whether a schedule that can be searched exactly is not, with some K.
    fn leaves_out(&self) -> bool {
        let Request { stages, schedules, devices, .. } = self.request;
        schedules.iter().filter(|own| own.is_searched_exactly()).any(|own| {
            let mut counts = stages.iter().filter(|&&count| count <= devices.len());
            counts.any(|&count| !self.request.is_exact(count, own))
        })
    }

    /// A plan must take less than this to be the new best.
    fn threshold(&self, key: Key) -> u64 {
        match &self.best {
            None => bound::NONE,
            Some(best) if key < best.key => best.step.saturating_add(1),
            Some(best) => best.step,
        }
    }

    /// Searches one combination within its part of the budget.
    fn combination(&mut self, key: Key) -> Result<(), PlanError> {
        let mut space = Space::new(self.frame(key));
        let left = self.request.budget.saturating_sub(self.spent);
        let until = left / SHARE;
        let below = self.threshold(key);
        let first = explore::first_plan(&mut space, below, until)?;
        if let Some((step, plan)) = &first {
            self.take(key, *step, plan);
        }
        let below = self.threshold(key);
        let rest = explore::all_plans(&mut space, below, until)?;
        self.examined += rest.examined + usize::from(first.is_some());
        self.open = self.open.min(rest.open);
        if let Some((step, plan)) = &rest.best {
            self.take(key, *step, plan);
        }
        self.spent += space.spent;
        self.tried.push((key, rest.best.or(first)));
        Ok(())
    }

    /// Tries the schedules that are not searched exactly. Returns the step of each, if anything
    /// fitted.
    fn others(&mut self) -> Result<Vec<(u64, Key)>, PlanError> {
        let request = self.request;
        let mut keys = Vec::new();
        for (index, own) in request.schedules.iter().enumerate() {
            let counts = request.stages.iter().filter(|&&count| count <= request.devices.len());
            for &count in counts.filter(|&&count| !request.is_exact(count, own)) {
                let sizes = request.micro_batches.iter().map(|&m| m.min(request.samples));
                keys.extend(sizes.map(|micro_batches| (count, micro_batches, index)));
            }
        }
        keys.sort_unstable();
        keys.dedup();
        let mut found = Vec::new();
        let mut budget = request.budget;
        for key in keys {
            match self.other(key, &mut budget) {
                Ok(own) => {
                    found.push((own.as_ref().map_or(bound::NONE, |own| own.0), key));
                    self.tried.push((key, own));
                }
                Err(error) => self.misfits.push((key, error)),
            }
        }
        if !found.is_empty() {
            self.open = self.open.min(heuristic::bound(request).map_or(bound::NONE, |b| b.0));
        } else if self.best.is_none() && !self.misfits.is_empty() {
            // Nothing that was requested could be tried.
            return Err(self.misfits.swap_remove(0).1);
        }
        found.extend(self.misfits.iter().map(|(key, _)| (bound::NONE, *key)));
        Ok(found)
    }

    /// The best plan of one combination that is not searched exactly.
    fn other(&mut self, key: Key, budget: &mut u64) -> Result<Option<(u64, Plan)>, PlanError> {
        let (request, (count, micro_batches, index)) = (self.request, key);
        let (devices, schedule) = (&request.devices[..count], &request.schedules[index]);
        let misfit = |error: crate::schedule::DoesNotFit| PlanError::Setting(error.to_string());
        schedule.check_micro_batches(micro_batches).map_err(misfit)?;
        let stages = schedule.stages(count).map_err(misfit)?;
        let layers = request.model.layers.len();
        if stages > layers {
            return Err(PartitionError::TooManyStages { stages, layers }.into());
        }
        let Some(best) = heuristic::best(request, schedule, devices, micro_batches, budget)? else {
            return Ok(None);
        };
        self.examined += best.examined;
        self.take(key, best.step, &best.plan);
        Ok(Some((best.step, best.plan)))
    }

    fn take(&mut self, key: Key, step: u64, plan: &Plan) {
        if self.threshold(key) > step {
            self.best = Some(Best { step, key, plan: plan.clone() });
        }
    }

    /// If nothing fitted: tries the plan of least memory, which the search may have missed.
    fn least_memory(&mut self, keys: &[Key]) -> Result<(), PlanError> {
        if keys.is_empty() {
            let why = match self.request.schedules.iter().any(Schedule::is_searched_exactly) {
                true => {
                    "the model has too many layers to try every cut, and no plan was found that \
                    fits: give the devices more memory, or fix the cut"
                }
                false => {
                    "under the schedules that were asked for, of which not every cut is tried, no \
                    plan was found that fits: give the devices more memory, or let gpipe and 1f1b \
                    be chosen, too"
                }
            };
            return Err(PlanError::Setting(why.into()));
        }
        let frames: Vec<Frame<'_>> = keys.iter().map(|&key| self.frame(key)).collect();
        let (index, plan) = shortage::least(&frames).map_err(|error| match error {
            // Another K was not looked at for its least memory.
            PlanError::Memory(mut missing) if self.leaves_out() => {
                missing.exact = false;
                PlanError::Memory(missing)
            }
            other => other,
        })?;
        let mut space = Space::new(frames[index]);
        let step = space.run(&plan)?.step;
        self.best = Some(Best { step, key: keys[index], plan });
        self.open = 0;
        Ok(())
    }

    /// Improves the best plan by single moves, while they help and the budget lasts.
    fn improve(&mut self) -> Result<(), PlanError> {
        while let Some(best) = &self.best
            && self.is_exact(best.key)
            && self.open < best.step
            && self.spent < self.request.budget
        {
            let (key, plan, step) = (best.key, best.plan.clone(), best.step);
            let mut space = Space::new(self.frame(key));
            let until = self.request.budget - self.spent;
            let better = neighbours::improve(&mut space, plan, step, until)?;
            self.spent += space.spent.max(1);
            self.examined += better.examined;
            if better.step >= step {
                break;
            }
            self.best = Some(Best { step: better.step, key, plan: better.plan });
        }
        Ok(())
    }

    fn found(mut self, bounds: &[(u64, Key)]) -> Result<Found, PlanError> {
        let request = self.request;
        let Some(best) = self.best.take() else {
            return Err(PlanError::Setting("no plan was found".into()));
        };
        let exact = self.open >= best.step;
        let bound = Nanos(self.open.min(best.step));
        let (Best { step, key, plan }, faster) = self.usual(best)?;
        let devices = &request.devices[..key.0];
        let prediction = predict(request.model, devices, request.samples, &plan)?;
        let (rejected, others) = self.rejected(bounds, key, step, &plan)?;
        let advice = match exact {
            true => None,
            false => advice(request.model, devices, request.samples, &plan)?,
        };
        let limits = limit::limit(request.model, devices, request.samples, &plan, &prediction)?;
        Ok(Found {
            layers: request.model.layers.iter().map(|layer| layer.name.clone()).collect(),
            devices: devices.to_vec(),
            exact,
            bound,
            examined: self.examined,
            rejected,
            others,
            interval: self.interval(key, prediction.step().0),
            faster,
            made: None,
            limits,
            advice: advice.into_iter().collect(),
            plan,
            prediction,
        })
    }

    /// The quartiles of a step of one combination.
    fn interval(&self, (_, micro_batches, schedule): Key, step: u64) -> Option<[Nanos; 2]> {
        let samples = self.request.samples.div_ceil(micro_batches.max(1));
        let spread = self.request.model.spread(samples, &self.request.schedules[schedule])?;
        Some(spread.around(Nanos(step)))
    }

    /// Prefers the usual plan if it is within the uncertainty of the costs: the quartiles of both
    /// steps overlap. The best plan is then returned as the faster one. Otherwise keeps the best
    /// plan.
    fn usual(&mut self, best: Best) -> Result<(Best, Option<Faster>), PlanError> {
        let Some(usual) = &self.request.usual else { return Ok((best, None)) };
        let index = self.request.schedules.iter().position(|own| *own == usual.schedule);
        let micro_batches = usual.micro_batches.min(self.request.samples);
        let is_asked = self.request.stages.contains(&usual.stages)
            && self
                .request
                .micro_batches
                .iter()
                .any(|m| *m.min(&self.request.samples) == micro_batches)
            && usual.stages <= self.request.devices.len();
        let Some(index) = index.filter(|_| is_asked) else { return Ok((best, None)) };
        let key = (usual.stages, micro_batches, index);
        if key == best.key {
            return Ok((best, None));
        }
        let Some(interval) = self.interval(best.key, best.step) else { return Ok((best, None)) };
        let Some((step, plan)) = self.tried_or_now(key)? else { return Ok((best, None)) };
        let Some([low, _]) = self.interval(key, step) else { return Ok((best, None)) };
        if low > interval[1] || step <= best.step {
            return Ok((best, None));
        }
        let faster = Faster { plan: best.plan, step: Nanos(best.step), interval };
        Ok((Best { step, key, plan }, Some(faster)))
    }

    /// The best plan of a combination that was tried or ruled out; `None` if nothing fits.
    fn tried_or_now(&self, key: Key) -> Result<Option<(u64, Plan)>, PlanError> {
        let tried = self.tried.iter().find(|(tried, _)| *tried == key);
        if let Some((_, Some(own))) = tried {
            return Ok(Some(own.clone()));
        }
        let frame = self.frame(key);
        let layers = self.request.model.layers.len();
        if !self.is_exact(key) || key.0 > layers {
            return Ok(None);
        }
        let mut space = Space::new(frame);
        let until = self.request.budget / OTHERS_SHARE;
        let first = explore::first_plan(&mut space, bound::NONE, until)?;
        let below = first.as_ref().map_or(bound::NONE, |(step, _)| *step);
        Ok(explore::all_plans(&mut space, below, until)?.best.or(first))
    }

    /// The best of the other combinations and the plan without re-materialization, and how many
    /// more combinations there are.
    fn rejected(
        &mut self,
        bounds: &[(u64, Key)],
        key: Key,
        step: u64,
        plan: &Plan,
    ) -> Result<(Vec<Rejected>, usize), PlanError> {
        let mut rejected = std::mem::take(&mut self.omitted);
        let mut others: Vec<(u64, Key)> = bounds.iter().filter(|b| b.1 != key).copied().collect();
        for (bound, key) in &mut others {
            let tried = self.tried.iter().find(|(tried, _)| tried == key);
            if let Some((_, Some((step, _)))) = tried {
                *bound = *step;
            }
        }
        others.sort_unstable();
        let all = others.len();
        let others = told(others, key);
        let untold = all - others.len();
        for (_, key) in others {
            let own = self.tried_or_now(key)?;
            let misfit = self.misfits.iter().find(|(misfit, _)| *misfit == key);
            let misfit = misfit.map(|(_, error)| error.to_string());
            let is_exact = self.is_exact(key);
            rejected.push(Rejected::other(self.frame(key), own, step, misfit, is_exact)?);
        }
        let never = Plan { remat: Remat::Never.into(), ..plan.clone() };
        if self.request.remat.is_none() && never != *plan {
            let devices = &self.request.devices[..key.0];
            let prediction = predict(self.request.model, devices, self.request.samples, &never)?;
            rejected.push(Rejected::without_remat(never, &prediction, devices, step));
        }
        rejected.sort_by_key(|r| (r.step.is_none(), r.step, r.what.clone()));
        Ok((rejected, untold))
    }
}

/// Selects the combinations to report, the best first: a fixed number, and the best of each K, M
/// and schedule that is not among them.
fn told(others: Vec<(u64, Key)>, plan: Key) -> Vec<(u64, Key)> {
    let (mut stages, mut sizes, mut schedules) =
        (BTreeSet::from([plan.0]), BTreeSet::from([plan.1]), BTreeSet::from([plan.2]));
    let mut told = Vec::new();
    for (place, other) in others.into_iter().enumerate() {
        let (count, micro_batches, schedule) = other.1;
        let is_first = [
            told.len() < TOLD_MAX && stages.insert(count),
            told.len() < TOLD_MAX && sizes.insert(micro_batches),
            schedules.insert(schedule),
        ];
        if place < REJECTED_MAX - 1 || is_first.contains(&true) {
            told.push(other);
        }
    }
    told
}
