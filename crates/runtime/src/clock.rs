//! A worker's clock: real, or virtual. A virtual clock counts costs, so a run reproduces to the
//! nanosecond.

use std::{sync::Arc, time::Instant};

use gpipe_core::{
    Action, Nanos, Op, Transfer,
    lower::RematSet,
    simulate::{Costs, TimedAction},
};

use crate::stage::Span;

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

    /// Replaces the times of the calls by those of the device, which did the work later. `spans`
    /// has one entry for each action that is no send or receive; if it is empty, the times stay.
    ///
    /// A send or receive comes after the computing action before it. The last receive before a
    /// computing action lasts until that begins: until then the values are on their way.
    pub(crate) fn correct(&self, actions: &mut [TimedAction], spans: &[Span]) {
        let Clock::Real(origin) = self else { return };
        let since = |time: Instant| {
            let nanos = time.saturating_duration_since(*origin).as_nanos();
            Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        let mut spans = spans.iter().map(|&(start, end)| (since(start), since(end)));
        let (mut done, mut receive) = (Nanos(0), None);
        for index in 0..actions.len() {
            let timed = &mut actions[index];
            match timed.action.op {
                Op::Send(_) | Op::Receive(_) => {
                    (timed.start, timed.end) = (timed.start.max(done), timed.end.max(done));
                    done = timed.end;
                    if matches!(timed.action.op, Op::Receive(_)) {
                        receive = Some(index);
                    }
                }
                _ => {
                    let Some((start, end)) = spans.next() else { return };
                    let start = start.max(done);
                    (timed.start, timed.end) = (start, end.max(start));
                    done = timed.end;
                    if let Some(receive) = receive.take().filter(|own| own + 1 == index) {
                        actions[receive].end = start;
                    }
                }
            }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpipe_core::{Direction, EdgeId, MicroBatch, StageId};

    use super::*;

    /// A device that began its work 10 ns after the calls, and the second forward only when its
    /// input was there.
    #[test]
    fn oracle_a_devices_times_replace_those_of_the_calls() {
        let (first, second) = (MicroBatch(0), MicroBatch(1));
        let transfer = |direction, m| {
            let (micro_batch, edge) = (Some(m), EdgeId::from_index(0));
            Transfer { direction, micro_batch, edge }
        };
        let ops = [
            (Op::Forward(first), 0..2),
            (Op::Send(transfer(Direction::Forward, first)), 2..3),
            (Op::Receive(transfer(Direction::Backward, second)), 3..4),
            (Op::Forward(second), 4..6),
            (Op::Send(transfer(Direction::Forward, second)), 6..90),
        ];
        let timed = |(op, time): (Op, std::ops::Range<u64>)| TimedAction {
            action: Action { stage: StageId(0), op },
            start: Nanos(time.start),
            end: Nanos(time.end),
        };
        let mut actions: Vec<TimedAction> = ops.into_iter().map(timed).collect();
        let calls = actions.clone();
        let origin = Instant::now();
        let at = |nanos| origin + Duration::from_nanos(nanos);
        let clock = Clock::Real(origin);
        clock.correct(&mut actions, &[]);
        assert_eq!(actions, calls);
        clock.correct(&mut actions, &[(at(10), at(20)), (at(50), at(70))]);
        let times: Vec<_> = actions.iter().map(|timed| (timed.start.0, timed.end.0)).collect();
        assert_eq!(times, [(10, 20), (20, 20), (20, 50), (50, 70), (70, 90)]);
    }
}
