//! If no plan fits: the plan of least memory, and the caps that it would need.
//!
//! A stage's load is its peak or, if caps differ, the share of its cap that it needs. Minimizing
//! the largest load over all cuts is a bottleneck problem. Dynamic programming solves it exactly
//! for a plain chain. If stages depend on other cuts, it is solved twice: for lower bounds on what
//! stages hold, which yields a bound, and for estimates, which yield a plan.

use std::ops::Range;

use super::{
    Plan, PlanError,
    bound::NONE,
    predict,
    space::{Frame, Space},
};
use crate::{remat::Remat, units::Bytes};

/// The most candidate stages to price. If there would be more, only stages with up to [`LENGTHS`]
/// times the average number of layers are priced.
const CELLS_MAX: usize = 1 << 20;
const LENGTHS: usize = 3;

/// The number of parts of a cap, in which loads are counted if caps differ.
const PARTS: u64 = 1 << 20;

/// No plan fits, and what would.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "no plan fits: {stage_text} needs {} ({resident} of parameters and optimizer, {gradients} \
    of gradients, {activations} of activations), and its device has {}: {remedy}",
    apart(*peak, *cap), apart(*cap, *peak),
    stage_text = format!("with K {}, M {}, {}, stage {stage} ({} layers, re-materialized {}) on \
        device {stage}",
        plan.balance.len(), plan.micro_batches, plan.schedule, plan.balance[*stage],
        plan.remat.of(*stage)),
    remedy = self.remedy()
)]
pub struct Shortage {
    /// The plan of least memory.
    pub plan: Plan,
    /// The stage that exceeds its cap most, and its device.
    pub stage: usize,
    /// Its cap.
    pub cap: Bytes,
    /// The most that the stage holds.
    pub peak: Bytes,
    /// The part of `peak` that is parameters and optimizer state.
    pub resident: Bytes,
    /// The part of `peak` that is gradients.
    pub gradients: Bytes,
    /// The rest of `peak`.
    pub activations: Bytes,
    /// The smallest cap per device that works, if all caps are equal.
    pub smallest: Option<Bytes>,
    /// The factor by which all caps must grow.
    pub factor: f64,
    /// Whether no smaller caps work. Otherwise smaller ones may work.
    pub exact: bool,
}

/// `bytes`, in full where they would look like `other`.
fn apart(bytes: Bytes, other: Bytes) -> String {
    let short = bytes.to_string();
    if short == other.to_string() { format!("{} bytes", bytes.0) } else { short }
}

impl Shortage {
    fn remedy(&self) -> String {
        let smallest = if self.exact { "the smallest that works" } else { "enough" };
        match self.smallest {
            Some(cap) => format!("{} bytes ({cap}) per device is {smallest}", cap.0),
            // Round up, because the printed factor must be enough.
            None => {
                let factor = (self.factor * 1000.0).ceil() / 1000.0;
                format!("caps {factor:.3} times as large are {smallest}")
            }
        }
    }
}

/// A cut, a policy for each stage, and the largest load.
struct Lightest {
    load: u64,
    balance: Vec<usize>,
    policies: Vec<Remat>,
}

/// The unit of loads.
#[derive(Clone, Copy)]
enum Load {
    Peak,
    Share,
}

impl Load {
    fn of(self, peak: Bytes, cap: Option<Bytes>) -> u64 {
        match (self, cap) {
            (_, None) => 0,
            (Load::Peak, Some(_)) => peak.0.min(NONE - 1),
            (Load::Share, Some(cap)) => {
                let share =
                    (u128::from(peak.0) * u128::from(PARTS)).div_ceil(u128::from(cap.0.max(1)));
                u64::try_from(share).unwrap_or(NONE).min(NONE - 1)
            }
        }
    }
}

/// The plan of least memory among all of `frames`, with the index of its frame, if the plan fits.
///
/// # Errors
/// [`PlanError::Memory`] if the plan does not fit.
pub(super) fn least(frames: &[Frame<'_>]) -> Result<(usize, Plan), PlanError> {
    let caps = frames.iter().flat_map(|frame| frame.devices).filter_map(|device| device.memory);
    let mut caps: Vec<Bytes> = caps.collect();
    caps.sort_unstable();
    caps.dedup();
    let load = if caps.len() == 1 { Load::Peak } else { Load::Share };
    let mut best: Option<(u64, usize, Plan)> = None;
    let mut bound = NONE;
    for (index, &frame) in frames.iter().enumerate() {
        let mut space = Space::new(frame);
        let below = best.as_ref().map_or(NONE, |(load, ..)| *load);
        for estimates in if space.is_plain() { vec![true] } else { vec![false, true] } {
            space.estimate(estimates);
            let Some(lightest) = lightest(&mut space, load, below)? else { continue };
            let plan = space.plan(lightest.balance, lightest.policies);
            let own = match space.is_plain() {
                true => lightest.load,
                false => {
                    let peaks = space.peaks(&plan)?.into_iter().zip(frame.devices);
                    peaks.map(|(peak, device)| load.of(peak, device.memory)).max().unwrap_or(0)
                }
            };
            let layers = space.layers();
            if longest(space.stages(), layers) < layers {
                bound = 0;
            } else if space.is_plain() || !estimates {
                bound = bound.min(lightest.load);
            }
            if best.as_ref().is_none_or(|(least, ..)| own < *least) {
                best = Some((own, index, plan));
            }
        }
    }
    let Some((least, index, plan)) = best else {
        return Err(PlanError::Setting("there is no plan at all".into()));
    };
    shortage(&frames[index], plan, (least, bound), load, &caps).map(|plan| (index, plan))
}

/// Why no plan of `frame` fits. `None` if one might, or if there are too many to check.
pub(super) fn reason(frame: Frame<'_>) -> Result<Option<String>, PlanError> {
    let layers = frame.model.layers.len();
    if longest(frame.devices.len(), layers) < layers {
        return Ok(None);
    }
    match least(&[frame]) {
        Err(PlanError::Memory(missing)) => {
            let Shortage { peak, stage, cap, exact, .. } = *missing;
            let least = if exact { "at least " } else { "" };
            Ok(Some(format!("needs {least}{peak} on device {stage}, which has {cap}")))
        }
        other => other.map(|_| None),
    }
}

/// Returns the plan if it fits, otherwise the shortage.
fn shortage(
    frame: &Frame<'_>,
    plan: Plan,
    (least, bound): (u64, u64),
    load: Load,
    caps: &[Bytes],
) -> Result<Plan, PlanError> {
    let prediction = predict(frame.model, frame.devices, frame.samples, &plan)?;
    let stages = prediction.stages.iter().zip(frame.devices).enumerate();
    let worst = stages.filter_map(|(stage, (own, device))| {
        let cap = device.memory?;
        let over = own.peak.0 as f64 / cap.0.max(1) as f64;
        (own.peak > cap).then_some((over, stage, cap, own))
    });
    let Some((factor, stage, cap, own)) = worst.max_by(|a, b| a.0.total_cmp(&b.0)) else {
        return Ok(plan);
    };
    let (resident, gradients) = (own.bytes.resident, own.bytes.gradients);
    let smallest = match load {
        Load::Peak if caps.len() == 1 => Some(Bytes(least)),
        _ => None,
    };
    Err(Box::new(Shortage {
        stage,
        cap,
        peak: own.peak,
        resident,
        gradients,
        activations: own.peak - resident - gradients,
        smallest,
        factor,
        exact: bound == least,
        plan,
    })
    .into())
}

/// The cut and policies that minimize the largest load, if it is below `below`.
fn lightest(space: &mut Space<'_>, load: Load, below: u64) -> Result<Option<Lightest>, PlanError> {
    let (stages, layers) = (space.stages(), space.layers());
    let longest = longest(stages, layers);
    let mut table: Vec<Vec<Option<(u64, usize, Remat)>>> = vec![vec![None; layers + 1]; stages];
    for stage in (0..stages).rev() {
        let rest = stages - 1 - stage;
        let cap = space.frame.devices[stage].memory;
        let starts = if stage == 0 { 0..1 } else { stage..layers - rest };
        for start in starts {
            let first = if rest == 0 { layers } else { start + 1 };
            for end in first..=layers - rest {
                let best = table[stage][start].map_or(below, |(load, ..)| load);
                if !space.allows(stage, start, end) {
                    continue;
                }
                let too_long = rest > 0 && end - start > longest;
                if too_long || load.of(space.sums[0].states(&(start..end)), cap) >= best {
                    break;
                }
                let later = match rest {
                    0 => Some(0),
                    _ => table[stage + 1][end].map(|(load, ..)| load),
                };
                let Some(later) = later.filter(|&later| later < best) else { continue };
                let (own, policy) = lightest_policy(space, stage, start..end, load)?;
                if own.max(later) < best {
                    table[stage][start] = Some((own.max(later), end, policy));
                }
            }
        }
    }
    let Some((load, ..)) = table[0][0] else { return Ok(None) };
    let mut found = Lightest { load, balance: Vec::new(), policies: Vec::new() };
    let mut start = 0;
    for row in &table {
        let Some((_, end, policy)) = row[start] else { return Ok(None) };
        found.balance.push(end - start);
        found.policies.push(policy);
        start = end;
    }
    Ok(Some(found))
}

/// The most layers of a stage that are considered.
fn longest(stages: usize, layers: usize) -> usize {
    match stages.saturating_mul(layers).saturating_mul(layers) > CELLS_MAX {
        true => LENGTHS * layers.div_ceil(stages),
        false => layers,
    }
}

fn lightest_policy(
    space: &mut Space<'_>,
    stage: usize,
    range: Range<usize>,
    load: Load,
) -> Result<(u64, Remat), PlanError> {
    let cap = space.frame.devices[stage].memory;
    let mut best = (NONE, Remat::Always);
    for (policy, _) in space.policies(stage, range.len()) {
        let own = match cap {
            Some(_) => load.of(space.peak(stage, &range, policy)?, cap),
            None => 0,
        };
        if own < best.0 {
            best = (own, policy);
        }
    }
    Ok(best)
}
