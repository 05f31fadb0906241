//! Alternatives that lost against the chosen plan, and why.

use super::{Plan, PlanDevice, PlanError, Prediction, shortage, space::Frame};
use crate::units::Nanos;

/// An alternative that lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// How it would run. It names no cut if none was needed to rule it out.
    pub what: String,
    /// Its plan, if one was made.
    pub plan: Option<Plan>,
    /// Its step.
    pub step: Option<Nanos>,
    /// Why it lost.
    pub why: String,
}

impl Rejected {
    /// A requested value that no combination can use.
    pub(super) fn omitted(what: String, why: String) -> Self {
        Self { what, plan: None, step: None, why }
    }

    /// A combination that lost. `misfit` says why it is impossible, if that is known. `is_exact`:
    /// it was searched exactly.
    pub(super) fn other(
        frame: Frame<'_>,
        own: Option<(u64, Plan)>,
        step: u64,
        misfit: Option<String>,
        is_exact: bool,
    ) -> Result<Self, PlanError> {
        let stages = frame.devices.len();
        let what = format!("K {stages}, M {}, {}", frame.micro_batches, frame.schedule);
        let (plan, step, why) = match own {
            Some((own, plan)) => (Some(plan), Some(Nanos(own)), Percent::slower(own, step)),
            None => {
                let why = match misfit {
                    None if is_exact => shortage::reason(frame)?,
                    misfit => misfit,
                };
                (None, None, why.unwrap_or("no plan that fits was found".into()))
            }
        };
        Ok(Self { what, plan, step, why })
    }

    pub(super) fn without_remat(
        plan: Plan,
        prediction: &Prediction,
        devices: &[PlanDevice],
        step: u64,
    ) -> Self {
        let own = prediction.step();
        let peaks = prediction.device_peaks();
        let over = peaks.into_iter().zip(devices).enumerate().filter_map(|(k, (peak, d))| {
            d.memory.filter(|&cap| peak > cap).map(|cap| (peak - cap, k, peak, cap))
        });
        let why = match over.max() {
            Some((_, device, peak, cap)) => {
                format!("needs {peak} on device {device}, which has {cap}")
            }
            None => Percent::slower(own.0, step),
        };
        Self {
            what: "the same, re-materializing never".into(),
            plan: Some(plan),
            step: Some(own),
            why,
        }
    }
}

/// A relative difference of times, in percent.
pub(super) struct Percent(f64);

impl Percent {
    /// How `a` compares with `b`, in words.
    pub fn slower(a: u64, b: u64) -> String {
        if a < b {
            format!("{} faster", Self::more(b, a))
        } else {
            format!("{} slower", Self::more(a, b))
        }
    }

    /// How much more `a` is than `b`.
    pub fn more(a: u64, b: u64) -> Self {
        Self(if b == 0 { 0.0 } else { (a as f64 / b as f64 - 1.0) * 100.0 })
    }
}

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1}%", self.0)
    }
}
