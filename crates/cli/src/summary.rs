//! The tables at the end of a run: where the time went, what the bubble consists of, and how to
//! reduce it.

use std::{collections::VecDeque, fmt::Display, time::Duration};

use gpipe::{Bytes, StepReport};

use crate::{
    numbers::short,
    output::{prose, say},
    plan_file::Predicted,
};

/// Number of latest steps whose median time is taken.
const LATEST: usize = 1024;

/// Sums over a run.
#[derive(Default)]
pub(crate) struct Summary {
    steps: u64,
    skipped: u64,
    /// The unit of targets, such as `token`, and the number of targets.
    unit: &'static str,
    targets: f64,
    step_ms: f64,
    /// Times of the latest steps.
    latest_ms: VecDeque<f64>,
    /// Time waiting for batches, between steps.
    data_wait_ms: f64,
    /// Time asking the other processes whether to stop or to save, between steps.
    exchange_ms: f64,
    /// Time of validations during the run, between steps.
    validation_ms: f64,
    devices: Vec<DeviceSums>,
    /// Whether a device has several stages.
    is_shared: bool,
}

/// Sums of one device.
#[derive(Default, Clone)]
struct DeviceSums {
    /// Times in the order of [`PARTS`].
    parts_ms: [f64; 8],
    peak: u64,
    sent: u64,
    offloaded: u64,
    offload_wait_ms: f64,
}

/// The parts of a step. A device is idle in those of [`BUBBLE`].
const PARTS: [&str; 8] = [
    "forward",
    "recompute",
    "backward",
    "optimizer",
    "communication",
    "fill/drain",
    "imbalance",
    "stalls",
];
const BUBBLE: std::ops::Range<usize> = 4..8;
/// Minimum share of the step for which a part of the bubble gets advice.
const WORTH_ADVICE: f64 = 0.02;

/// Number of devices beside each other in the table, which then fits 80 columns.
const COLUMNS: usize = 4;

/// A line of the table.
fn line<T: Display>(name: &str, cells: impl Iterator<Item = T>) -> String {
    let cells: Vec<String> = cells.map(|cell| format!("{cell:>16}")).collect();
    format!("{name:<14}{}", cells.concat())
}

/// A share in percent.
fn percent(share: f64) -> String {
    if share < 0.9995 { format!("{:.1}%", 100.0 * share) } else { format!("{:.0}%", 100.0 * share) }
}

/// A time with as many decimals as matter.
fn milliseconds(ms: f64) -> String {
    if ms < 99_999.0 { format!("{ms:.1}") } else { format!("{ms:.0}") }
}

impl Summary {
    /// An empty summary, whose targets are counted in `unit`s.
    pub(crate) fn new(unit: &'static str) -> Self {
        Self { unit, ..Self::default() }
    }

    pub(crate) fn add(&mut self, report: &StepReport, data_wait: Duration) {
        self.steps += 1;
        self.skipped += u64::from(report.skipped);
        self.targets += report.count;
        self.step_ms += report.time.as_ms();
        self.latest_ms.truncate(LATEST - 1);
        self.latest_ms.push_front(report.time.as_ms());
        self.data_wait_ms += data_wait.as_secs_f64() * 1e3;
        self.is_shared |= report
            .timeline
            .devices
            .iter()
            .any(|list| list.windows(2).any(|two| two[0].action.stage != two[1].action.stage));
        self.devices.resize(report.devices.len(), DeviceSums::default());
        for (sums, stage) in self.devices.iter_mut().zip(&report.devices) {
            let parts = [
                stage.forward,
                stage.recompute,
                stage.backward,
                stage.optimizer,
                stage.communication,
                stage.fill_drain,
                stage.imbalance,
                stage.stalls,
            ];
            for (sum, part) in sums.parts_ms.iter_mut().zip(parts) {
                *sum += part.as_ms();
            }
            sums.peak = sums.peak.max(stage.peak.0);
            sums.sent += stage.sent.0;
            sums.offloaded += stage.offloaded.0;
            sums.offload_wait_ms += stage.offload_wait.as_ms();
        }
    }

    /// Prints the plan's prediction and the measured values.
    pub(crate) fn compare(&self, predicted: &Predicted) {
        // The first step also warms up caches and the allocator.
        let warm = self
            .latest_ms
            .len()
            .saturating_sub(usize::from(self.steps > 1 && self.steps as usize <= LATEST));
        let mut times: Vec<f64> = self.latest_ms.iter().take(warm).copied().collect();
        times.sort_by(f64::total_cmp);
        let Some(&median) = times.get(times.len() / 2) else { return };
        let step = predicted.step.as_ms();
        let peak = predicted.peaks.iter().max().copied().unwrap_or_default();
        let held = Bytes(self.devices.iter().map(|stage| stage.peak).max().unwrap_or(0));
        prose!(
            "predicted {step:.1} ms{} per step, measured {median:.1} ms (median, {:.3} times the \
            prediction); at most {peak} on a {}, measured {held}",
            predicted.quartiles(),
            median / step,
            self.row()
        );
    }

    /// Adds the time of the exchange with the other processes after a step.
    pub(crate) fn exchanged(&mut self, time: Duration) {
        self.exchange_ms += time.as_secs_f64() * 1e3;
    }

    pub(crate) fn validated(&mut self, time: Duration) {
        self.validation_ms += time.as_secs_f64() * 1e3;
    }

    /// The share of one of the [`PARTS`] in device time (devices times steps).
    fn share(&self, part: usize) -> f64 {
        let spent: f64 = self.devices.iter().map(|stage| stage.parts_ms[part]).sum();
        spent / (self.step_ms * self.devices.len().max(1) as f64)
    }

    /// The share of idle time in device time.
    fn bubble(&self) -> f64 {
        BUBBLE.map(|part| self.share(part)).sum()
    }

    /// The device with the most busy time.
    fn slowest(&self) -> usize {
        let busy = |stage: &DeviceSums| stage.parts_ms[..BUBBLE.start].iter().sum::<f64>();
        let busy = self.devices.iter().map(busy).enumerate();
        busy.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(stage, _)| stage)
    }

    /// The composition of the bubble, and a line of advice for each large part, the largest first.
    fn advice(&self) -> Vec<String> {
        let shares = BUBBLE.map(|part| format!("{} {}", percent(self.share(part)), PARTS[part]));
        let shares: Vec<String> = shares.collect();
        let mut lines = vec![format!("bubble {}: {}", percent(self.bubble()), shares.join(", "))];
        let mut parts: Vec<usize> =
            BUBBLE.filter(|&part| self.share(part) >= WORTH_ADVICE).collect();
        parts.sort_by(|&a, &b| self.share(b).total_cmp(&self.share(a)));
        lines.extend(parts.into_iter().map(|part| {
            let remedy = match PARTS[part] {
                "communication" => {
                    "use fewer stages, or let `gpipe plan` choose the cuts".to_owned()
                }
                "fill/drain" => "more micro-batches make it less".to_owned(),
                "imbalance" => {
                    let slowest = self.slowest();
                    let row = self.row();
                    format!("{row} {slowest} is the slowest; `gpipe plan` can move a layer from it")
                }
                _ => "times vary: other work on the machine, or more threads than cores".to_owned(),
            };
            format!("  {} {:.0}%: {remedy}", PARTS[part], 100.0 * self.share(part))
        }));
        lines
    }

    /// What a row of the tables is called.
    fn row(&self) -> &'static str {
        if self.is_shared { "device" } else { "stage" }
    }

    /// The table of time, memory and messages per step, with a column for each device. It has
    /// several parts if there are many devices.
    fn table(&self) -> Vec<String> {
        let steps = self.steps as f64;
        let mut rows: Vec<(&str, Vec<String>)> = Vec::new();
        for (part, name) in PARTS.iter().enumerate() {
            let cell = |device: &DeviceSums| {
                let ms = device.parts_ms[part];
                let percent = format!("({:.0}%)", 100.0 * ms / self.step_ms);
                format!("{} {percent:>5}", milliseconds(ms / steps))
            };
            rows.push((name, self.devices.iter().map(cell).collect()));
        }
        let bytes = |of: fn(&DeviceSums) -> u64, over: u64| {
            let cell = |device: &DeviceSums| Bytes(of(device) / over.max(1)).to_string();
            self.devices.iter().map(cell).collect::<Vec<_>>()
        };
        rows.push(("peak memory", bytes(|device| device.peak, 1)));
        rows.push(("sent", bytes(|device| device.sent, self.steps)));
        if self.devices.iter().any(|device| device.offloaded > 0) {
            rows.push(("offloaded", bytes(|device| device.offloaded, self.steps)));
            let waited = |device: &DeviceSums| milliseconds(device.offload_wait_ms / steps);
            rows.push(("waited for it", self.devices.iter().map(waited).collect()));
        }
        let mut lines = Vec::new();
        for first in (0..self.devices.len()).step_by(COLUMNS) {
            let columns = first..self.devices.len().min(first + COLUMNS);
            let heads = columns.clone().map(|device| format!("{} {device}", self.row()));
            lines.push(line("", heads));
            lines
                .extend(rows.iter().map(|(name, cells)| line(name, cells[columns.clone()].iter())));
        }
        lines
    }

    /// Prints the tables. `elapsed_ms` is the time of the whole run, and `saving` the time that
    /// training waited for checkpoints.
    pub(crate) fn print(&self, elapsed_ms: f64, saving: Duration) {
        if self.steps == 0 {
            return;
        }
        let steps = self.steps as f64;
        let saving_ms = saving.as_secs_f64() * 1e3;
        let unit = self.unit;
        prose!(
            "trained {} steps, {} {unit}s in {:.1} s: {:.1} ms/step, {} {unit}s/s, bubble {:.1}%",
            self.steps,
            short(self.targets),
            elapsed_ms / 1e3,
            self.step_ms / steps,
            short(self.targets / (elapsed_ms / 1e3)),
            100.0 * self.bubble()
        );
        if self.skipped > 0 {
            say!("{} steps were skipped because float16 gradients overflowed", self.skipped);
        }
        say!("where the time went, ms per step (% of the step):");
        for line in self.table().into_iter().chain(self.advice()) {
            say!("{line}");
        }
        let rest = elapsed_ms - self.step_ms - self.data_wait_ms - self.validation_ms - saving_ms;
        say!(
            "of the time: in steps {:.1}%, waiting for batches {:.1}%, validating {:.1}%,\n  \
            waiting for checkpoints {:.1}%, the rest {:.1}%",
            100.0 * self.step_ms / elapsed_ms,
            100.0 * self.data_wait_ms / elapsed_ms,
            100.0 * self.validation_ms / elapsed_ms,
            100.0 * saving_ms / elapsed_ms,
            100.0 * rest.max(0.0) / elapsed_ms
        );
        if self.exchange_ms > 0.0 {
            // This time is part of the rest. It includes waiting for the slowest process.
            say!(
                "asking the other processes whether to stop or to save: {:.3} ms/step",
                self.exchange_ms / steps
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A summary of 10 steps of 100 ms.
    fn summary(parts_ms: &[[f64; 8]]) -> Summary {
        let stage = |parts_ms: &[f64; 8]| DeviceSums {
            parts_ms: *parts_ms,
            peak: 1 << 30,
            sent: 70,
            ..DeviceSums::default()
        };
        let devices = parts_ms.iter().map(stage).collect();
        Summary { steps: 10, step_ms: 1000.0, devices, ..Summary::new("token") }
    }

    #[test]
    fn oracle_the_table_says_where_the_time_went_and_what_to_do() {
        let summary = summary(&[
            [200.0, 100.0, 300.0, 50.0, 10.0, 220.0, 120.0, 0.0],
            [220.0, 120.0, 340.0, 50.0, 10.0, 220.0, 0.0, 40.0],
        ]);
        let expected = [
            "                       stage 0         stage 1",
            "forward             20.0 (20%)      22.0 (22%)",
            "recompute           10.0 (10%)      12.0 (12%)",
            "backward            30.0 (30%)      34.0 (34%)",
            "optimizer            5.0  (5%)       5.0  (5%)",
            "communication        1.0  (1%)       1.0  (1%)",
            "fill/drain          22.0 (22%)      22.0 (22%)",
            "imbalance           12.0 (12%)       0.0  (0%)",
            "stalls               0.0  (0%)       4.0  (4%)",
            "peak memory            1.0 GiB         1.0 GiB",
            "sent                       7 B             7 B",
        ];
        assert_eq!(summary.table(), expected);
        let expected = [
            "bubble 31.0%: 1.0% communication, 22.0% fill/drain, 6.0% imbalance, 2.0% stalls",
            "  fill/drain 22%: more micro-batches make it less",
            "  imbalance 6%: stage 1 is the slowest; `gpipe plan` can move a layer from it",
            "  stalls 2%: times vary: other work on the machine, or more threads than cores",
        ];
        assert_eq!(summary.advice(), expected);
        assert!((summary.bubble() - 0.31).abs() < 1e-12);
    }

    #[test]
    fn oracle_the_table_says_what_was_offloaded() {
        let mut summary = summary(&[[100.0; 8]; 2]);
        (summary.devices[0].offloaded, summary.devices[0].offload_wait_ms) = (10 << 20, 25.0);
        let expected = [
            "offloaded              1.0 MiB             0 B",
            "waited for it              2.5             0.0",
        ];
        assert!(summary.table().ends_with(&expected.map(str::to_owned)), "{:?}", summary.table());
    }

    #[test]
    fn oracle_the_table_fits_80_columns() {
        // Steps of three hours, entirely in one part.
        for part in 0..8 {
            let mut parts = [0.0; 8];
            parts[part] = 1e8;
            let mut summary = summary(&[parts; 64]);
            summary.step_ms = 1e8;
            let lines: Vec<String> = summary.table().into_iter().chain(summary.advice()).collect();
            let longest = lines.iter().map(|line| line.chars().count()).max();
            assert!(longest <= Some(80), "{lines:?}");
        }
    }

    #[test]
    fn oracle_what_is_not_worth_it_gets_no_advice() {
        let one = summary(&[[400.0, 0.0, 580.0, 10.0, 0.0, 0.0, 0.0, 10.0]]);
        let none = "0.0% communication, 0.0% fill/drain, 0.0% imbalance, 1.0% stalls";
        assert_eq!(one.advice(), [format!("bubble 1.0%: {none}")]);
    }
}
