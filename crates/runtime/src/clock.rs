//! A worker's clock: real, or virtual. A virtual clock counts costs, so a run reproduces to the
//! nanosecond.

use std::{sync::Arc, time::Instant};

use gpipe_core::{Action, Nanos, Transfer, lower::RematSet, simulate::Costs};

/// A worker's clock.
#[derive(Debug, Clone)]
pub enum Clock {
    /// Time since the origin, which all workers of a step share.
    Real(Instant),
    /// A Lamport clock: an action takes its time from `costs`, and a message carries its sender's
    /// time.
    Virtual {
        /// This worker's time.
        now: Nanos,
        /// Durations of actions and links.
        costs: Arc<Costs>,
    },
}

impl Clock {
    /// The time since the step began.
    pub fn now(&self) -> Nanos {
        match self {
            Clock::Real(origin) => {
                Nanos(u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
            }
            Clock::Virtual { now, .. } => *now,
        }
    }

    /// Advances a virtual clock by the duration of `action`.
    pub(crate) fn spend(&mut self, action: Action, recomputed: &RematSet) {
        if let Clock::Virtual { now, costs } = self {
            let again = |m| recomputed.contains(action.stage, m);
            *now += costs.duration(action, action.op.computes().is_some_and(again));
        }
    }

    /// Advances a virtual clock to `time`, when the awaited thing became ready.
    pub(crate) fn not_before(&mut self, time: Nanos) {
        if let Clock::Virtual { now, .. } = self {
            *now = (*now).max(time);
        }
    }

    /// When a message sent now has left its link, and when it arrives. Earlier messages occupy the
    /// link until `busy_until`.
    pub(crate) fn arrival(&self, transfer: Transfer, busy_until: Nanos) -> (Nanos, Nanos) {
        match self {
            Clock::Real(_) => (self.now(), self.now()),
            Clock::Virtual { now, costs } => {
                let cost = costs.link(transfer.edge);
                let left = busy_until.max(*now) + cost.occupied(transfer.direction);
                (left, left + cost.latency)
            }
        }
    }
}
