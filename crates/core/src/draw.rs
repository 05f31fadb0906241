//! A timeline as text, in equal columns of time.
//!
//! [`grid`] is for simulated unit costs: the grids of the documentation and of the golden tests.
//! [`timeline`] and [`compare`] are for measured times. Chrome traces are in `gpipe-observe`.

use std::fmt::Write;

use crate::{
    action::{Action, Op},
    simulate::Timeline,
    units::Nanos,
};

/// Draws the compute actions of `timeline`, one row per device and one column per `column` of time; an
/// action stands in the column where it starts, `.` is idle, `-` an action that goes on.
///
/// Actions shorter than a column may hide each other: choose `column` at most the shortest.
pub fn grid(timeline: &Timeline, column: Nanos) -> String {
    let column = column.0.max(1);
    let columns = timeline.makespan.0.div_ceil(column) as usize;
    let several_stages = timeline.devices.iter().any(|actions| {
        actions.iter().any(|timed| {
            actions.first().is_some_and(|first| first.action.stage != timed.action.stage)
        })
    });
    let mut rows: Vec<Vec<String>> = Vec::new();
    for actions in &timeline.devices {
        let mut row = vec![".".to_owned(); columns];
        for timed in actions {
            let text = match timed.action.op {
                Op::Forward(_) | Op::Rematerialize(_) | Op::Backward(_) => timed.action.to_string(),
                _ => continue,
            };
            let text = if several_stages {
                text
            } else {
                text.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned()
            };
            let (from, to) =
                ((timed.start.0 / column) as usize, timed.end.0.div_ceil(column) as usize);
            for (offset, cell) in row.iter_mut().take(to).skip(from).enumerate() {
                *cell = if offset == 0 { text.clone() } else { "-".to_owned() };
            }
        }
        rows.push(row);
    }
    let width = rows.iter().flatten().map(String::len).max().unwrap_or(1);
    let mut text = String::new();
    for (device, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row.iter().map(|cell| format!("{cell:width$}")).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "device {device} | {}", cells.join(" ").trim_end());
    }
    text
}

/// Fewest columns of time in a drawing.
const COLUMNS_MIN: usize = 10;
/// Widest drawing.
const WIDTH_MAX: usize = 4_096;
/// Columns that a number under the axis may take, with room after it.
const TICK_COLUMNS: usize = 10;

const LEGEND: &str = "F forward, R re-materialization, B backward, U reduce, norm and update, - goes on, . idle or waiting";

/// Draws `timeline` in proportion to time, one row per device and `width` characters in all, above an axis
/// in milliseconds and a legend.
///
/// ```text
/// device 0 | F0----F1----.............B0-----------F2----B1----------.......B2----------U-
/// device 1 | ......F0-----B0----------F1----B1----------.F2----B2-----------.............U-
///   ms     | 0              5               10             15              20
/// ```
///
/// A device with several stages writes each action's stage, as in `2F0`. What does not fit is drawn in
/// its letter: `FF`. An action of less than half a column may not be seen, though it is in its place.
pub fn timeline(timeline: &Timeline, width: usize) -> String {
    let scale = Scale::new(&[timeline], width);
    let mut text = String::new();
    scale.rows(timeline, &mut text);
    scale.axis(&mut text);
    text + LEGEND + "\n"
}

/// Draws `measured` above `simulated` on the time scale of the longer one, as [`timeline`] does.
pub fn compare(measured: &Timeline, simulated: &Timeline, width: usize) -> String {
    let scale = Scale::new(&[measured, simulated], width);
    let mut text = String::new();
    for (name, timeline) in [("measured", measured), ("simulated", simulated)] {
        let bubble = 100.0 * timeline.bubble();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}: {}, bubble {bubble:.1}%", timeline.makespan);
        scale.rows(timeline, &mut text);
    }
    scale.axis(&mut text);
    text + LEGEND + "\n"
}

/// Columns of equal time, after each row's name.
struct Scale {
    columns: usize,
    /// Of all columns together; not 0.
    time: Nanos,
    /// Characters of a row's name.
    name: usize,
}

impl Scale {
    fn new(timelines: &[&Timeline], width: usize) -> Self {
        let devices = timelines.iter().map(|timeline| timeline.devices.len()).max().unwrap_or(0);
        let name = format!("device {} | ", devices.saturating_sub(1)).len();
        let time = timelines.iter().map(|timeline| timeline.makespan).max().unwrap_or_default();
        let columns = width.min(WIDTH_MAX).saturating_sub(name).max(COLUMNS_MIN);
        Self { columns, time: time.max(Nanos(1)), name }
    }

    /// The border between columns that is nearest to `time`.
    fn column(&self, time: Nanos) -> usize {
        let share = time.0 as f64 / self.time.0 as f64;
        ((share * self.columns as f64).round() as usize).min(self.columns)
    }

    /// One row per device; what comes after the timeline's end is left blank.
    fn rows(&self, timeline: &Timeline, text: &mut String) {
        for (device, actions) in timeline.devices.iter().enumerate() {
            let mut row = vec!['.'; self.column(timeline.makespan)];
            let first = actions.first().map(|timed| timed.action.stage);
            let is_shared = actions.iter().any(|timed| Some(timed.action.stage) != first);
            for timed in actions {
                let Some((letter, label)) = label(timed.action, is_shared) else { continue };
                let (from, to) = (self.column(timed.start), self.column(timed.end));
                let cells = row.get_mut(from..to).unwrap_or_default();
                let fits = label.len() <= cells.len();
                let drawn = label.chars().chain(std::iter::repeat('-'));
                for (cell, character) in cells.iter_mut().zip(drawn) {
                    *cell = if fits { character } else { letter };
                }
            }
            let name = format!("device {device}");
            let row: String = row.into_iter().collect();
            let _ = writeln!(text, "{name:<0$}| {row}", self.name - 2);
        }
    }

    /// Round numbers of milliseconds, each beginning at its column.
    fn axis(&self, text: &mut String) {
        let span_ms = self.time.as_ms();
        let step_ms = round_step(span_ms * TICK_COLUMNS as f64 / self.columns as f64);
        let decimals = (-step_ms.log10().floor()).max(0.0) as usize;
        let mut axis = String::new();
        for tick in 0..=self.columns / TICK_COLUMNS {
            let at_ms = tick as f64 * step_ms;
            let column = (at_ms / span_ms * self.columns as f64).round() as usize;
            if column >= self.columns {
                break;
            }
            let _ = write!(axis, "{:1$}", "", column.saturating_sub(axis.len()));
            let _ = write!(axis, "{at_ms:.decimals$}");
        }
        let _ = writeln!(text, "{:<1$}| {axis}", "  ms", self.name - 2);
    }
}

/// The letter that an action is drawn in, and its name in full; transfers are not drawn.
fn label(action: Action, is_shared: bool) -> Option<(char, String)> {
    let stage = if is_shared { action.stage.to_string() } else { String::new() };
    match action.op {
        Op::Forward(m) => Some(('F', format!("{stage}F{m}"))),
        Op::Rematerialize(m) => Some(('R', format!("{stage}R{m}"))),
        Op::Backward(m) => Some(('B', format!("{stage}B{m}"))),
        Op::Reduce | Op::Norm | Op::Decide | Op::Update => Some(('U', format!("{stage}U"))),
        Op::Send(_) | Op::Receive(_) => None,
    }
}

/// The least of 1, 2 and 5 times a power of ten that is no less than `least`, which is positive.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .map(|digit| digit * power)
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}
