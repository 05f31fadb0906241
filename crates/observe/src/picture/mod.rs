//! A picture of a step: timelines, one above the other on a common time axis, and below them the
//! share of idle devices and the bytes held.
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
//! [`svg`] is static, for documents. [`html`] can be zoomed and shows details on hover. Each is one
//! self-contained file that follows the reader's light or dark mode. The same scene always gives
//! the same text.
//!
//! - `spans`: chooses what is drawn, and merges actions that are too short
//! - `series`: what changes over time: idle devices, bytes
//! - `layout`, `canvas`: positions, scales and ticks; shapes and text as SVG
//! - `rows`, `charts`: the upper and the lower part of the SVG
//! - `page`: the HTML; its drawing code is in `page.html`
//!
//! This module does no I/O and makes no predictions. [`crate::step_file`] stores a step on disk.

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

/// The input of a picture.
#[derive(Debug, Clone, Default)]
pub struct Scene<'a> {
    /// The title, such as the run's name and the step.
    pub title: String,
    /// Lines below the title.
    pub subtitle: Vec<String>,
    /// Panels from top to bottom. The longest timeline determines the time axis.
    pub panels: Vec<Panel<'a>>,
}

/// One timeline with its memory.
#[derive(Debug, Clone)]
pub struct Panel<'a> {
    /// The name, such as "predicted".
    pub name: String,
    /// The timeline's source; may be empty.
    pub note: String,
    /// The timeline to draw.
    pub timeline: &'a Timeline,
    /// Bytes held by each device, each from a time until the next; empty if unknown.
    pub bytes: &'a [Vec<(Nanos, Bytes)>],
    /// Peak bytes of each device; empty if unknown.
    pub peaks: &'a [Bytes],
    /// Maximum bytes allowed on each device; empty if there are no caps.
    pub caps: &'a [Option<Bytes>],
}

impl<'a> Panel<'a> {
    /// A panel with a timeline and no memory.
    pub fn new(name: impl Into<String>, note: impl Into<String>, timeline: &'a Timeline) -> Self {
        let (name, note) = (name.into(), note.into());
        Self { name, note, timeline, bytes: &[], peaks: &[], caps: &[] }
    }
}

impl<'a> Scene<'a> {
    /// The scene of a step: the predicted timeline, if there is one, above the measured one.
    pub fn of_step(title: impl Into<String>, step: &'a StepFile) -> Self {
        let memory = &step.memory;
        let predicted = step.predicted.as_ref().map(|predicted| Panel {
            bytes: &memory.predicted,
            caps: &memory.caps,
            ..Panel::new("predicted", predicted.source.clone(), &predicted.timeline)
        });
        let note = match step.simulated_gpus {
            true => format!("step {}, on simulated GPUs", step.step),
            false => format!("step {}", step.step),
        };
        let measured = Panel {
            bytes: &memory.measured,
            peaks: &memory.peaks,
            caps: &memory.caps,
            ..Panel::new("measured", note, &step.measured)
        };
        let panels = predicted.into_iter().chain([measured]).collect();
        Self { title: title.into(), subtitle: vec![sizes(&step.measured)], panels }
    }

    /// The longest step time, at least 1 ns.
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

/// Describes K, the number of devices and M.
fn sizes(timeline: &Timeline) -> String {
    let stages = timeline.actions().map(|action| action.stage.index() + 1).max().unwrap_or(0);
    let micro = timeline.actions().filter_map(|action| action.op.computes());
    let micro_batches = micro.map(|m| m.index() + 1).max().unwrap_or(0);
    format!("K = {stages} on {} devices, M = {micro_batches}", timeline.devices.len())
}
