//! One better move for a given plan.

use std::fmt;

use super::{
    Plan, PlanDevice, PlanError, bound,
    neighbours::neighbours,
    predict,
    space::{Frame, Space},
};
use crate::{cost::ModelCosts, remat::Remat, report::device_times, units::Nanos};

/// Gains below this share of the step are not reported.
const GAIN_MIN: f64 = 0.005;

/// One change of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// Move a layer to an adjacent stage.
    Layer {
        /// The layer.
        layer: usize,
        /// Its stage.
        from: usize,
        /// Its new stage.
        to: usize,
    },
    /// Change the policy of a stage.
    Policy {
        /// The stage.
        stage: usize,
        /// Its new policy.
        policy: Remat,
    },
}

/// The best single move.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// What to change.
    pub change: Move,
    /// The name of the layer to move.
    pub layer: String,
    /// The busiest stage.
    pub bottleneck: usize,
    /// The changed plan.
    pub plan: Plan,
    /// Its step.
    pub step: Nanos,
    /// The share of the step that it saves.
    pub gain: f64,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.gain * 100.0;
        match self.change {
            Move::Layer { layer, from, to } => {
                let name = &self.layer;
                if from == self.bottleneck {
                    write!(
                        f,
                        "stage {from} is the bottleneck: move layer {layer} ({name}) to stage {to}"
                    )?;
                } else {
                    write!(f, "move layer {layer} ({name}) from stage {from} to stage {to}")?;
                }
            }
            Move::Policy { stage, policy } => {
                write!(f, "stage {stage}: re-materialize {policy}")?;
            }
        }
        write!(f, ": -{percent:.1}%")
    }
}

/// Finds the move of one layer across one boundary, or of one stage to another policy, that fits
/// and saves most. `None` if no move saves half a percent of the step, and for schedules other than
/// GPipe and 1F1B.
///
/// # Errors
/// [`PlanError`] if costs, devices and plan do not fit each other.
pub fn advice(
    model: &ModelCosts,
    devices: &[PlanDevice],
    samples: usize,
    plan: &Plan,
) -> Result<Option<Advice>, PlanError> {
    let now = predict(model, devices, samples, plan)?;
    if !plan.schedule.is_searched_exactly() {
        return Ok(None);
    }
    let (schedule, micro_batches) = (&plan.schedule, plan.micro_batches.min(samples));
    let (balance, remat) = (None, None);
    let frame = Frame { model, devices, samples, micro_batches, schedule, balance, remat };
    let mut space = Space::new(frame);
    space.estimate(false);
    let busy = device_times(&now.timeline).into_iter().map(|times| times.busy()).enumerate();
    let bottleneck = busy.max_by_key(|&(stage, busy)| (busy, std::cmp::Reverse(stage)));
    let step = now.step().0;
    let mut best = (bound::NONE, None);
    for (bound, change, plan) in neighbours(&mut space, plan, false)? {
        if bound >= best.0.min(step) {
            break;
        }
        if !space.fits(&plan)? {
            continue;
        }
        let step = space.run(&plan)?.step;
        if step < best.0 {
            best = (step, Some((change, plan)));
        }
    }
    let gain = 1.0 - best.0 as f64 / step.max(1) as f64;
    let (step, Some((change, plan))) = best else { return Ok(None) };
    let layer = match change {
        Move::Layer { layer, .. } => model.layers[layer].name.clone(),
        Move::Policy { .. } => String::new(),
    };
    let bottleneck = bottleneck.map_or(0, |(stage, _)| stage);
    let advice = Advice { change, layer, bottleneck, plan, step: Nanos(step), gain };
    Ok((gain >= GAIN_MIN).then_some(advice))
}
