//! Plans that the exact search does not cover: under schedules with several stages per device,
//! split backwards or users' orders, and of models with too many layers.
//!
//! 1. Stages start as equal as their layers' times allow, without re-materialization.
//! 2. If that does not fit, one policy after another that holds less is tried for all stages. If
//!    none fits, the one that comes nearest is taken.
//! 3. One move at a time, layers move between stages and stages change their policies, while that
//!    helps and the budget lasts. Moves first reduce the bytes over the caps, then the time.

use super::{Plan, PlanDevice, PlanError, Request, predict};
use crate::{
    partition::by_weighted_cost,
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    units::{Bytes, Nanos},
};

/// The policies to try for all stages, from the one that holds most to the one that holds least.
const POLICIES: [Remat; 7] = [
    Remat::Never,
    Remat::Keep(2),
    Remat::Keep(1),
    Remat::Selective,
    Remat::Offload,
    Remat::Always,
    Remat::Segments(4),
];

/// The best plan found for one schedule, number of devices and number of micro-batches.
pub(super) struct Other {
    pub plan: Plan,
    pub step: u64,
    pub examined: usize,
}

/// A lower bound on any plan on these devices: the work of all layers, as if it could be cut
/// anywhere.
pub(super) fn work_bound(
    request: &Request<'_>,
    schedule: &Schedule,
    devices: &[PlanDevice],
    micro_batches: usize,
) -> u64 {
    let samples = request.samples;
    let micro_batches = micro_batches.min(samples).max(1);
    let costs = request.model.at(samples / micro_batches, schedule);
    let once: u64 = costs
        .iter()
        .map(|cost| {
            let halves = cost.backward_input + cost.backward_weight;
            let back = if schedule.splits() { halves } else { cost.backward_kept };
            (cost.forward_kept + back).0
        })
        .sum();
    let speed: f64 = devices.iter().map(|device| device.speed).sum();
    (once as f64 * micro_batches as f64 / speed.max(f64::MIN_POSITIVE)) as u64
}

/// The best plan that moves lead to; `None` if nothing fits.
///
/// # Errors
/// [`PlanError`] if settings do not fit the schedule.
pub(super) fn best(
    request: &Request<'_>,
    schedule: &Schedule,
    devices: &[PlanDevice],
    micro_batches: usize,
    budget: &mut u64,
) -> Result<Option<Other>, PlanError> {
    let mut trial = Trial { request, devices, examined: 0, budget };
    let mut best = trial.first(schedule, micro_batches)?;
    while *trial.budget > 0 {
        let mut better = None;
        for plan in trial.moves(&best.0) {
            if *trial.budget == 0 {
                break;
            }
            let worth = trial.worth(&plan)?;
            if worth < best.1 {
                better = Some((plan, worth));
                break;
            }
        }
        match better {
            Some(found) => best = found,
            None => break,
        }
    }
    let (plan, Worth { over, step }) = best;
    Ok((over == 0).then_some(Other { plan, step, examined: trial.examined }))
}

/// The quality of a plan; less is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    /// Bytes over the caps, summed over all devices.
    over: u64,
    step: u64,
}

struct Trial<'t, 'a> {
    request: &'t Request<'a>,
    devices: &'t [PlanDevice],
    examined: usize,
    /// Roughly how many actions and layers may still be gone through.
    budget: &'t mut u64,
}

impl Trial<'_, '_> {
    /// A plan to start from.
    fn first(
        &mut self,
        schedule: &Schedule,
        micro_batches: usize,
    ) -> Result<(Plan, Worth), PlanError> {
        let setting = |error: crate::schedule::DoesNotFit| PlanError::Setting(error.to_string());
        let stages = schedule.stages(self.devices.len()).map_err(setting)?;
        let balance = match &self.request.balance {
            Some(balance) => balance.clone(),
            None => self.even(schedule, stages, micro_batches)?,
        };
        let policies: Vec<RematPolicies> = match &self.request.remat {
            Some(remat) => vec![remat.clone()],
            None => self.policies(schedule, micro_batches).map(RematPolicies::from).collect(),
        };
        let mut nearest: Option<(Plan, Worth)> = None;
        for remat in policies {
            let (schedule, balance) = (schedule.clone(), balance.clone());
            let plan = Plan { balance, micro_batches, schedule, remat };
            let worth = self.worth(&plan)?;
            if worth.over == 0 {
                return Ok((plan, worth));
            }
            if nearest.as_ref().is_none_or(|(_, other)| worth < *other) {
                nearest = Some((plan, worth));
            }
        }
        nearest.ok_or_else(|| PlanError::Setting("no re-materialization policy to try".into()))
    }

    /// Stages of equal time, weighted by the devices' speeds.
    fn even(
        &self,
        schedule: &Schedule,
        stages: usize,
        micro_batches: usize,
    ) -> Result<Vec<usize>, PlanError> {
        let samples = self.request.samples.div_ceil(micro_batches.max(1));
        let costs = self.request.model.at(samples, schedule);
        let layers = self.request.model.layers.len();
        let mut times: Vec<u64> = costs
            .iter()
            .map(|cost| {
                let halves = cost.backward_input + cost.backward_weight;
                (cost.forward_kept + cost.backward_kept.max(halves)).0.max(1)
            })
            .collect();
        // The loss belongs to the last layer.
        let loss: u64 = times.drain(layers..).sum();
        times.last_mut().into_iter().for_each(|last| *last += loss);
        let placement = schedule.placement(self.devices.len());
        let weight = |&device: &usize| (1024.0 / self.devices[device].speed).max(1.0) as u64;
        let weights: Vec<u64> = placement.iter().take(stages).map(weight).collect();
        Ok(by_weighted_cost(&times, &weights)?)
    }

    /// The policies whose costs are known.
    fn policies(
        &self,
        schedule: &Schedule,
        micro_batches: usize,
    ) -> impl Iterator<Item = Remat> + use<> {
        let samples = self.request.samples.div_ceil(micro_batches.max(1));
        let selective = self.request.model.has_selective(samples, schedule);
        let offload = self.request.model.offload.is_some();
        POLICIES.into_iter().filter(move |policy| match policy {
            Remat::Selective => selective,
            Remat::Offload => offload,
            _ => true,
        })
    }

    fn worth(&mut self, plan: &Plan) -> Result<Worth, PlanError> {
        let Request { model, samples, .. } = *self.request;
        let prediction = predict(model, self.devices, samples, plan)?;
        let actions = prediction.timeline.actions().count() as u64;
        // The layers' costs are added up, too.
        let spent = actions + model.layers.len() as u64;
        *self.budget = self.budget.saturating_sub(spent);
        self.examined += 1;
        let peaks = prediction.device_peaks().into_iter().zip(self.devices);
        let over = |(peak, device): (Bytes, &PlanDevice)| {
            device.memory.map_or(0, |cap| peak.0.saturating_sub(cap.0))
        };
        Ok(Worth { over: peaks.map(over).sum(), step: prediction.step().0 })
    }

    /// All moves: one layer more in one stage and one less in another, with the stages between
    /// shifted by one layer; and another policy for each stage. Each is made when it is asked for,
    /// because their number is the square of that of the stages.
    fn moves(&self, plan: &Plan) -> impl Iterator<Item = Plan> + use<> {
        let plan = plan.clone();
        let stages = plan.balance.len();
        // Try near stages first.
        let apart = 1..if self.request.balance.is_none() { stages } else { 1 };
        let pairs = apart.flat_map(move |apart| {
            (0..stages - apart).flat_map(move |low| [(low, low + apart), (low + apart, low)])
        });
        let policies: Vec<Remat> = match self.request.remat {
            None => self.policies(&plan.schedule, plan.micro_batches).collect(),
            Some(_) => Vec::new(),
        };
        let others = (0..stages).flat_map({
            let plan = plan.clone();
            move |stage| {
                let own = plan.remat.of(stage);
                let tried = policies.clone().into_iter().filter(move |policy| *policy != own);
                tried.map(move |policy| (stage, policy))
            }
        });
        let changed = {
            let plan = plan.clone();
            move |(stage, policy)| {
                let mut policies: Vec<Remat> =
                    (0..stages).map(|stage| plan.remat.of(stage)).collect();
                policies[stage] = policy;
                Plan { remat: RematPolicies::by_stage(policies), ..plan.clone() }
            }
        };
        let moved = move |(from, to): (usize, usize)| {
            (plan.balance[from] > 1).then(|| {
                let mut moved = plan.clone();
                moved.balance[from] -= 1;
                moved.balance[to] += 1;
                moved
            })
        };
        pairs.filter_map(moved).chain(others.map(changed))
    }
}

/// A lower bound on the step of plans that are searched heuristically; `None` if there are none.
pub(super) fn bound(request: &Request<'_>) -> Option<Nanos> {
    let bounds = request.schedules.iter().flat_map(|schedule| {
        let counts = request.stages.iter().filter(|&&count| !request.is_exact(count, schedule));
        counts.flat_map(move |&count| {
            let devices = &request.devices[..count.min(request.devices.len())];
            let of = move |&m: &usize| work_bound(request, schedule, devices, m);
            request.micro_batches.iter().map(of)
        })
    });
    bounds.min().map(Nanos)
}
