//! Values over the time of a step: the share of idle devices, and the bytes held.

use gpipe_core::{Bytes, Nanos};

use super::spans::Span;

/// The mean share of devices that do not compute, in each of `bins` equal parts of `time`. Parts
/// after `makespan` are omitted.
pub(super) fn idle(spans: &[Vec<Span>], time: Nanos, makespan: Nanos, bins: usize) -> Vec<f64> {
    let bin = time.0 as f64 / bins.max(1) as f64;
    let count = ((makespan.0 as f64 / bin).ceil() as usize).min(bins);
    let mut busy = vec![0.0; count];
    for span in spans.iter().flatten() {
        let (start, end) = (span.start.0 as f64, span.end.0 as f64);
        // Spread the computing time of a merged span evenly.
        let density = span.busy().0 as f64 / (end - start).max(1.0);
        let first = ((start / bin) as usize).min(count);
        for (number, sum) in busy.iter_mut().enumerate().skip(first) {
            let (from, to) = (number as f64 * bin, (number + 1) as f64 * bin);
            if from >= end {
                break;
            }
            *sum += density * (end.min(to) - start.max(from)).max(0.0);
        }
    }
    let area = |number: usize| {
        let end = ((number + 1) as f64 * bin).min(makespan.0 as f64);
        (end - number as f64 * bin).max(1e-9) * spans.len().max(1) as f64
    };
    let share = |(number, busy): (usize, f64)| (1.0 - busy / area(number)).clamp(0.0, 1.0);
    busy.into_iter().enumerate().map(share).collect()
}

/// Thins a series to about `points_max` points. Its time is cut into equal parts, and the largest
/// and last point of each part are kept, so no peak is lost.
pub(super) fn thinned(series: &[(Nanos, Bytes)], points_max: usize) -> Vec<(Nanos, Bytes)> {
    if series.len() <= points_max {
        return series.to_vec();
    }
    let (first, last) = match (series.first(), series.last()) {
        (Some(first), Some(last)) => (first.0, last.0),
        _ => return Vec::new(),
    };
    let bins = (points_max / 2).max(1) as u128;
    let bin_of =
        |time: Nanos| u128::from((time - first).0) * bins / (u128::from((last - first).0) + 1);
    let mut out: Vec<(Nanos, Bytes)> = Vec::new();
    for part in series.chunk_by(|a, b| bin_of(a.0) == bin_of(b.0)) {
        let Some(largest) = part.iter().rev().max_by_key(|point| point.1) else { continue };
        out.push(*largest);
        out.extend(part.last().filter(|last| *last != largest));
    }
    out
}

#[cfg(test)]
mod tests {
    use gpipe_core::simulate::{TimedAction, Timeline};

    use super::{super::spans::spans, *};

    #[test]
    fn oracle_idle_is_the_bubble_over_time() {
        let timed = |name: &str, start, end| TimedAction {
            action: name.parse().unwrap(),
            start: Nanos(start),
            end: Nanos(end),
        };
        let devices = vec![
            vec![timed("0F0", 0, 400), timed("0B0", 730, 1000)],
            vec![timed("1F0", 400, 500), timed("1B0", 500, 730)],
        ];
        let timeline = Timeline { devices, makespan: Nanos(1000) };
        let spans = spans(&timeline);
        assert_eq!(idle(&spans, Nanos(2000), Nanos(1000), 4), [0.5, 0.5]);
        let fine = idle(&spans, Nanos(1000), Nanos(1000), 7);
        let mean = fine.iter().sum::<f64>() / 7.0;
        assert!((mean - timeline.bubble()).abs() < 1e-9, "{mean}");
    }

    #[test]
    fn property_thinning_keeps_the_peak_and_the_end() {
        let mut random = gpipe_core::splitmix::Stream::new(3);
        for points in [0, 1, 10, 100, 5000] {
            let series: Vec<_> =
                (0..points).map(|i| (Nanos(i * 7), Bytes(random.below(1000) as u64))).collect();
            let thin = thinned(&series, 50);
            assert!(thin.len() <= 52, "{}", thin.len());
            assert_eq!(thin.iter().map(|p| p.1).max(), series.iter().map(|p| p.1).max());
            assert_eq!(thin.last(), series.last());
            assert!(thin.is_sorted_by_key(|point| point.0));
        }
    }
}
