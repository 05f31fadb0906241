//! Plots the records of one run, or of several runs over one another, as one SVG page.
//!
//! ```text
//!  title, or a legend with a line per run
//!  loss            speed
//!  learning rate   gradient norm
//!  bubble          peak memory
//! ```
//!
//! `panel` draws one of the panels. `series` turns records into curves: smoothed, thinned,
//! with gaps at non-finite values. [`Scatter`] is a page of labelled points. The colours are the
//! colour-blind-safe ones of Okabe and Ito.

mod panel;
mod scatter;
mod series;

use gpipe_core::Bytes;
use plotters::{
    coord::Shift,
    drawing::DrawingAreaErrorKind,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::metrics::{Run, Step};
use panel::{Curve, Key, Panel};
pub use scatter::{Point, Scatter};
use series::Series;

/// Maximum number of runs on one page, one per colour.
pub const RUNS_MAX: usize = PALETTE.len();

/// Okabe and Ito's colours without yellow, which is pale on white.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];
const TEXT: RGBColor = RGBColor(40, 40, 40);
const GREY: RGBColor = RGBColor(110, 110, 110);
const FONT: &str = "Helvetica, Arial, 'DejaVu Sans', sans-serif";

const WIDTH: u32 = 1240;
const PANEL_HEIGHT: u32 = 360;
const HEADER_LINE: u32 = 24;
/// Maximum number of characters shown of a run's name.
const NAME_MAX: usize = 40;

/// An error of a plot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// There is nothing to draw.
    #[error("no run was given: name at least one")]
    NoRuns,
    /// There are more runs than colours.
    #[error("{0} runs are more than can be told apart: plot at most {RUNS_MAX}")]
    TooManyRuns(usize),
    /// The runs count different things, such as tokens and images.
    #[error(
        "{} counts {}s and {} counts {}s: plot them apart", first.0, first.1, other.0, other.1
    )]
    Units {
        /// The name and the unit of the first run.
        first: (String, String),
        /// The name and the unit of another run.
        other: (String, String),
    },
    /// The drawing library reported an error.
    #[error("cannot draw: {0}")]
    Drawing(String),
}

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PlotError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        PlotError::Drawing(error.to_string())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the page as SVG text, which takes the width of its place. The same records always give the
/// same text.
///
/// # Errors
/// [`PlotError`]: there are no runs, or more than [`RUNS_MAX`], or they count different things.
pub fn svg(runs: &[Run]) -> Result<String, PlotError> {
    match runs.len() {
        0 => return Err(PlotError::NoRuns),
        count if count > RUNS_MAX => return Err(PlotError::TooManyRuns(count)),
        _ => {}
    }
    let mut known = runs.iter().filter(|run| run.unit.is_some());
    if let Some(first) = known.next()
        && let Some(other) = known.find(|run| run.unit != first.unit)
    {
        let of = |run: &Run| (run.name.clone(), run.unit().to_owned());
        return Err(PlotError::Units { first: of(first), other: of(other) });
    }
    let mut text = String::new();
    {
        let lines = if runs.len() == 1 { 2 } else { runs.len() as u32 + 1 };
        let header_height = 20 + lines * HEADER_LINE;
        let height = header_height + 3 * PANEL_HEIGHT + 8;
        let page = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        page.fill(&WHITE)?;
        let (header, below) = page.split_vertically(header_height);
        draw_header(&header, runs)?;
        let panels = [
            loss(runs),
            speed(runs),
            learning_rate(runs),
            gradient_norm(runs),
            bubble(runs),
            memory(runs),
        ];
        for (area, panel) in below.split_evenly((3, 2)).iter().zip(&panels) {
            panel.draw(area)?;
        }
        page.present()?;
    }
    Ok(scaling(&text))
}

/// A picture that takes the width of its place in place of a fixed number of pixels.
fn scaling(svg: &str) -> String {
    let Some((tag, rest)) = svg.split_once('>') else { return svg.to_owned() };
    let fixed =
        |attribute: &&str| attribute.starts_with("width=") || attribute.starts_with("height=");
    let kept: Vec<&str> = tag.split(' ').filter(|attribute| !fixed(attribute)).collect();
    format!("{} width=\"100%\">{rest}", kept.join(" "))
}

/// Text style of `size` pixels, anchored at the left end and vertical centre.
fn text_style(size: u32, color: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color).pos(Pos::new(HPos::Left, VPos::Center))
}

fn draw_header(area: &Area<'_>, runs: &[Run]) -> Result<(), PlotError> {
    let title = match runs {
        [run] => shortened(&run.name),
        _ => format!("{} runs", runs.len()),
    };
    area.draw_text(&title, &text_style(24, TEXT), (22, 24))?;
    for (index, run) in runs.iter().enumerate() {
        let y = 24 + (index as i32 + 1) * HEADER_LINE as i32;
        let (x, line) = match runs.len() {
            1 => (22, summary(run)),
            _ => (62, format!("{}: {}", shortened(&run.name), summary(run))),
        };
        if runs.len() > 1 {
            let swatch = vec![(22, y), (52, y)];
            area.draw(&PathElement::new(swatch, PALETTE[index].stroke_width(4)))?;
        }
        area.draw_text(&line, &text_style(16, GREY), (x, y))?;
    }
    Ok(())
}

/// Shortens a long name to its end, which says more than its start.
fn shortened(name: &str) -> String {
    let length = name.chars().count();
    match length > NAME_MAX {
        true => format!("...{}", name.chars().skip(length - NAME_MAX).collect::<String>()),
        false => name.to_owned(),
    }
}

/// Describes a run: its length and its last losses.
fn summary(run: &Run) -> String {
    let Some(last) = run.steps.last() else { return "no steps".into() };
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let (steps, stages) = (run.steps.len(), last.stages.len());
    let mut parts = vec![format!("{steps} step{}", plural(steps))];
    if last.tokens_total > 0 {
        // Three digits, as people say it.
        let all = last.tokens_total as f64;
        let unit = 10_f64.powf((all.log10().floor() - 2.0).max(0.0));
        parts.push(format!("{} {}s", panel::number((all / unit).round() * unit), run.unit()));
    }
    if stages > 0 {
        parts.push(format!("{stages} stage{}", plural(stages)));
    }
    // Use the last update: the loss of a skipped step may be the reason it was skipped.
    let last_update = run.steps.iter().rfind(|step| !step.skipped).unwrap_or(last);
    parts.push(format!("last loss {:.4}", last_update.loss));
    if let Some(evaluation) = run.evaluations.last() {
        parts.push(match evaluation.bits_per_byte {
            Some(bits) => {
                format!("last validation {:.4} ({bits:.4} bits/byte)", evaluation.loss)
            }
            None => format!("last validation {:.4}", evaluation.loss),
        });
    }
    parts.join(", ")
}

/// A curve per run of its steps' `value`: the mean, over the faint values.
fn smoothed(runs: &[Run], value: impl Fn(&Step) -> f64) -> (Vec<Curve>, Vec<Key>) {
    let series: Vec<Series> = runs
        .iter()
        .map(|run| Series::new(run.steps.iter().map(|step| (step.step, value(step)))))
        .collect();
    let means: Vec<Option<Series>> = series.iter().map(Series::smoothed).collect();
    let key_color = if runs.len() == 1 { PALETTE[0] } else { GREY };
    let keys = match means.iter().any(Option::is_some) {
        true => vec![
            Key::faint_line("each step", key_color),
            Key::line("mean of 5% of the steps", key_color),
        ],
        false => vec![Key::line("each step", key_color)],
    };
    let mut curves = Vec::new();
    for (color, (series, mean)) in PALETTE.into_iter().zip(series.into_iter().zip(means)) {
        let is_faint = mean.is_some();
        curves.push(Curve { series, color, is_faint });
        curves.extend(mean.map(|series| Curve { series, color, is_faint: false }));
    }
    (curves, keys)
}

fn loss(runs: &[Run]) -> Panel {
    let (curves, mut keys) = smoothed(runs, |step| step.loss);
    let mut dots = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        // The validation curve of a single run has a separate colour.
        let color = if runs.len() == 1 { PALETTE[1] } else { PALETTE[index] };
        let points = run.evaluations.iter().map(|evaluation| (evaluation.step, evaluation.loss));
        dots.push((Series::new(points), color));
    }
    if runs.iter().any(|run| !run.evaluations.is_empty()) {
        keys.push(Key::dot("validation", if runs.len() == 1 { PALETTE[1] } else { GREY }));
    }
    Panel { title: "Loss".into(), curves, dots, keys, from_zero: false }
}

fn speed(runs: &[Run]) -> Panel {
    let (curves, keys) = smoothed(runs, |step| step.tokens_per_s);
    let known = runs.iter().find(|run| run.unit.is_some()).or(runs.first());
    let unit = known.map_or("token", Run::unit);
    let (first, rest) = unit.split_at(unit.chars().next().map_or(0, char::len_utf8));
    let title = format!("{}{rest}s per second", first.to_uppercase());
    Panel { title, curves, dots: Vec::new(), keys, from_zero: true }
}

fn learning_rate(runs: &[Run]) -> Panel {
    let curve = |(color, run): (RGBColor, &Run)| {
        let series = Series::new(run.steps.iter().map(|step| (step.step, step.lr)));
        Curve { series, color, is_faint: false }
    };
    let curves = PALETTE.into_iter().zip(runs).map(curve).collect();
    let keys = Vec::new();
    Panel { title: "Learning rate".into(), curves, dots: Vec::new(), keys, from_zero: true }
}

fn gradient_norm(runs: &[Run]) -> Panel {
    let (curves, keys) = smoothed(runs, |step| step.grad_norm);
    let title = "Gradient norm, before clipping".into();
    Panel { title, curves, dots: Vec::new(), keys, from_zero: true }
}

fn bubble(runs: &[Run]) -> Panel {
    let (curves, keys) = smoothed(runs, |step| 100.0 * step.bubble);
    let title = "Bubble: idle share of devices x time (%)".into();
    Panel { title, curves, dots: Vec::new(), keys, from_zero: true }
}

/// Peak memory: each stage's for a single run with enough colours, otherwise the largest stage's.
fn memory(runs: &[Run]) -> Panel {
    let stages_of = |step: &Step| step.stages.len();
    let stages = runs.iter().flat_map(|run| run.steps.iter().map(stages_of)).max().unwrap_or(0);
    let steps = || runs.iter().flat_map(|run| &run.steps);
    let largest = |step: &Step| step.stages.iter().map(|stage| stage.peak_bytes).max();
    let unit = match steps().filter_map(largest).max().map(Bytes).unwrap_or_default().0 {
        bytes if bytes >= 1 << 30 => ("GiB", 1_u64 << 30),
        bytes if bytes >= 1 << 20 => ("MiB", 1 << 20),
        _ => ("KiB", 1 << 10),
    };
    let scaled = |bytes: Option<u64>| bytes.map_or(f64::NAN, |b| b as f64 / unit.1 as f64);
    let (mut curves, mut keys) = (Vec::new(), Vec::new());
    let which = if runs.len() == 1 && stages <= PALETTE.len() {
        for (k, color) in PALETTE.into_iter().enumerate().take(stages) {
            let peak = |step: &Step| scaled(step.stages.get(k).map(|stage| stage.peak_bytes));
            let points = steps().map(|step| (step.step, peak(step)));
            curves.push(Curve { series: Series::new(points), color, is_faint: false });
            keys.push(Key::line(format!("stage {k}"), color));
        }
        "each stage"
    } else {
        for (color, run) in PALETTE.into_iter().zip(runs) {
            let points = run.steps.iter().map(|step| (step.step, scaled(largest(step))));
            curves.push(Curve { series: Series::new(points), color, is_faint: false });
        }
        "the largest stage"
    };
    let title = format!("Peak memory of {which}'s tensors ({})", unit.0);
    Panel { title, curves, dots: Vec::new(), keys, from_zero: true }
}
