//! What time it is for a worker: real, or counted from costs so that a run is reproduced to the
//! nanosecond.

use std::{sync::Arc, time::Instant};

use gpipe_core::{Action, Nanos, Transfer, lower::RematSet, simulate::Costs};

/// A worker's clock.
#[derive(Debug, Clone)]
pub enum Clock {
    /// Time since the origin, which all workers of a step share.
    Real(Instant),
    /// Lamport's: work takes what `costs` says, and a message carries its sender's time.
    Virtual {
        /// This worker's time.
        now: Nanos,
        /// What actions and links take.
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

    /// `action` was done.
    pub(crate) fn spend(&mut self, action: Action, recomputed: &RematSet) {
        if let Clock::Virtual { now, costs } = self {
            let again = |m| recomputed.contains(action.stage, m);
            *now += costs.duration(action, action.op.computes().is_some_and(again));
        }
    }

    /// Something that was ready at `time` was waited for.
    pub(crate) fn not_before(&mut self, time: Nanos) {
        if let Clock::Virtual { now, .. } = self {
            *now = (*now).max(time);
        }
    }

    /// Until when a message that is sent now takes its link, which is taken until `busy_until`, and
    /// when it arrives.
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
