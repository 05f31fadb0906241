//! Where a step's time went, device by device, and the bubble.

use crate::{action::Op, simulate::Timeline, units::Nanos};

/// One device's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceTimes {
    /// In forwards.
    pub forward: Nanos,
    /// In re-materialization.
    pub recompute: Nanos,
    /// In backwards.
    pub backward: Nanos,
    /// Reducing tied weights, norms, and the update itself.
    pub optimizer: Nanos,
    /// Handing messages over and waiting for them.
    pub wait: Nanos,
}

impl DeviceTimes {
    /// All but waiting.
    pub fn busy(&self) -> Nanos {
        self.forward + self.recompute + self.backward + self.optimizer
    }
}

/// Each device's times; `wait` is what is left of the makespan, so the parts sum to it.
pub fn device_times(timeline: &Timeline) -> Vec<DeviceTimes> {
    timeline
        .devices
        .iter()
        .map(|actions| {
            let mut times = DeviceTimes::default();
            for timed in actions {
                let spent = timed.end - timed.start;
                match timed.action.op {
                    Op::Forward(_) => times.forward += spent,
                    Op::Rematerialize(_) => times.recompute += spent,
                    Op::Backward(_) => times.backward += spent,
                    Op::Reduce | Op::Norm | Op::Decide | Op::Update => times.optimizer += spent,
                    Op::Send(_) | Op::Receive(_) => {}
                }
            }
            times.wait = timeline.makespan - times.busy();
            times
        })
        .collect()
}

/// The share of devices x makespan in which a device was not busy: 0 is perfect.
pub fn bubble(timeline: &Timeline) -> f64 {
    let area = timeline.makespan.0 as f64 * timeline.devices.len() as f64;
    if area == 0.0 {
        return 0.0;
    }
    let busy: Nanos = device_times(timeline).iter().map(DeviceTimes::busy).sum();
    (1.0 - busy.0 as f64 / area).max(0.0)
}

/// The time in which at least two devices were computing at once: what shows that stages do overlap.
pub fn overlap(timeline: &Timeline) -> Nanos {
    let mut changes: Vec<(u64, i32)> = Vec::new();
    for timed in timeline.devices.iter().flatten() {
        let communicates = matches!(timed.action.op, Op::Send(_) | Op::Receive(_));
        if !communicates && timed.end > timed.start {
            changes.push((timed.start.0, 1));
            changes.push((timed.end.0, -1));
        }
    }
    changes.sort_unstable();
    let (mut active, mut since, mut total) = (0, 0, 0);
    for (time, change) in changes {
        if active >= 2 {
            total += time - since;
        }
        active += change;
        since = time;
    }
    Nanos(total)
}
