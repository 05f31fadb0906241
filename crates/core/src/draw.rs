//! A timeline as text, in equal columns of time: the grids of the documentation and of the golden tests.

use std::fmt::Write;

use crate::{action::Op, simulate::Timeline, units::Nanos};

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
