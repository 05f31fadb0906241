//! Layout: the width that actions need, the height of rows, and round ticks.

use gpipe_core::{Nanos, Op};

use super::Scene;

/// Width left of the plots, for row names and axis numbers.
const LEFT: f64 = 88.0;
/// Width right of the plots, for how busy each device is, and the names of the curves.
const RIGHT: f64 = 158.0;
/// Minimum and maximum width of the plots.
const PLOT: (f64, f64) = (1_080.0, 2_000.0);
/// Target width of a typical compute action, enough for two digits.
const ACTION: f64 = 15.0;

/// Sizes in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) left: f64,
    /// The width of the plots.
    pub(super) plot: f64,
    /// The width of the whole picture.
    pub(super) width: f64,
    /// The distance from one row to the next.
    pub(super) row: f64,
    /// The space below each row's bar.
    pub(super) gap: f64,
    /// The time that the plots' width represents.
    pub(super) time: Nanos,
}

impl Layout {
    pub(super) fn new(scene: &Scene<'_>) -> Self {
        let time = scene.time();
        let rows: usize = scene.panels.iter().map(|panel| panel.timeline.devices.len()).sum();
        let row = match rows {
            0..=20 => 26.0,
            21..=40 => 20.0,
            41..=80 => 14.0,
            _ => 10.0,
        };
        let mut times: Vec<Nanos> = scene
            .panels
            .iter()
            .flat_map(|panel| panel.timeline.devices.iter().flatten())
            .filter(|timed| matches!(timed.action.op, Op::Forward(_) | Op::Rematerialize(_)))
            .map(|timed| timed.end - timed.start)
            .collect();
        times.sort_unstable();
        let typical = times.get(times.len() / 2).copied().unwrap_or(time).0.max(1);
        let plot = (ACTION * time.0 as f64 / typical as f64).clamp(PLOT.0, PLOT.1).round();
        let gap = if row > 12.0 { 3.0 } else { 1.0 };
        Self { left: LEFT, plot, width: LEFT + plot + RIGHT, row, gap, time }
    }

    /// The x coordinate of `time`.
    pub(super) fn x(&self, time: Nanos) -> f64 {
        self.left + self.length(time)
    }

    /// The width of a duration, in pixels.
    pub(super) fn length(&self, time: Nanos) -> f64 {
        self.plot * time.0 as f64 / self.time.0 as f64
    }

    /// The right end of the plots.
    pub(super) fn right(&self) -> f64 {
        self.left + self.plot
    }

    /// The duration that corresponds to a width in pixels.
    pub(super) fn time_of(&self, pixels: f64) -> Nanos {
        Nanos((self.time.0 as f64 * pixels / self.plot) as u64)
    }

    /// Round times and their labels. The last label has the unit.
    pub(super) fn time_ticks(&self) -> Vec<(Nanos, String)> {
        let (unit, size) = match self.time.0 {
            0..10_000 => ("ns", 1.0),
            10_000..1_000_000 => ("us", 1e3),
            1_000_000..10_000_000_000 => ("ms", 1e6),
            _ => ("s", 1e9),
        };
        let ticks = ticks(self.time.0 as f64 / size, 12);
        let count = ticks.len();
        let named = ticks.into_iter().enumerate().map(|(index, (value, text))| {
            let unit = if index + 1 == count { format!(" {unit}") } else { String::new() };
            (Nanos((value * size).round() as u64), text + &unit)
        });
        named.collect()
    }
}

/// Ticks from 0 to `end`, about `count` of them: multiples of 1, 2 or 5 times a power of ten. All
/// labels have the same number of decimals.
pub(super) fn ticks(end: f64, count: usize) -> Vec<(f64, String)> {
    if !end.is_finite() || end <= 0.0 {
        return vec![(0.0, "0".into())];
    }
    let least = end / count.max(1) as f64;
    let power = 10_f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let step = step.into_iter().find(|step| *step >= least * (1.0 - 1e-9)).unwrap_or(10.0 * power);
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    (0..=count)
        .map(|tick| tick as f64 * step)
        .take_while(|value| *value <= end * (1.0 + 1e-9))
        .map(|value| (value, format!("{value:.decimals$}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_ticks_are_round() {
        let texts = |end, count| -> Vec<String> {
            ticks(end, count).into_iter().map(|(_, text)| text).collect()
        };
        assert_eq!(texts(28.9, 6), ["0", "5", "10", "15", "20", "25"]);
        assert_eq!(texts(1.0, 4), ["0.0", "0.5", "1.0"]);
        assert_eq!(texts(0.03, 3), ["0.00", "0.01", "0.02", "0.03"]);
        assert_eq!(texts(0.0, 3), ["0"]);
        assert_eq!(texts(f64::NAN, 3), ["0"]);
        for end in [1e-3, 0.7, 3.0, 999.0, 1e9, 1e18] {
            let count = ticks(end, 10).len();
            assert!((4..=11).contains(&count), "{end}: {count}");
        }
    }
}
