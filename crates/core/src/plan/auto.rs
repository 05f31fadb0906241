//! Plans with an order that is made for their costs (`--schedule auto`; [`crate::made`]).
//!
//! 1. The best plans of the search, each with another placement, cut, policy or M, are the
//!    candidates. For each, an order of its stages is made. The named schedules with the same
//!    placement are where that begins.
//! 2. Single layers then move to neighbouring stages, and the order is made again, while that
//!    helps.
//! 3. Every order is priced as every plan is ([`predict`]): with all messages, and with memory in
//!    any timing. An order that holds too much is made again with less room.
//!
//! So the result is never worse than the best named schedule that fits.

use super::{
    Found, MadeOrder, Plan, PlanDevice, PlanError, Prediction, check, costs_of, limit, predict,
    request::Request,
};
use crate::{
    cost::LayerCost,
    made::{Made, Problem, StageTimes, Transit, cost, lower_bound, make},
    memory::StageBytes,
    remat::Remat,
    schedule::{ActionLists, CustomSchedule, Schedule},
    simulate::StageCost,
    topology::{Purpose, of_cut, ranges},
    units::{Bytes, Nanos},
};

/// How many plans get an order made.
const CANDIDATES_MAX: usize = 6;
/// How often an order is made again with less room.
const ROUNDS_MAX: usize = 4;
/// All orders together may simulate this many times as many actions as the search. An action costs
/// a tenth of the search's here, which also computes memory.
const BUDGET_TIMES: u64 = 30;
/// An order after a layer has moved gets one part in this many of a candidate's budget.
const MOVES_SHARE: u64 = 8;
/// Maximum number of actions simulated for all orders after a layer has moved: about a minute.
const MOVES_MAX: u64 = 1_000_000_000;

/// The share of a step that an order has to save to replace what is configured.
const GAIN_MIN: f64 = 0.01;

/// Replaces the plan by one with a made order, or with another named schedule, if that takes less.
///
/// If the search kept what is configured because another plan is faster only within the spread of
/// the costs, M stays: another M changes the last bits. The schedule changes nothing, so it may be
/// any.
pub(super) fn with_order(
    request: &Request<'_>,
    mut plans: Vec<Plan>,
    found: Found,
) -> Result<Found, PlanError> {
    if found.faster.is_some() {
        let micro_batches = found.plan.micro_batches;
        plans.retain(|plan| plan.micro_batches == micro_batches);
    }
    let step_of = |plan: &Plan| -> Result<Nanos, PlanError> {
        let devices = &request.devices[..plan.devices()];
        Ok(predict(request.model, devices, request.samples, plan)?.step())
    };
    let mut named = (found.plan.clone(), found.prediction.step());
    if let Some(best) = plans.first() {
        let step = step_of(best)?;
        if step < named.1 {
            named = (best.clone(), step);
        }
    }
    // What is configured stays unless the order saves enough.
    let least = if request.usual.is_some() { GAIN_MIN } else { 0.0 };
    let saves = |step: Nanos, than: Nanos| (step.0 as f64) < than.0 as f64 * (1.0 - least);
    let made = best(request, &plans)?.filter(|own| saves(own.step, named.1));
    let (plan, bound) = match made {
        Some(own) => (own.plan, own.bound),
        None if saves(named.1, found.prediction.step()) => {
            let bound = bound(request, &named.0)?.min(named.1);
            (named.0.clone(), bound)
        }
        None => {
            let bound = bound(request, &found.plan)?.min(found.prediction.step());
            return Ok(Found { made: Some(MadeOrder { bound, named }), ..found });
        }
    };
    let devices = &request.devices[..plan.devices()];
    let prediction = predict(request.model, devices, request.samples, &plan)?;
    let limits = limit::limit(request.model, devices, request.samples, &plan, &prediction)?;
    let samples = request.samples.div_ceil(plan.micro_batches.max(1));
    let spread = request.model.spread(samples, &plan.schedule);
    let step = prediction.step();
    Ok(Found {
        devices: devices.to_vec(),
        exact: false,
        interval: spread.map(|spread| spread.around(step)),
        faster: found
            .faster
            .filter(|other| other.plan.micro_batches != plan.micro_batches && other.step < step),
        made: Some(MadeOrder { bound, named }),
        limits,
        advice: Vec::new(),
        plan,
        prediction,
        ..found
    })
}

/// A plan with an order that was made for it.
#[derive(Debug, Clone)]
struct Ordered {
    plan: Plan,
    step: Nanos,
    /// No order of the same stages takes less.
    bound: Nanos,
    /// Roughly how many actions are simulated for an order of this size, beside its budget.
    cost: u64,
}

/// The best plan with a made order. `candidates` are plans to begin with, the best first.
///
/// # Errors
/// [`PlanError`] if settings do not fit each other.
fn best(request: &Request<'_>, candidates: &[Plan]) -> Result<Option<Ordered>, PlanError> {
    let chosen = distinct(candidates, request.devices);
    let budget = request.budget.saturating_mul(BUDGET_TIMES) / (2 * chosen.len().max(1) as u64);
    let mut best: Option<Ordered> = None;
    for plan in chosen {
        if let Some(own) = ordered(request, plan, &[], budget)?
            && best.as_ref().is_none_or(|best| own.step < best.step)
        {
            best = Some(own);
        }
    }
    let Some(mut best) = best else { return Ok(None) };
    let mut left = MOVES_MAX;
    while request.balance.is_none() {
        let mut better = None;
        for plan in moved(&best.plan) {
            let Some(rest) = left.checked_sub(best.cost + budget / MOVES_SHARE) else { break };
            left = rest;
            let lists = best.plan.schedule.actions(best.plan.devices(), plan.micro_batches);
            let own = ordered(request, &plan, &[lists], budget / MOVES_SHARE)?;
            if let Some(own) = own.filter(|own| own.step < best.step) {
                better = Some(own);
                break;
            }
        }
        match better {
            Some(own) => best = own,
            None => break,
        }
    }
    Ok(Some(best))
}

/// The first plans that differ in more than the order.
fn distinct<'p>(candidates: &'p [Plan], devices: &[PlanDevice]) -> Vec<&'p Plan> {
    let mut chosen: Vec<&Plan> = Vec::new();
    let placement = |plan: &Plan| plan.schedule.placement(plan.devices().min(devices.len()));
    for plan in candidates {
        let is_alike = |other: &&Plan| {
            other.balance == plan.balance
                && other.micro_batches == plan.micro_batches
                && other.remat == plan.remat
                && placement(other) == placement(plan)
        };
        if chosen.len() < CANDIDATES_MAX && !chosen.iter().any(is_alike) {
            chosen.push(plan);
        }
    }
    chosen
}

/// The plan with one layer moved to a neighbouring stage.
fn moved(plan: &Plan) -> Vec<Plan> {
    let stages = plan.balance.len();
    let pairs = (1..stages).flat_map(|stage| [(stage - 1, stage), (stage, stage - 1)]);
    let possible = pairs.filter(|&(from, _)| plan.balance[from] > 1);
    possible
        .map(|(from, to)| {
            let mut moved = plan.clone();
            moved.balance[from] -= 1;
            moved.balance[to] += 1;
            moved
        })
        .collect()
}

/// `plan` with an order made for it; `None` if none was found that fits.
fn ordered(
    request: &Request<'_>,
    plan: &Plan,
    also: &[ActionLists],
    budget: u64,
) -> Result<Option<Ordered>, PlanError> {
    let micro_batches = plan.micro_batches.min(request.samples);
    let devices = &request.devices[..plan.devices().min(request.devices.len())];
    // A made order is priced with what was measured under ZB-H1, if it was. Of splitting schedules,
    // this is the price of all.
    let at = |samples| request.model.at_in_any_order(samples, &Schedule::ZbH1);
    let mut problem = problem((request, &at), devices, plan, stage_times)?;
    // What is proven of the order made here holds for every order only if the problem is no harder
    // than the plan: room for all, every gradient waited for, and policies that do not depend on
    // the order.
    let is_plan = devices.iter().all(|device| device.memory.is_none())
        && (0..plan.balance.len()).all(|stage| is_fixed(plan.remat.of(stage)))
        && problem.waits_for_gradient.iter().all(|waits| *waits)
        && problem.smaller_from == micro_batches;
    // A schedule has to be correct also where everything is trained.
    problem.waits_for_gradient.fill(true);
    let least = lower(request, plan, &at)?;
    let mut starts = also.to_vec();
    let named = Schedule::NAMED.iter().chain(&request.schedules).chain([&plan.schedule]);
    let fitting = named.filter(|own| {
        own.stages(devices.len()) == Ok(plan.balance.len())
            && own.check_micro_batches(micro_batches).is_ok()
            && own.placement(devices.len()) == problem.placement
            && (problem.splits || !own.splits())
    });
    starts.extend(fitting.map(|own| own.actions(devices.len(), micro_batches)));
    for _ in 0..ROUNDS_MAX {
        let Some(Made { lists, bound, .. }) = make(&problem, &starts, budget / ROUNDS_MAX as u64)
        else {
            return Ok(None);
        };
        let schedule = CustomSchedule::made(&lists);
        let schedule = schedule.map_err(|error| PlanError::Setting(error.to_string()))?;
        let schedule = Schedule::Custom(schedule.into());
        let plan = Plan { schedule, micro_batches, ..plan.clone() };
        let prediction = predict(request.model, devices, request.samples, &plan)?;
        let over = over(&prediction, devices);
        if over.iter().all(|bytes| *bytes == 0) {
            let step = prediction.step();
            let bound = if is_plan { Nanos(bound) } else { least }.min(step);
            let cost = cost(&problem);
            return Ok(Some(Ordered { plan, step, bound, cost }));
        }
        for (room, over) in problem.room.iter_mut().zip(over) {
            *room = room.saturating_sub(over);
        }
    }
    Ok(None)
}

/// A time that no order of the plan's stages undercuts, with the costs that price the plan.
///
/// # Errors
/// [`PlanError`] if settings do not fit each other.
fn bound(request: &Request<'_>, plan: &Plan) -> Result<Nanos, PlanError> {
    lower(request, plan, &|samples| request.model.at_in_any_order(samples, &plan.schedule))
}

fn lower(request: &Request<'_>, plan: &Plan, at: Layers<'_>) -> Result<Nanos, PlanError> {
    let devices = &request.devices[..plan.devices().min(request.devices.len())];
    let room = vec![u64::MAX / 2; devices.len()];
    let problem = Problem { room, ..problem((request, at), devices, plan, least_times)? };
    Ok(Nanos(lower_bound(&problem)))
}

/// The costs of the layers for a number of samples.
type Layers<'a> = &'a dyn Fn(usize) -> Vec<LayerCost>;

/// By device, the bytes over its cap.
fn over(prediction: &Prediction, devices: &[PlanDevice]) -> Vec<u64> {
    let peaks = prediction.device_peaks().into_iter().zip(devices);
    let over = |(peak, device): (Bytes, &PlanDevice)| {
        device.memory.map_or(0, |cap| peak.0.saturating_sub(cap.0))
    };
    peaks.map(over).collect()
}

/// What an order is made for. `times_of` gives the times and bytes of a stage, from what it sends
/// of a micro-batch, too.
fn problem(
    (request, at): (&Request<'_>, Layers<'_>),
    devices: &[PlanDevice],
    plan: &Plan,
    times_of: fn(&StageCost, &StageBytes, Remat, u64) -> StageTimes,
) -> Result<Problem, PlanError> {
    let Request { model, samples, .. } = *request;
    check(model, devices, samples, plan)?;
    let micro_batches = plan.micro_batches.min(samples).max(1);
    let ranges = ranges(&plan.balance);
    let (skips, ties) = model.ends();
    let (topology, purposes) = of_cut(&ranges, model.across(&skips, &ties));
    let placement = plan.schedule.placement(devices.len());
    let placed: Vec<PlanDevice> = placement.iter().map(|&device| devices[device]).collect();
    let larger = samples.div_ceil(micro_batches);
    let (costs, edges) = costs_of(model, &placed, (samples, at), plan, &ranges, &purposes);
    let layers = at(larger);
    let splits = layers.iter().any(LayerCost::has_halves);
    let bytes: Vec<StageBytes> = ranges
        .iter()
        .enumerate()
        .map(|(stage, range)| {
            model.stage_bytes(range.clone(), &layers, larger, plan.remat.of(stage))
        })
        .collect();
    // What a discarded micro-batch sent lives as long as the micro-batch.
    let boundary = |stage: usize| {
        let index = purposes.iter().zip(&topology.edges).position(|(purpose, edge)| {
            *purpose == Purpose::Boundary && edge.from.index() == stage
        });
        index.unwrap_or_default()
    };
    let sent = |stage: usize| match stage + 1 < ranges.len() && !model.own_memory {
        true => edges[boundary(stage)].forward.0,
        false => 0,
    };
    let times = |costs: &[StageCost]| -> Vec<StageTimes> {
        let all = costs.iter().zip(&bytes).enumerate();
        all.map(|(stage, (cost, bytes))| times_of(cost, bytes, plan.remat.of(stage), sent(stage)))
            .collect()
    };
    let link = |stage: usize| {
        let link = costs.links.get(boundary(stage)).copied().unwrap_or_default();
        let transit = |occupied: Nanos| Transit { occupied: occupied.0, latency: link.latency.0 };
        [transit(link.forward), transit(link.backward)]
    };
    let on = |device: usize| {
        let stages = placement.iter().enumerate();
        stages.filter(move |(_, on)| **on == device).map(|(stage, _)| stage)
    };
    let sum = |device: usize, of: fn(&StageCost) -> Nanos| -> u64 {
        on(device).map(|stage| of(&costs.stages[stage]).0).sum()
    };
    let room = devices.iter().enumerate().map(|(device, own)| {
        let base: u64 = on(device).map(|stage| base(&bytes[stage], micro_batches)).sum();
        own.memory.map_or(u64::MAX / 2, |cap| cap.0.saturating_sub(base))
    });
    let larger = times(&costs.stages);
    let of_stage = |own: &StageTimes| -> u128 {
        [own.forward, own.again, own.backward, own.input, own.weight].map(u128::from).iter().sum()
    };
    let all: u128 = larger.iter().map(of_stage).sum();
    if all.saturating_mul(micro_batches as u128) > u128::from(u64::MAX / 4) {
        let text = "the times of the layers are too long to make an order for them";
        return Err(PlanError::Setting(text.into()));
    }
    Ok(Problem {
        smaller: if costs.smaller.is_empty() { larger.clone() } else { times(&costs.smaller) },
        smaller_from: costs.smaller_from.map_or(micro_batches, |first| first.index()),
        micro_batches,
        links: (0..ranges.len().saturating_sub(1)).map(link).collect(),
        waits_for_gradient: (0..ranges.len().saturating_sub(1))
            .map(|stage| topology.edges[boundary(stage)].kind.goes_back())
            .collect(),
        room: room.collect(),
        norm: (0..devices.len()).map(|device| sum(device, |cost| cost.norm)).collect(),
        update: (0..devices.len()).map(|d| sum(d, |cost| cost.update)).max().unwrap_or(0),
        splits,
        keeps_adjacent: (0..ranges.len()).map(|k| keeps_adjacent(plan.remat.of(k))).collect(),
        stages: larger,
        placement,
    })
}

/// Whether a policy keeps activations where a backward directly follows its forward.
fn keeps_adjacent(policy: Remat) -> bool {
    !matches!(policy, Remat::Always | Remat::Segments(_))
}

fn stage_times(cost: &StageCost, bytes: &StageBytes, policy: Remat, sent: u64) -> StageTimes {
    let (split, weight) = (bytes.split.0, cost.backward_weight.0);
    match policy {
        Remat::Never => StageTimes {
            forward: cost.forward_kept.0,
            again: 0,
            backward: cost.backward_kept.0,
            input: cost.backward_input_kept.0,
            weight,
            held: bytes.forward_kept.after.0,
            split,
        },
        _ => StageTimes {
            forward: cost.forward.0,
            again: cost.rematerialize.0,
            backward: cost.backward.0,
            input: cost.backward_input.0,
            weight,
            held: bytes.forward.after.0 + sent,
            split,
        },
    }
}

/// Whether a policy recomputes the same in every order.
fn is_fixed(policy: Remat) -> bool {
    matches!(policy, Remat::Never | Remat::Always | Remat::Segments(_))
}

/// The least times that a stage can take in any order.
fn least_times(cost: &StageCost, bytes: &StageBytes, policy: Remat, sent: u64) -> StageTimes {
    let times = stage_times(cost, bytes, policy, sent);
    if is_fixed(policy) {
        return times;
    }
    let kept = stage_times(cost, bytes, Remat::Never, sent);
    StageTimes {
        forward: times.forward.min(kept.forward),
        again: 0,
        backward: times.backward.min(kept.backward),
        input: times.input.min(kept.input),
        ..times
    }
}

/// What a stage holds besides micro-batches, at most.
fn base(bytes: &StageBytes, micro_batches: usize) -> u64 {
    let peaks = [
        bytes.forward.peak,
        bytes.forward_kept.peak,
        bytes.rematerialize.peak,
        bytes.backward,
        bytes.backward_kept,
        bytes.backward_input,
        bytes.backward_input_kept,
        bytes.backward_weight,
        bytes.update,
    ];
    let peak = peaks.into_iter().max().unwrap_or_default();
    let statistics = bytes.statistics.times(micro_batches);
    (bytes.resident + bytes.gradients + bytes.early + bytes.ahead + statistics + peak).0
}
