//! A picture of a step: timelines above one another on one axis of time, and below them who is idle
//! and what is held.
//!
//! ```text
//!  title, step times, bubbles, their ratio; legend
//!  predicted   device 0 |F0|F1|F2|      |B0|..   busy 81%
//!              device 1 |  |F0|F1|F2|B0|..
//!  measured    device 0 ..
//!              0        10        20        30 ms
//!  idle devices, in % of them, over time
//!  bytes of each device over time, caps dashed
//! ```
//!
//! [`svg`] stands still, and goes into documents; [`html`] is zoomed and says more under the
//! pointer. Each is one file that needs no other, follows the reader's light or dark, and is the
//! same text for the same scene.
//!
//! - `spans`: what of a timeline is drawn, and what is too short to be drawn alone
//! - `series`: what changes over time: idle devices, bytes
//! - `layout`, `canvas`: places, scales and ticks; shapes and text as SVG
//! - `rows`, `charts`: the upper and the lower half of the SVG
//! - `page`: the HTML, whose own drawing is in `page.html`
//!
//! Not here: files, and what is predicted. A step on disk is [`crate::step_file`].

mod canvas;
mod charts;
mod layout;
mod page;
mod rows;
mod series;
mod spans;

use gpipe_core::{Bytes, Nanos, simulate::Timeline};

pub use self::{page::html, rows::svg};
use crate::step_file::StepFile;

/// What is drawn.
#[derive(Debug, Clone, Default)]
pub struct Scene<'a> {
    /// Such as the run's name and the step.
    pub title: String,
    /// Lines below it.
    pub subtitle: Vec<String>,
    /// From top to bottom, on the axis of the longest.
    pub panels: Vec<Panel<'a>>,
}

/// One timeline.
#[derive(Debug, Clone)]
pub struct Panel<'a> {
    /// Such as "predicted".
    pub name: String,
    /// Where it comes from; may be empty.
    pub note: String,
    /// What is drawn.
    pub timeline: &'a Timeline,
    /// The bytes of each device, from each time on; empty: not known.
    pub bytes: &'a [Vec<(Nanos, Bytes)>],
    /// The most that each device held; empty: not known.
    pub peaks: &'a [Bytes],
    /// The most that each device may hold; empty: no caps.
    pub caps: &'a [Option<Bytes>],
}

impl<'a> Panel<'a> {
    /// A timeline, of whose bytes nothing is known.
    pub fn new(name: impl Into<String>, note: impl Into<String>, timeline: &'a Timeline) -> Self {
        let (name, note) = (name.into(), note.into());
        Self { name, note, timeline, bytes: &[], peaks: &[], caps: &[] }
    }
}

impl<'a> Scene<'a> {
    /// A step of a run: predicted, if it was, above measured.
    pub fn of_step(title: impl Into<String>, step: &'a StepFile) -> Self {
        let memory = &step.memory;
        let predicted = step.predicted.as_ref().map(|predicted| Panel {
            bytes: &memory.predicted,
            caps: &memory.caps,
            ..Panel::new("predicted", predicted.source.clone(), &predicted.timeline)
        });
        let note = format!("step {}", step.step);
        let measured = Panel {
            bytes: &memory.measured,
            peaks: &memory.peaks,
            caps: &memory.caps,
            ..Panel::new("measured", note, &step.measured)
        };
        let panels = predicted.into_iter().chain([measured]).collect();
        Self { title: title.into(), subtitle: vec![sizes(&step.measured)], panels }
    }

    /// The longest step; not 0.
    fn time(&self) -> Nanos {
        let all = self.panels.iter().map(|panel| panel.timeline.makespan);
        all.max().unwrap_or_default().max(Nanos(1))
    }

    /// Each panel's step time and bubble, and the ratio of the last step time to the first.
    fn summary(&self) -> String {
        let each = self.panels.iter().map(|panel| {
            let Panel { name, timeline, .. } = panel;
            format!("{name}: {}, bubble {:.1}%", timeline.makespan, 100.0 * timeline.bubble())
        });
        let mut parts: Vec<String> = each.collect();
        if let [first, .., last] = &self.panels[..]
            && first.timeline.makespan > Nanos(0)
        {
            let ratio = last.timeline.makespan.0 as f64 / first.timeline.makespan.0 as f64;
            parts.push(format!("{} / {}: {ratio:.3}", last.name, first.name));
        }
        parts.join("   \u{b7}   ")
    }
}

/// How many of what there is.
fn sizes(timeline: &Timeline) -> String {
    let stages = timeline.actions().map(|action| action.stage.index() + 1).max().unwrap_or(0);
    let micro = timeline.actions().filter_map(|action| action.op.computes());
    let micro_batches = micro.map(|m| m.index() + 1).max().unwrap_or(0);
    format!("K = {stages} on {} devices, M = {micro_batches}", timeline.devices.len())
}
