//! Times of messages between stages: a latency between threads, which move values without a copy,
//! and a latency and a bandwidth between processes.

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{
    Nanos, Op,
    cost::Transport,
    simulate::{Timeline, median},
};

use crate::pipeline::StepReport;

/// A send that takes longer than this has waited for room in its link.
const FREE: Nanos = Nanos(100_000);

/// Times of messages in nanoseconds, by message size in bytes.
#[derive(Debug, Default)]
pub(super) struct Messages(BTreeMap<u64, Vec<u64>>);

impl Messages {
    /// Adds the messages of one step. All messages of a stage count as equally large: it sends
    /// activations one way and their gradients the other.
    pub(super) fn add(&mut self, report: &StepReport) {
        for (device, time) in times_of(&report.timeline) {
            let sends = report.timeline.devices[device].iter();
            let sends = sends.filter(|timed| match timed.action.op {
                Op::Send(transfer) => transfer.micro_batch.is_some(),
                _ => false,
            });
            let sent = report.devices.get(device).map_or(0, |own| own.sent.0);
            let bytes = sent / (sends.count() as u64).max(1);
            self.0.entry(bytes).or_default().push(time.0);
        }
    }

    pub(super) fn extend(&mut self, other: Self) {
        for (bytes, times) in other.0 {
            self.0.entry(bytes).or_default().extend(times);
        }
    }

    /// Fits a latency and, if messages are copied, a bandwidth in bytes per second.
    pub(super) fn transport(mut self, copied: bool) -> Transport {
        let points: Vec<(f64, f64)> = self
            .0
            .iter_mut()
            .map(|(&bytes, times)| (bytes as f64, median(times).0 as f64))
            .collect();
        let all = || median(&mut self.0.values().flatten().copied().collect::<Vec<_>>());
        match line(&points).filter(|_| copied) {
            Some((latency, per_byte)) => {
                Transport { latency: Nanos(latency as u64), bytes_per_s: (1e9 / per_byte) as u64 }
            }
            None => Transport { latency: all(), bytes_per_s: 0 },
        }
    }
}

/// The time from each send to the end of the receive that waited for it, by sending device.
///
/// Times count from the start of the send, and only for sends that did not wait for room. Another
/// thread notes the end of a send, possibly after the receive has ended.
fn times_of(timeline: &Timeline) -> Vec<(usize, Nanos)> {
    let mut sent = HashMap::new();
    for (device, timed) in
        timeline.devices.iter().enumerate().flat_map(|(d, list)| list.iter().map(move |t| (d, t)))
    {
        if let Op::Send(transfer) = timed.action.op
            && timed.end - timed.start < FREE
        {
            sent.insert(transfer, (device, timed.start));
        }
    }
    let waited = timeline.devices.iter().flatten().filter_map(|timed| {
        let Op::Receive(transfer) = timed.action.op else { return None };
        let &(device, left) = sent.get(&transfer)?;
        (transfer.micro_batch.is_some() && timed.start < left).then(|| (device, timed.end - left))
    });
    waited.collect()
}

/// Fits a line (intercept, slope) that a few outliers cannot spoil (Theil 1950, Sen 1968).
///
/// The slope is the median of the slopes of all pairs of points. The intercept is the median of the
/// residuals, at least 0. Returns `None` for fewer than two points, or if the line does not rise.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let middle = |mut values: Vec<f64>| {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len();
        (count > 0).then(|| (values[(count - 1) / 2] + values[count / 2]) / 2.0)
    };
    let mut slopes = Vec::new();
    for (index, &(x, y)) in points.iter().enumerate() {
        slopes.extend(points[..index].iter().map(|&(a, b)| (y - b) / (x - a)));
    }
    let slope = middle(slopes).filter(|slope| *slope > 0.0)?;
    let left = middle(points.iter().map(|&(x, y)| y - slope * x).collect())?;
    Some((left.max(0.0), slope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_latency_and_bandwidth_come_back() {
        // 50 us and 1 GB/s, with one size disturbed.
        let time = |bytes: u64| 50_000 + bytes;
        let mut messages = Messages::default();
        for bytes in [1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22] {
            let disturbed = if bytes == 1 << 16 { 900_000 } else { 0 };
            messages.0.insert(bytes, vec![time(bytes) + disturbed; 3]);
        }
        let found = messages.transport(true);
        assert!(found.latency.0.abs_diff(50_000) < 5_000, "{found:?}");
        assert!((0.95e9..1.05e9).contains(&(found.bytes_per_s as f64)), "{found:?}");
    }

    #[test]
    fn oracle_threads_have_a_latency_only() {
        let sizes = [(1 << 12, vec![3_000, 5_000, 4_000]), (1 << 20, vec![6_000, 2_000])];
        let found = Messages(sizes.clone().into_iter().collect()).transport(false);
        assert_eq!(found, Transport { latency: Nanos(4_000), bytes_per_s: 0 });
        // One size gives no bandwidth, and neither do larger messages that take less time.
        let one = Messages([sizes[0].clone()].into_iter().collect()).transport(true);
        assert_eq!(one, Transport { latency: Nanos(4_000), bytes_per_s: 0 });
        assert_eq!(line(&[(1.0, 9.0), (2.0, 5.0)]), None);
        assert_eq!(line(&[]), None);
    }
}
