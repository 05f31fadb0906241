//! What keeps a plan's step from being shorter.

use std::fmt;

use super::{Plan, PlanDevice, PlanError, Prediction, predict};
use crate::{
    cost::{ModelCosts, Transport},
    remat::Remat,
    report::device_times,
    topology::ranges,
    units::{Bytes, Nanos},
};

/// What limits a plan most, and the share of the step that would be saved without it.
#[derive(Debug, Clone, PartialEq)]
pub enum Limit {
    /// A device's memory: stages recompute because their activations would not fit.
    Memory {
        /// The device that would exceed its cap most without recomputation.
        device: usize,
        /// The memory that it would need if no stage recomputed.
        needed: Bytes,
        /// The share of the step that this would save.
        share: f64,
    },
    /// Stages are not equally busy.
    Imbalance {
        /// The busiest stage, or the busiest device if devices have several stages.
        stage: usize,
        /// Whether devices have several stages.
        is_shared: bool,
        /// Its heaviest layer.
        layer: usize,
        /// The name of the layer.
        name: String,
        /// The share that equally busy stages would save.
        share: f64,
    },
    /// Devices wait while the pipeline fills and drains. More micro-batches or fewer stages help.
    Bubble {
        /// The share of the step.
        share: f64,
    },
    /// The work itself.
    Work,
    /// Messages take time.
    Links {
        /// The share that links without transfer time would save.
        share: f64,
    },
}

impl Limit {
    /// The share of the step that the limit costs.
    pub fn share(&self) -> f64 {
        match self {
            Limit::Memory { share, .. }
            | Limit::Imbalance { share, .. }
            | Limit::Bubble { share }
            | Limit::Links { share } => *share,
            Limit::Work => 0.0,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.share();
        match self {
            Limit::Memory { device, needed, .. } => {
                write!(
                    f,
                    "memory: with {needed} on device {device} and enough elsewhere, nothing is \
                    recomputed: -{percent:.1}%"
                )
            }
            Limit::Imbalance { stage, layer, name, is_shared, .. } => {
                let row = if *is_shared { "device" } else { "stage" };
                write!(
                    f,
                    "imbalance: {row} {stage} is busy longest, its heaviest layer is {layer} \
                    ({name}); equal stages: -{percent:.1}%"
                )
            }
            Limit::Bubble { .. } => {
                write!(
                    f,
                    "filling and draining: {percent:.1}% of the step; more micro-batches or fewer \
                    stages lessen it"
                )
            }
            Limit::Work => f.write_str("the work itself: no device waits"),
            Limit::Links { .. } => write!(f, "links: -{percent:.1}% if messages took no time"),
        }
    }
}

/// Finds what limits `plan` most.
pub(super) fn limit(
    model: &ModelCosts,
    devices: &[PlanDevice],
    samples: usize,
    plan: &Plan,
    prediction: &Prediction,
) -> Result<Limit, PlanError> {
    let step = prediction.step();
    let share = |time: Nanos| (step - time).0 as f64 / step.0.max(1) as f64;
    let busy = device_times(&prediction.timeline).into_iter().map(|times| times.busy());
    let busy: Vec<Nanos> = busy.collect();
    let most = busy.iter().copied().max().unwrap_or_default();
    let sum = busy.iter().map(|busy| u128::from(busy.0)).sum::<u128>();
    let mean = Nanos(u64::try_from(sum / busy.len().max(1) as u128).unwrap_or(u64::MAX));
    let stage = busy.iter().position(|&busy| busy == most).unwrap_or_default();
    let larger = samples.div_ceil(plan.micro_batches.min(samples).max(1));
    let costs = model.at(larger, &plan.schedule);
    let placement = plan.schedule.placement(devices.len());
    let own = ranges(&plan.balance).into_iter().zip(placement).filter(|(_, on)| *on == stage);
    let own = own.flat_map(|(range, _)| range);
    let weight = |layer: &usize| {
        let cost = &costs[*layer];
        cost.forward_kept + cost.backward_kept.max(cost.backward_input + cost.backward_weight)
    };
    let layer = own.max_by_key(weight).unwrap_or_default();
    let name = model.layers[layer].name.clone();
    let is_shared = plan.balance.len() != devices.len();
    let mut limits = vec![
        Limit::Imbalance { stage, layer, name, is_shared, share: share(step - (most - mean)) },
        Limit::Bubble { share: share(most) },
    ];
    if model.transport != Transport::default() {
        let free = ModelCosts { transport: Transport::default(), ..model.clone() };
        let share = share(predict(&free, devices, samples, plan)?.step());
        limits.push(Limit::Links { share });
    }
    if devices.iter().any(|device| device.memory.is_some()) {
        let never = Plan { remat: Remat::Never.into(), ..plan.clone() };
        let never = predict(model, devices, samples, &never)?;
        let over = never.device_peaks().into_iter().zip(devices).enumerate().filter_map(
            |(k, (peak, device))| {
                let cap = device.memory.filter(|&cap| peak > cap)?;
                Some((peak - cap, k, peak))
            },
        );
        if let Some((_, device, needed)) = over.max() {
            limits.push(Limit::Memory { device, needed, share: share(never.step()) });
        }
    }
    limits.sort_by(|a, b| b.share().total_cmp(&a.share()));
    Ok(limits.into_iter().find(|limit| limit.share() > 0.0).unwrap_or(Limit::Work))
}
