//! The spread of measured times.

use serde::{Deserialize, Serialize};

use crate::units::Nanos;

/// A median, in thousandths of itself.
const WHOLE: u32 = 1000;

/// The spread of the measured work of steps: its quartiles, in thousandths of its median.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The lower quartile: at most 1000.
    pub low: u32,
    /// The upper quartile: at least 1000.
    pub high: u32,
}

impl Spread {
    /// The spread of one number, or of several equal ones.
    pub const NONE: Self = Self { low: WHOLE, high: WHOLE };

    /// The spread of measured times, in any order and unit. `None` if there are no times or their
    /// median is not positive.
    pub fn of(times: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = times.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |quantile: f64| {
            let at = (sorted.len() as f64 * quantile) as usize;
            sorted.get(at.min(last)).copied().unwrap_or_default()
        };
        let median = (sorted[last / 2] + sorted[sorted.len() / 2]) / 2.0;
        if median.is_nan() || median <= 0.0 {
            return None;
        }
        let part = |time: f64| (time / median * f64::from(WHOLE)).round() as u32;
        Some(Self { low: part(at(0.25)).min(WHOLE), high: part(at(0.75)).max(WHOLE) })
    }

    /// The smallest spread that covers both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { low: self.low.min(other.low), high: self.high.max(other.high) }
    }

    /// The distance between the quartiles, as a share of the median.
    pub fn width(self) -> f64 {
        f64::from(self.high.saturating_sub(self.low)) / f64::from(WHOLE)
    }

    /// The quartiles around a time: half of the measured times lie between them.
    pub fn around(self, time: Nanos) -> [Nanos; 2] {
        [self.low, self.high].map(|part| {
            let scaled = u128::from(time.0) * u128::from(part) / u128::from(WHOLE);
            Nanos(u64::try_from(scaled).unwrap_or(u64::MAX))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_quartiles_of_times_by_hand() {
        let of = |times: &[f64]| Spread::of(times);
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[0.0, 0.0]), None);
        assert_eq!(of(&[7.0]), Some(Spread::NONE));
        // Times of a real profile (2.85, 5.39 and 15.40) that varied too much to be trusted.
        let wide = of(&[5.39, 15.40, 2.85, 5.39, 5.39, 15.40, 2.85, 5.39]).unwrap();
        assert_eq!(wide, Spread { low: 1000, high: 2857 });
        assert_eq!(of(&[90.0, 100.0, 100.0, 120.0]), Some(Spread { low: 1000, high: 1200 }));
        assert_eq!(wide.and(Spread { low: 900, high: 1100 }), Spread { low: 900, high: 2857 });
        assert_eq!(Spread { low: 900, high: 1250 }.around(Nanos(2000)), [Nanos(1800), Nanos(2500)]);
        assert!((Spread { low: 900, high: 1250 }.width() - 0.35).abs() < 1e-12);
    }
}
