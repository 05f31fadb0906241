//! Chooses what is drawn of a timeline: each action with its duration, or several merged actions
//! that are too short.
//!
//! Waiting is left empty. Only the part of a receive after its message was sent counts as
//! communication. Before that, the device waits for another device's work.

use std::collections::HashMap;

use gpipe_core::{
    Action, Nanos, Op, Transfer,
    simulate::{TimedAction, Timeline},
};

/// Number of kinds.
const KINDS: usize = 6;

/// What a device spends its time on, in the order of the legend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Forward,
    Recompute,
    Backward,
    /// Weight gradients: the second half of a split backward.
    Weights,
    Optimizer,
    Communication,
}

impl Kind {
    pub(super) const ALL: [Self; KINDS] = [
        Self::Forward,
        Self::Recompute,
        Self::Backward,
        Self::Weights,
        Self::Optimizer,
        Self::Communication,
    ];

    pub(super) fn of(op: Op) -> Self {
        match op {
            Op::Forward(_) => Self::Forward,
            Op::Rematerialize(_) => Self::Recompute,
            Op::Backward(_) | Op::BackwardInput(_) => Self::Backward,
            Op::BackwardWeight(_) => Self::Weights,
            Op::Reduce | Op::Norm | Op::Decide | Op::Update => Self::Optimizer,
            Op::Send(_) | Op::Receive(_) => Self::Communication,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Weights => "weights' gradients",
            Self::Optimizer => "optimizer",
            Self::Communication => "communication",
        }
    }

    /// The kind's CSS class.
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::Forward => "f",
            Self::Recompute => "r",
            Self::Backward => "b",
            Self::Weights => "w",
            Self::Optimizer => "o",
            Self::Communication => "c",
        }
    }

    /// Whether the device computes, which the bubble counts as busy.
    pub(super) fn computes(self) -> bool {
        self != Self::Communication
    }
}

/// An action that takes time, or several consecutive ones merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: Nanos,
    pub(super) end: Nanos,
    pub(super) first: Action,
    pub(super) last: Action,
    /// The number of actions.
    pub(super) count: usize,
    /// Their time by kind.
    pub(super) times: [Nanos; KINDS],
}

impl Span {
    fn new(action: Action, start: Nanos, end: Nanos) -> Self {
        let mut times = [Nanos(0); KINDS];
        times[Kind::of(action.op) as usize] = end - start;
        Self { start, end, first: action, last: action, count: 1, times }
    }

    pub(super) fn time(&self) -> Nanos {
        self.end - self.start
    }

    /// The time spent computing.
    pub(super) fn busy(&self) -> Nanos {
        let computing = Kind::ALL.into_iter().filter(|kind| kind.computes());
        computing.map(|kind| self.times[kind as usize]).sum()
    }

    /// The kind, if the span is a single action.
    pub(super) fn kind(&self) -> Option<Kind> {
        (self.count == 1).then(|| Kind::of(self.first.op))
    }

    /// Merges a later span into this one.
    fn extend(&mut self, next: &Self) {
        self.end = self.end.max(next.end);
        self.last = next.last;
        self.count += next.count;
        for (sum, time) in self.times.iter_mut().zip(next.times) {
            *sum += time;
        }
    }
}

/// The spans of each device of `timeline`, one for each action that takes time.
pub(super) fn spans(timeline: &Timeline) -> Vec<Vec<Span>> {
    let mut sent: HashMap<Transfer, Nanos> = HashMap::new();
    for timed in timeline.devices.iter().flatten() {
        if let Op::Send(transfer) = timed.action.op {
            sent.insert(transfer, timed.end);
        }
    }
    let span = |timed: &TimedAction| {
        let start = match timed.action.op {
            Op::Receive(transfer) => {
                sent.get(&transfer).map_or(timed.end, |sent| timed.start.max(*sent))
            }
            _ => timed.start,
        };
        (timed.end > start).then(|| Span::new(timed.action, start, timed.end))
    };
    timeline.devices.iter().map(|actions| actions.iter().filter_map(span).collect()).collect()
}

/// Merges consecutive actions shorter than `short` if the gaps between them are shorter than
/// `short`, too. A merged span is at most `whole` long.
pub(super) fn condensed(spans: &[Span], short: Nanos, whole: Nanos) -> Vec<Span> {
    let mut out: Vec<Span> = Vec::new();
    let mut open = false;
    for span in spans {
        let is_short = span.time() < short;
        match out.last_mut() {
            Some(last) if open && is_short && span.start - last.end < short => {
                if span.end - last.start <= whole {
                    last.extend(span);
                } else {
                    // Count the gap between two merged spans to the first, as gaps within a span
                    // are.
                    if last.count > 1 {
                        last.end = last.end.max(span.start);
                    }
                    out.push(*span);
                }
            }
            _ => out.push(*span),
        }
        open = is_short;
    }
    out
}

/// Whether any device has several stages. Names then include the stage.
pub(super) fn is_shared(timeline: &Timeline) -> bool {
    timeline.devices.iter().any(|actions| {
        let first = actions.first().map(|timed| timed.action.stage);
        actions.iter().any(|timed| Some(timed.action.stage) != first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(name: &str, start: u64, end: u64) -> TimedAction {
        TimedAction { action: name.parse().unwrap(), start: Nanos(start), end: Nanos(end) }
    }

    #[test]
    fn oracle_waiting_is_empty_and_communication_is_what_comes_after_the_send() {
        let timeline = Timeline {
            devices: vec![
                vec![timed("0F0", 0, 10), timed("0SEND_F0@0", 10, 12), timed("0NORM", 12, 12)],
                vec![timed("1RECV_F0@0", 0, 15), timed("1F0", 15, 20), timed("1RECV_F1@0", 20, 30)],
            ],
            makespan: Nanos(30),
        };
        let all = spans(&timeline);
        let drawn = |device: usize| -> Vec<_> {
            all[device].iter().map(|s| (s.first.to_string(), s.start.0, s.end.0)).collect()
        };
        assert_eq!(drawn(0), [("0F0".into(), 0, 10), ("0SEND_F0@0".into(), 10, 12)]);
        // A receive without a send is all waiting.
        assert_eq!(drawn(1), [("1RECV_F0@0".into(), 12, 15), ("1F0".into(), 15, 20)]);
    }

    #[test]
    fn oracle_short_actions_are_put_together_and_lose_no_time() {
        let mut actions = vec![timed("0F0", 0, 100)];
        actions.extend((0..10).map(|i| timed("0F1", 100 + 5 * i, 105 + 5 * i)));
        actions.push(timed("0B0", 200, 205));
        let all = spans(&Timeline { devices: vec![actions], makespan: Nanos(205) });
        let merged = condensed(&all[0], Nanos(10), Nanos(20));
        let parts: Vec<_> = merged.iter().map(|s| (s.start.0, s.end.0, s.count)).collect();
        assert_eq!(
            parts,
            [(0, 100, 1), (100, 120, 4), (120, 140, 4), (140, 150, 2), (200, 205, 1)]
        );
        let time = |spans: &[Span]| spans.iter().map(Span::busy).sum::<Nanos>();
        assert_eq!(time(&merged), time(&all[0]));
        assert_eq!(condensed(&all[0], Nanos(0), Nanos(20)), all[0]);
    }
}
