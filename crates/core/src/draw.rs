//! Draws a timeline as text, in columns of equal time.
//!
//! [`grid`] draws simulated unit costs, for the documentation and the golden tests. [`timeline`]
//! and [`panels`] draw real times, for a terminal. Pictures are drawn by `gpipe-observe`.

use std::fmt::Write;

use crate::{
    action::{Action, Op},
    simulate::Timeline,
    units::Nanos,
};

/// Draws the compute actions of `timeline`, one row per device and one column per `column` of time.
/// An action's name stands in the column where it starts. `-` means that the action continues, `.`
/// that the device is idle.
///
/// Actions shorter than a column may hide each other, so `column` should be at most the shortest
/// action.
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
                op if op.computes().is_some() => timed.action.to_string(),
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

/// The fewest columns of time in a drawing.
const COLUMNS_MIN: usize = 10;
/// The widest drawing, in characters.
const WIDTH_MAX: usize = 4_096;
/// Columns reserved for a number under the axis, including the space after it.
const TICK_COLUMNS: usize = 10;

const LEGEND: &str = "F forward, R re-materialization, B backward, U reduce, norm and update, - \
    goes on, . idle or waiting";
const HALVES: &str = "I and W halves of a backward: gradients of the inputs, and of the weights";
const IDLE: &str = "idle: tenths of the devices that do nothing at that time";

/// How [`panels`] draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Characters per line.
    pub width: usize,
    /// Whether to color the kinds of action, with ANSI escapes from the 256-color palette.
    pub color: bool,
}

/// Draws `timeline` in proportion to time above an axis in milliseconds and a legend: one row per
/// device, `width` characters per line.
///
/// ```text
/// device 0 | F0----F1----.............B0-----------F2----B1----------.......B2----------U-
/// device 1 | ......F0-----B0----------F1----B1----------.F2----B2-----------.............U-
///   ms     | 0              5               10             15              20
/// ```
///
/// On a device with several stages, each action's name includes its stage, as in `2F0`. An action
/// whose name does not fit is drawn with its letter alone, as in `FF`. Each column shows the action
/// at its middle. If actions are shorter than columns, some are not visible, but each kind still
/// gets columns in proportion to its time.
pub fn timeline(timeline: &Timeline, width: usize) -> String {
    let scale = Scale::new(&[timeline], Look { width, color: false });
    let mut text = String::new();
    scale.rows(timeline, &mut text);
    scale.axis(&mut text);
    legend(&[timeline], &mut text);
    text
}

/// Draws named timelines above one another, each as [`timeline`] does, on the time scale of the
/// longest. Each has its step time, its bubble and the share of idle devices over time.
pub fn panels(panels: &[(&str, &Timeline)], look: Look) -> String {
    let timelines: Vec<&Timeline> = panels.iter().map(|(_, timeline)| *timeline).collect();
    let scale = Scale::new(&timelines, look);
    let mut text = String::new();
    for (name, timeline) in panels {
        let bubble = 100.0 * timeline.bubble();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}: {}, bubble {bubble:.1}%", timeline.makespan);
        scale.rows(timeline, &mut text);
        scale.idle(timeline, &mut text);
    }
    scale.axis(&mut text);
    legend(&timelines, &mut text);
    text + IDLE + "\n"
}

/// Writes what the letters mean; those of halves of a backward where there are any.
fn legend(timelines: &[&Timeline], text: &mut String) {
    let mut actions = timelines.iter().flat_map(|timeline| timeline.devices.iter().flatten());
    let is_half = |op| matches!(op, Op::BackwardInput(_) | Op::BackwardWeight(_));
    let has_halves = actions.any(|timed| is_half(timed.action.op));
    for line in [LEGEND].into_iter().chain(has_halves.then_some(HALVES)) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{line}");
    }
}

/// The columns of equal time that follow each row's name.
struct Scale {
    columns: usize,
    /// The time of all columns together; not 0.
    time: Nanos,
    /// The width of a row's name, in characters.
    name: usize,
    color: bool,
}

impl Scale {
    fn new(timelines: &[&Timeline], look: Look) -> Self {
        let devices = timelines.iter().map(|timeline| timeline.devices.len()).max().unwrap_or(0);
        let name = format!("device {} | ", devices.saturating_sub(1)).len();
        let time = timelines.iter().map(|timeline| timeline.makespan).max().unwrap_or_default();
        let columns = look.width.min(WIDTH_MAX).saturating_sub(name).max(COLUMNS_MIN);
        Self { columns, time: time.max(Nanos(1)), name, color: look.color }
    }

    /// The border between columns that is nearest to `time`.
    fn column(&self, time: Nanos) -> usize {
        let share = time.0 as f64 / self.time.0 as f64;
        ((share * self.columns as f64).round() as usize).min(self.columns)
    }

    /// Writes one row per device. The space after the timeline's end is left blank.
    fn rows(&self, timeline: &Timeline, text: &mut String) {
        for (device, actions) in timeline.devices.iter().enumerate() {
            let mut row = vec![('.', None); self.column(timeline.makespan)];
            let first = actions.first().map(|timed| timed.action.stage);
            let is_shared = actions.iter().any(|timed| Some(timed.action.stage) != first);
            for timed in actions {
                let Some((letter, label)) = label(timed.action, is_shared) else { continue };
                let (from, to) = (self.column(timed.start), self.column(timed.end));
                let cells = row.get_mut(from..to).unwrap_or_default();
                let fits = label.len() <= cells.len();
                let drawn = label.chars().chain(std::iter::repeat('-'));
                for (cell, character) in cells.iter_mut().zip(drawn) {
                    *cell = (if fits { character } else { letter }, color(letter));
                }
            }
            let name = format!("device {device}");
            let row =
                if self.color { painted(&row) } else { row.iter().map(|cell| cell.0).collect() };
            let _ = writeln!(text, "{name:<0$}| {row}", self.name - 2);
        }
    }

    /// Writes how many tenths of the devices are idle in the middle of each column.
    fn idle(&self, timeline: &Timeline, text: &mut String) {
        let columns = self.column(timeline.makespan);
        let mut busy = vec![0_usize; columns];
        for timed in timeline.devices.iter().flatten() {
            if label(timed.action, false).is_some() {
                let cells = busy.get_mut(self.column(timed.start)..self.column(timed.end));
                cells.unwrap_or_default().iter_mut().for_each(|count| *count += 1);
            }
        }
        let devices = timeline.devices.len();
        let tenths = |busy: usize| 10 * devices.saturating_sub(busy) / devices.max(1);
        let row = busy.into_iter().map(|busy| match tenths(busy) {
            0 => '.',
            tenths => char::from_digit(tenths.min(9) as u32, 10).unwrap_or('9'),
        });
        let row: String = row.collect();
        let _ = writeln!(text, "{:<1$}| {row}", "  idle", self.name - 2);
    }

    /// Writes round numbers of milliseconds, each starting at its column.
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

/// The letter that an action is drawn with, and its full name. Transfers are not drawn.
fn label(action: Action, is_shared: bool) -> Option<(char, String)> {
    let stage = if is_shared { action.stage.to_string() } else { String::new() };
    match action.op {
        Op::Forward(m) => Some(('F', format!("{stage}F{m}"))),
        Op::Rematerialize(m) => Some(('R', format!("{stage}R{m}"))),
        Op::Backward(m) => Some(('B', format!("{stage}B{m}"))),
        Op::BackwardInput(m) => Some(('I', format!("{stage}I{m}"))),
        Op::BackwardWeight(m) => Some(('W', format!("{stage}W{m}"))),
        Op::Reduce | Op::Norm | Op::Decide | Op::Update => Some(('U', format!("{stage}U"))),
        Op::Send(_) | Op::Receive(_) => None,
    }
}

/// The 256-color index for `letter`, close to the palette of Okabe and Ito, which color-blind
/// readers can distinguish.
fn color(letter: char) -> Option<u8> {
    match letter {
        'F' => Some(74),
        'R' => Some(178),
        'B' | 'I' => Some(36),
        'W' => Some(221),
        'U' => Some(175),
        _ => None,
    }
}

/// Black text on the cells' colors, with an escape wherever the color changes.
fn painted(cells: &[(char, Option<u8>)]) -> String {
    let (mut text, mut last) = (String::new(), None);
    for &(character, color) in cells {
        if color != last {
            text.push_str("\x1b[0m");
            if let Some(color) = color {
                let _ = write!(text, "\x1b[38;5;16;48;5;{color}m");
            }
            last = color;
        }
        text.push(character);
    }
    if last.is_some() {
        text.push_str("\x1b[0m");
    }
    text
}

/// The least of 1, 2 and 5 times a power of ten that is at least `least`, which must be positive.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .map(|digit| digit * power)
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}
