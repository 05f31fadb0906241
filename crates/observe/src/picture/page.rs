//! The HTML page: compact data, and a page that draws them.
//!
//! The page's program is in `page.html`, which is its only source. It draws what is visible at the
//! current zoom, so names appear as actions become wide enough. Texts reach the program as JSON,
//! and the program inserts them as text, never as markup.

use std::fmt::Write;

use gpipe_core::{Bytes, Nanos, Op};
use serde_json::json;

use super::{
    Panel, Scene,
    canvas::escaped,
    charts, series,
    spans::{Span, condensed, is_shared, spans},
};

const PAGE: &str = include_str!("page.html");
/// Approximate maximum size of all actions, in bytes.
const ACTION_BYTES_MAX: usize = 2_300_000;
/// Approximate sizes of an action and of a merged span in the page, in bytes.
const ACTION_BYTES: usize = 22;
const TOGETHER_BYTES: usize = 80;
/// Maximum number of points of all byte curves together.
const POINTS_MAX: usize = 12_000;

/// Draws the scene as an HTML page that can be zoomed and shows details on hover. The page is one
/// self-contained file of less than 3 MB for up to 500 devices. The same scene always gives the
/// same text.
pub fn html(scene: &Scene<'_>) -> String {
    let all: Vec<Vec<Vec<Span>>> = scene.panels.iter().map(|panel| spans(panel.timeline)).collect();
    let (note, drawn) = fitting(all, scene.time());
    let points_max = (POINTS_MAX / charts::devices(scene).max(1)).max(20);
    let mut panels = Vec::new();
    for (panel, devices) in scene.panels.iter().zip(&drawn) {
        panels.push(panel_json(panel, devices, points_max));
    }
    let notes: Vec<String> = note.into_iter().collect();
    let text = |value: serde_json::Value| value.to_string();
    let data = format!(
        "{{\"title\":{},\"summary\":{},\"subtitle\":{},\"notes\":{},\"panels\":[{}]}}",
        text(json!(scene.title)),
        text(json!(scene.summary())),
        text(json!(scene.subtitle)),
        text(json!(notes)),
        panels.join(",")
    );
    // Only "</" can end a script, and in JSON "<" occurs only in texts.
    let data = data.replace('<', "\\u003c");
    let (head, rest) = PAGE.split_once("TITLE").unwrap_or((PAGE, ""));
    let (middle, tail) = rest.split_once("DATA").unwrap_or((rest, ""));
    [head, &escaped(&scene.title), middle, &data, tail].concat()
}

/// Reduces the spans to the size limit, and describes what was left out. Communication is dropped
/// first; then short actions are merged.
fn fitting(all: Vec<Vec<Vec<Span>>>, time: Nanos) -> (Option<String>, Vec<Vec<Vec<Span>>>) {
    let is_small = |panels: &[Vec<Vec<Span>>]| {
        let each = |span: &Span| if span.count > 1 { TOGETHER_BYTES } else { ACTION_BYTES };
        panels.iter().flatten().flatten().map(each).sum::<usize>() <= ACTION_BYTES_MAX
    };
    if is_small(&all) {
        return (None, all);
    }
    let without =
        |spans: &Vec<Span>| spans.iter().filter(|s| s.busy() > Nanos(0)).copied().collect();
    let panels = mapped(&all, &without);
    if is_small(&panels) {
        return (Some("Communication is left out.".into()), panels);
    }
    let mut short = Nanos((time.0 >> 20).max(2));
    loop {
        let whole = Nanos(short.0.saturating_mul(4));
        let panels = mapped(&all, &|spans| condensed(spans, short, whole));
        if is_small(&panels) || short > time {
            let note = format!(
                "Actions shorter than {short} are kept together: zooming in does not part them."
            );
            return (Some(note), panels);
        }
        short = Nanos(short.0.saturating_add(short.0 / 2));
    }
}

/// Applies `change` to each device of each panel.
fn mapped(
    panels: &[Vec<Vec<Span>>],
    change: &dyn Fn(&Vec<Span>) -> Vec<Span>,
) -> Vec<Vec<Vec<Span>>> {
    panels.iter().map(|devices| devices.iter().map(change).collect()).collect()
}

fn panel_json(panel: &Panel<'_>, devices: &[Vec<Span>], points_max: usize) -> String {
    let bytes = |all: &[(Nanos, Bytes)]| -> Vec<u64> {
        let thin = series::thinned(all, points_max);
        thin.into_iter().flat_map(|(time, bytes)| [time.0, bytes.0]).collect()
    };
    let bytes: Vec<Vec<u64>> = panel.bytes.iter().map(|all| bytes(all)).collect();
    let lists: Vec<String> = devices.iter().map(|spans| flat(spans)).collect();
    format!(
        "{{\"name\":{},\"note\":{},\"time\":{},\"shared\":{},\"bytes\":{},\
        \"peaks\":{},\"caps\":{},\n\"devices\":[\n{}]}}",
        json!(panel.name),
        json!(panel.note),
        panel.timeline.makespan.0,
        is_shared(panel.timeline),
        json!(bytes),
        json!(panel.peaks),
        json!(panel.caps),
        lists.join(",\n")
    )
}

/// Encodes one device's spans as a list of numbers and names, which `decoded` in the page reads.
fn flat(spans: &[Span]) -> String {
    let mut text = String::from("[");
    let mut now = 0_i128;
    for span in spans {
        if text.len() > 1 {
            text.push(',');
        }
        let action = span.first;
        // Writing to a String cannot fail.
        let _ = match action.op {
            _ if span.count > 1 => {
                write!(text, "9,{},\"{action}\",\"{}\"", span.count, span.last)
            }
            Op::Forward(m) => write!(text, "0,{},{m}", action.stage),
            Op::Rematerialize(m) => write!(text, "1,{},{m}", action.stage),
            Op::Backward(m) => write!(text, "2,{},{m}", action.stage),
            Op::BackwardInput(m) => write!(text, "3,{},{m}", action.stage),
            Op::BackwardWeight(m) => write!(text, "4,{},{m}", action.stage),
            Op::Reduce | Op::Norm | Op::Decide | Op::Update => write!(text, "5,\"{action}\""),
            Op::Send(_) | Op::Receive(_) => write!(text, "7,\"{action}\""),
        };
        let _ = write!(text, ",{},{}", i128::from(span.start.0) - now, span.time().0);
        if span.count > 1 {
            for time in span.times {
                let _ = write!(text, ",{}", time.0);
            }
        }
        now = i128::from(span.start.0) + i128::from(span.time().0);
    }
    text + "]"
}
