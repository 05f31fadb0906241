//! The request of a search: the available choices, and which of their combinations are possible.

use super::{PlanDevice, PlanError, check_devices, check_size, rejected::Rejected};
use crate::{
    cost::ModelCosts,
    partition::{PartitionError, check_balance},
    remat::RematPolicies,
    schedule::Schedule,
};

/// What to search.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The costs of the layers.
    pub model: &'a ModelCosts,
    /// The devices; K stages use the first K.
    pub devices: &'a [PlanDevice],
    /// Samples per step.
    pub samples: usize,
    /// Each K to try.
    pub stages: Vec<usize>,
    /// Each M to try; values above the number of samples are lowered to it.
    pub micro_batches: Vec<usize>,
    /// Each schedule to try.
    pub schedules: Vec<Schedule>,
    /// Whether orders are made, too, for the costs of the best plans.
    pub makes_orders: bool,
    /// The only allowed cut, if it is fixed.
    pub balance: Option<Vec<usize>>,
    /// The only allowed policies, if they are fixed.
    pub remat: Option<RematPolicies>,
    /// Roughly how many actions may be simulated. [`Request::BUDGET`] lasts about a second.
    pub budget: u64,
    /// What runs without planning. It is chosen unless another choice is better by more than the
    /// uncertainty of the costs.
    pub usual: Option<Usual>,
}

/// A choice of K, M and schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usual {
    /// The number of stages, K.
    pub stages: usize,
    /// The number of micro-batches, M.
    pub micro_batches: usize,
    /// The schedule.
    pub schedule: Schedule,
}

/// The most candidate stages, each a device with a range of layers, of an exact search. It keeps
/// the figures of them all, which take up to two kilobytes each.
const CANDIDATES_MAX: usize = 1 << 21;
/// The most layers of an exact search. It adds up those of every candidate.
const LAYERS_MAX: usize = 1 << 13;

impl Request<'_> {
    /// A budget for interactive use.
    pub const BUDGET: u64 = 4_000_000;

    /// Whether plans with this K and schedule are searched exactly. Otherwise `heuristic` searches
    /// them.
    pub(super) fn is_exact(&self, stages: usize, schedule: &Schedule) -> bool {
        let layers = self.model.layers.len();
        // The first stage begins with the first layer, and the last one ends with the last.
        let between = layers.saturating_mul(layers) / 2;
        let candidates = between.saturating_mul(stages.saturating_sub(2)) + 2 * layers;
        let is_small = candidates <= CANDIDATES_MAX && layers <= LAYERS_MAX;
        schedule.is_searched_exactly() && (is_small || self.balance.is_some())
    }
}

/// K, M and the schedule's position in the request. Plans with equal steps are ordered by it.
pub(super) type Key = (usize, usize, usize);

/// All combinations to search exactly, without duplicates, and requested values that no combination
/// can use.
pub(super) fn keys(request: &Request<'_>) -> Result<(Vec<Key>, Vec<Rejected>), PlanError> {
    let Request { model, devices, samples, .. } = *request;
    let setting = |text: &str| Err(PlanError::Setting(text.into()));
    model.check()?;
    check_devices(devices)?;
    let layers = model.layers.len();
    if request.micro_batches.is_empty() || request.schedules.is_empty() {
        return setting("there is nothing to choose from: give at least one M and one schedule");
    }
    let mut stages = request.stages.clone();
    let plain = request.schedules.iter().any(Schedule::is_searched_exactly);
    if let Some(balance) = request.balance.as_ref().filter(|_| plain) {
        if !stages.contains(&balance.len()) {
            return Err(PartitionError::WrongLength {
                balance: balance.clone(),
                stages: stages.first().copied().unwrap_or_default(),
            }
            .into());
        }
        stages = vec![balance.len()];
        check_balance(balance, balance.len(), layers)?;
    }
    for &stages in &stages {
        if stages == 0 {
            return Err(PartitionError::NoStages.into());
        }
        if let Some(remat) = request.remat.as_ref().filter(|_| plain) {
            remat.check(stages).map_err(PlanError::Setting)?;
        }
        for &micro_batches in &request.micro_batches {
            check_size(stages, micro_batches, samples)?;
        }
    }
    let most = devices.len().min(layers);
    let Some(&least) = stages.iter().min() else {
        return setting("there is nothing to choose from: give at least one K");
    };
    let mut omitted = Vec::new();
    stages.retain(|&stages| {
        if stages > most {
            let why = format!("there are {} devices and {layers} layers", devices.len());
            omitted.push(Rejected::omitted(format!("K {stages}"), why));
        }
        stages <= most
    });
    for &micro_batches in request.micro_batches.iter().filter(|&&m| m > samples) {
        let why = format!("a mini-batch has only {samples} samples: M is {samples} at most");
        omitted.push(Rejected::omitted(format!("M {micro_batches}"), why));
    }
    if stages.is_empty() {
        if layers < least {
            return Err(PartitionError::TooManyStages { stages: least, layers }.into());
        }
        return Err(PlanError::Setting(format!(
            "{least} stages need {least} devices, there are {}: give more devices, or use fewer \
            stages",
            devices.len()
        )));
    }
    let (mut keys, mut too_long, mut is_possible) = (Vec::new(), None, false);
    for &stages in &stages {
        for micro_batches in request.micro_batches.iter().map(|m| (*m).min(samples)) {
            // Count as `predict` does, with all edges that a cut can have.
            let edges = 2 * stages + model.skips.len() + model.ties.len();
            if (3 * stages + 4 * edges).saturating_mul(micro_batches) > super::ACTIONS_MAX {
                let what = format!("K {stages}, M {micro_batches}");
                omitted.push(Rejected::omitted(what, "makes too long a step".into()));
                too_long = Some((stages, micro_batches));
                continue;
            }
            is_possible = true;
            let exact = request.schedules.iter().enumerate();
            let exact = exact.filter(|(_, own)| request.is_exact(stages, own));
            keys.extend(exact.map(|(s, _)| (stages, micro_batches, s)));
        }
    }
    if let (Some((stages, micro_batches)), false, true) = (too_long, is_possible, plain) {
        return Err(PlanError::Setting(format!(
            "{stages} stages with {micro_batches} micro-batches make too long a step: use fewer \
            of either"
        )));
    }
    keys.sort_unstable();
    keys.dedup();
    omitted.sort_by(|a, b| a.what.cmp(&b.what));
    omitted.dedup();
    Ok((keys, omitted))
}
