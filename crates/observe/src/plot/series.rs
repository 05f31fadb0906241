//! Turns records into curves. Values may be many, noisy and non-finite.

/// Maximum number of points of a curve; a screen shows no more.
const POINTS_MAX: usize = 1_000;
/// A mean covers one in this many of the values.
const SMOOTHED_SHARE: usize = 20;

/// Larger values cannot be drawn with others, so they count as non-finite.
const VALUE_MAX: f64 = 1e30;
/// Larger steps are drawn at this step.
const STEP_MAX: u64 = 1_000_000_000_000;

/// Values by step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series(Vec<(i64, f64)>);

impl Series {
    /// Makes a series from steps and values.
    pub(super) fn new(points: impl Iterator<Item = (u64, f64)>) -> Self {
        let drawable = |value: f64| if value.abs() <= VALUE_MAX { value } else { f64::NAN };
        Self(points.map(|(step, value)| (step.min(STEP_MAX) as i64, drawable(value))).collect())
    }

    /// A moving mean over a twentieth of all values. `None` if that is fewer than 3 values.
    ///
    /// Near the start, where curves are steep, the window shrinks evenly on both sides, so the mean
    /// begins where the values do. Near the end the window is cut off.
    pub(super) fn smoothed(&self) -> Option<Self> {
        let half = self.0.len() / SMOOTHED_SHARE / 2;
        if half == 0 {
            return None;
        }
        // Sums and counts of the finite values before each position.
        let mut before = vec![(0.0, 0_usize)];
        let (mut sum, mut count) = (0.0, 0);
        for &(_, value) in &self.0 {
            if value.is_finite() {
                sum += value;
                count += 1;
            }
            before.push((sum, count));
        }
        let mean = |(index, &(step, value)): (usize, &(i64, f64))| {
            let half = half.min(index);
            let (low, high) = (index - half, (index + half + 1).min(self.0.len()));
            let count = (before[high].1 - before[low].1) as f64;
            let mean = (before[high].0 - before[low].0) / count;
            (step, if value.is_finite() { mean } else { f64::NAN })
        };
        Some(Self(self.0.iter().enumerate().map(mean).collect()))
    }

    /// The unbroken pieces of the curve. Non-finite values leave gaps. Long curves are thinned: of
    /// points too dense to show, the lowest and the highest are kept.
    pub(super) fn pieces(&self) -> Vec<Vec<(i64, f64)>> {
        let width = self.0.len().div_ceil(POINTS_MAX / 2).max(1);
        let mut pieces = vec![Vec::new()];
        for bucket in self.0.chunks(if self.0.len() <= POINTS_MAX { 1 } else { width }) {
            let finite = || bucket.iter().filter(|(_, value)| value.is_finite());
            let by_value = |a: &&(i64, f64), b: &&(i64, f64)| a.1.total_cmp(&b.1);
            let (Some(&low), Some(&high)) = (finite().min_by(by_value), finite().max_by(by_value))
            else {
                pieces.push(Vec::new());
                continue;
            };
            let Some(piece) = pieces.last_mut() else { continue };
            piece.push(if low.0 <= high.0 { low } else { high });
            if low != high {
                piece.push(if low.0 <= high.0 { high } else { low });
            }
        }
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }

    /// Every step.
    pub(super) fn steps(&self) -> impl Iterator<Item = i64> {
        self.0.iter().map(|(step, _)| *step)
    }

    /// Every finite value.
    pub(super) fn finite(&self) -> impl Iterator<Item = f64> {
        self.0.iter().map(|(_, value)| *value).filter(|value| value.is_finite())
    }

    /// The steps of non-finite values, thinned.
    pub(super) fn not_finite(&self) -> Vec<i64> {
        let bad = || self.0.iter().filter(|(_, value)| !value.is_finite()).map(|(step, _)| *step);
        bad().step_by(bad().count().div_ceil(POINTS_MAX / 10).max(1)).collect()
    }

    /// The number of values.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[f64]) -> Series {
        Series::new((1..).zip(values.iter().copied()))
    }

    #[test]
    fn oracle_means_are_of_the_values_around() {
        let values: Vec<f64> = (0..100).map(|i| f64::from(i * i % 17)).collect();
        let Some(Series(means)) = series(&values).smoothed() else { panic!("long enough") };
        for (index, (step, mean)) in means.into_iter().enumerate() {
            let half = index.min(2); // 100 / 20 / 2
            let window = &values[index - half..(index + half + 1).min(100)];
            let expected = window.iter().sum::<f64>() / window.len() as f64;
            assert_eq!(step, index as i64 + 1);
            assert!((mean - expected).abs() < 1e-9, "{index}: {mean} {expected}");
        }
        assert_eq!(series(&values[..39]).smoothed(), None, "too few");
    }

    #[test]
    fn oracle_values_that_are_not_finite_leave_gaps_and_spoil_no_mean() {
        let mut values = vec![1.0; 100];
        values[50] = f64::NAN;
        values[51] = f64::INFINITY;
        let all = series(&values);
        let Some(mean) = all.smoothed() else { panic!("long enough") };
        assert!(mean.finite().all(|value| value == 1.0) && mean.finite().count() == 98);
        let lengths: Vec<usize> = all.pieces().iter().map(Vec::len).collect();
        assert_eq!(lengths, [50, 48]);
        assert_eq!(all.not_finite(), [51, 52]);
    }

    #[test]
    fn property_thinning_keeps_the_extremes_in_order() {
        for length in [0, 1, 999, 1_000, 1_001, 54_321] {
            let mut values: Vec<f64> = (0..length).map(|i| f64::from(i * 7919 % 1009)).collect();
            if let Some(value) = values.get_mut(777) {
                *value = 1e6;
            }
            let all = series(&values);
            let thin: Vec<_> = all.pieces().concat();
            assert!(thin.len() <= POINTS_MAX, "{length}: {}", thin.len());
            assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0));
            let extremes = |values: &mut dyn Iterator<Item = f64>| {
                values.fold((f64::MAX, f64::MIN), |(a, b), v| (v.min(a), v.max(b)))
            };
            let drawn = extremes(&mut thin.iter().map(|point| point.1));
            assert_eq!(drawn, extremes(&mut values.into_iter()));
        }
    }
}
