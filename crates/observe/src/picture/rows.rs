//! The SVG's head, and one row per device of each timeline.

use gpipe_core::{Nanos, Op, StageId, report::device_times};

use super::{
    Panel, Scene,
    canvas::{Canvas, num},
    charts,
    layout::Layout,
    spans::{Kind, Span, condensed, is_shared, spans},
};

/// Maximum number of actions drawn one by one, in all panels. Each takes some hundred bytes.
const ALONE_MAX: usize = 6_000;
/// Maximum number of merged spans, which are drawn as steps of an area.
const TOGETHER_MAX: usize = 16_000;
/// Actions narrower than this, in pixels, are merged.
const SHORT: f64 = 1.0;
/// Maximum width of a merged span, in pixels.
const WHOLE: f64 = 4.0;
/// Width of a character, as a fraction of the font size.
const CHARACTER: f64 = 0.62;

/// Draws the scene as SVG, one self-contained file of less than 3 MB for up to 500 devices. The
/// same scene always gives the same text.
pub fn svg(scene: &Scene<'_>) -> String {
    let layout = Layout::new(scene);
    let rows = Rows::new(scene, &layout);
    let head = 96.0 + 18.0 * scene.subtitle.len() as f64 + if rows.is_merged { 18.0 } else { 0.0 };
    let panels = scene.panels.iter().map(|panel| panel_height(panel, &layout)).sum::<f64>();
    let height = head + panels + charts::height(scene) + 8.0;
    let mut canvas = Canvas::new(layout.width, height, &scene.title, charts::devices(scene));
    let mut y = rows.head(&mut canvas, scene, &layout);
    for (panel, spans) in scene.panels.iter().zip(&rows.panels) {
        draw_panel(&mut canvas, &layout, panel, spans, y);
        y += panel_height(panel, &layout);
    }
    charts::draw(&mut canvas, &layout, scene, y);
    canvas.finished()
}

/// Height of a panel: its name and its rows.
fn panel_height(panel: &Panel<'_>, layout: &Layout) -> f64 {
    30.0 + layout.row * panel.timeline.devices.len() as f64 + 8.0
}

/// The spans drawn in the rows.
struct Rows {
    /// Spans by panel and device.
    panels: Vec<Vec<Vec<Span>>>,
    /// Actions shorter than this may be merged.
    short: Nanos,
    /// Whether any forward, recomputation or backward is merged.
    is_merged: bool,
}

impl Rows {
    /// Draws as many actions one by one as the limits allow, and merges the others.
    fn new(scene: &Scene<'_>, layout: &Layout) -> Self {
        let all: Vec<Vec<Vec<Span>>> =
            scene.panels.iter().map(|panel| spans(panel.timeline)).collect();
        let mut short = layout.time_of(SHORT).max(Nanos(1));
        let mut whole = layout.time_of(WHOLE).max(Nanos(4));
        loop {
            let each = |spans: &Vec<Span>| condensed(spans, short, whole);
            let panels: Vec<Vec<Vec<Span>>> =
                all.iter().map(|panel| panel.iter().map(each).collect()).collect();
            let drawn = || panels.iter().flatten().flatten();
            let alone = drawn().filter(|span| span.count == 1).count();
            let is_too_many = alone > ALONE_MAX;
            if !is_too_many && drawn().count() - alone <= TOGETHER_MAX || short > layout.time {
                let is_merged = drawn().any(|span| {
                    let micro = |op: Op| op.computes().is_some();
                    span.count > 1 && (micro(span.first.op) || micro(span.last.op))
                });
                return Self { panels, short, is_merged };
            }
            // Once all waits may be merged, what keeps actions apart is that they are not short.
            if is_too_many || whole > layout.time {
                short = short + short;
            }
            whole = (whole + whole).max(short);
        }
    }

    /// Writes the title, the summary and the legend. Returns the y coordinate of the first row.
    fn head(&self, canvas: &mut Canvas, scene: &Scene<'_>, layout: &Layout) -> f64 {
        canvas.text("title", 16.0, 30.0, &scene.title);
        canvas.text("", 16.0, 52.0, &scene.summary());
        let mut y = 52.0;
        for line in &scene.subtitle {
            y += 18.0;
            canvas.text("dim", 16.0, y, line);
        }
        y += 24.0;
        let mut x = 16.0;
        let spans = || self.panels.iter().flatten().flatten();
        let is_there = |kind: &Kind| spans().any(|span| span.times[*kind as usize] > Nanos(0));
        for kind in Kind::ALL.into_iter().filter(is_there) {
            canvas.rect(kind.class(), [x, y - 11.0, 14.0, 14.0], "");
            canvas.text("", x + 20.0, y, kind.name());
            x += 36.0 + 7.0 * kind.name().len() as f64;
        }
        canvas.rect("row", [x, y - 11.0, 14.0, 14.0], "");
        canvas.text("", x + 20.0, y, "waiting");
        if self.is_merged {
            y += 18.0;
            let pixels = layout.length(self.short);
            let line = format!(
                "Actions shorter than {} ({} pixels) are drawn together, each colour as high as \
                its share of the time.",
                self.short,
                num(pixels)
            );
            canvas.text("dim", 16.0, y, &line);
        }
        y + 20.0
    }
}

fn draw_panel(
    canvas: &mut Canvas,
    layout: &Layout,
    panel: &Panel<'_>,
    rows: &[Vec<Span>],
    top: f64,
) {
    canvas.heading(16.0, top + 20.0, &panel.name, &panel.note);
    let rows_end = top + 30.0 + layout.row * rows.len() as f64;
    charts::grid(canvas, layout, top + 28.0, rows_end);
    let shared = is_shared(panel.timeline);
    let times = device_times(panel.timeline);
    let bar = layout.row - layout.gap;
    let labels = labels(rows, layout, bar, shared);
    // In low rows, label only every second or fourth device.
    let every = [(13.0, 1), (11.0, 2)].into_iter().find(|(row, _)| layout.row > *row);
    let every = every.map_or(4, |(_, every)| every);
    for (device, spans) in rows.iter().enumerate() {
        let y = top + 30.0 + layout.row * device as f64;
        canvas.open(y);
        let end = layout.length(panel.timeline.makespan);
        canvas.rect("row", [layout.left, 0.0, end, bar], "");
        let middle = bar / 2.0 + 4.0;
        if device % every == 0 {
            canvas.text("right", layout.left - 10.0, middle, &format!("device {device}"));
            if let Some(times) = times.get(device) {
                let share = times.busy().0 as f64 / panel.timeline.makespan.0.max(1) as f64;
                let busy = format!("busy {:.0}%", 100.0 * share);
                canvas.text("dim", layout.right() + 10.0, middle, &busy);
            }
        }
        draw_row(canvas, layout, spans, bar, &labels);
        canvas.close();
    }
}

fn draw_row(canvas: &mut Canvas, layout: &Layout, spans: &[Span], bar: f64, labels: &Labels) {
    for span in spans {
        let Some(kind) = span.kind() else { continue };
        let (x, width) = (layout.x(span.start), layout.length(span.time()));
        let drawn = if kind.computes() && width > 2.5 { width - 0.5 } else { width.max(0.3) };
        let box_ = match kind {
            Kind::Communication => [x, bar / 4.0, drawn, bar / 2.0],
            _ => [x, 0.0, drawn, bar],
        };
        canvas.rect(kind.class(), box_, &hover(span));
    }
    areas(canvas, layout, spans, bar);
    for span in spans {
        let style = span.kind().and_then(|kind| labels[kind as usize]);
        if let Some((size, form)) = style
            && let Some(text) = label(span, form)
        {
            let middle = layout.x(span.start) + layout.length(span.time()) / 2.0;
            canvas.label(size, middle, bar / 2.0 + 0.36 * size, &text);
        }
    }
}

/// What the label of an action consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The stage, the letter of the kind and the micro-batch: where devices have several stages.
    Stage,
    /// The letter and the micro-batch.
    Letter,
    /// The micro-batch.
    Micro,
}

/// The font size and the form of the labels of each kind of action; `None` if it has no labels.
type Labels = [Option<(f64, Form)>; Kind::ALL.len()];

/// The largest labels that all actions of a kind have room for. If one has none, none is labelled:
/// labels that come and go say less than none.
fn labels(rows: &[Vec<Span>], layout: &Layout, bar: f64, shared: bool) -> Labels {
    let forms: &[Form] = match shared {
        true => &[Form::Stage, Form::Letter],
        false => &[Form::Letter, Form::Micro],
    };
    let sizes = match bar {
        bar if bar > 16.0 => [11.0, 8.5, 7.0].as_slice(),
        bar if bar > 9.5 => &[9.0, 8.5, 7.0],
        _ => &[],
    };
    Kind::ALL.map(|kind| {
        let is_it = |span: &&Span| span.times[kind as usize] > Nanos(0);
        let spans = || rows.iter().flatten().filter(is_it);
        let fits = |size: f64, form: Form| {
            spans().all(|span| {
                let room = (layout.length(span.time()) - 1.5) / (CHARACTER * size);
                // Merged actions have no label.
                label(span, form).is_some_and(|text| text.len() as f64 <= room)
            })
        };
        let each = |&size: &f64| forms.iter().map(move |&form| (size, form));
        let mut styles = sizes.iter().flat_map(each);
        styles.find(|&(size, form)| spans().next().is_some() && fits(size, form))
    })
}

/// The label of an action that is drawn alone.
fn label(span: &Span, form: Form) -> Option<String> {
    let kind = span.kind()?;
    let letter = match kind {
        Kind::Forward => "F",
        Kind::Recompute => "R",
        Kind::Backward if matches!(span.first.op, Op::BackwardInput(_)) => "I",
        Kind::Backward => "B",
        Kind::Weights => "W",
        Kind::Optimizer => "U",
        Kind::Communication => return None,
    };
    let micro = span.first.op.computes().map(|m| m.to_string()).unwrap_or_default();
    Some(match form {
        Form::Stage => format!("{}{letter}{micro}", span.first.stage),
        Form::Micro if !micro.is_empty() => micro,
        Form::Letter | Form::Micro => format!("{letter}{micro}"),
    })
}

/// Draws the merged spans: one area per kind, from the bottom of the row up. The highest is drawn
/// first.
fn areas(canvas: &mut Canvas, layout: &Layout, spans: &[Span], bar: f64) {
    let together: Vec<&Span> = spans.iter().filter(|span| span.count > 1).collect();
    let count: usize = together.iter().map(|span| span.count).sum();
    if count == 0 {
        return;
    }
    let title = format!("{count} actions too short to be drawn alone");
    for (index, kind) in Kind::ALL.into_iter().enumerate().rev() {
        let mut path = String::new();
        let mut at: Option<f64> = None;
        for span in &together {
            if span.times[index] == Nanos(0) {
                continue;
            }
            let below: Nanos = span.times[..=index].iter().copied().sum();
            let height = bar * below.0 as f64 / span.time().0.max(1) as f64;
            let (from, to) = (layout.x(span.start), layout.x(span.end));
            let top = num((bar - height).max(0.0));
            match at {
                Some(end) if (from - end).abs() < 0.01 => path += &format!("V{top}H{}", num(to)),
                _ => {
                    if at.is_some() {
                        path += &format!("V{}Z", num(bar));
                    }
                    path += &format!("M{} {}V{top}H{}", num(from), num(bar), num(to));
                }
            }
            at = Some(to);
        }
        if at.is_some() {
            path += &format!("V{}Z", num(bar));
            canvas.path(kind.class(), &path, &title);
        }
    }
}

/// The hover text of an action.
fn hover(span: &Span) -> String {
    let (action, stage) = (span.first, span.first.stage);
    let what = match action.op {
        Op::Forward(m) => format!("forward of micro-batch {m}"),
        Op::Rematerialize(m) => format!("re-materialization of micro-batch {m}"),
        Op::Backward(m) => format!("backward of micro-batch {m}"),
        Op::BackwardInput(m) => format!("inputs' gradients of micro-batch {m}"),
        Op::BackwardWeight(m) => format!("weights' gradients of micro-batch {m}"),
        Op::Reduce => "sum of tied gradients".to_owned(),
        Op::Norm => "gradient norm".to_owned(),
        Op::Decide => "whether to update".to_owned(),
        Op::Update => "update".to_owned(),
        Op::Send(transfer) | Op::Receive(transfer) => match transfer.micro_batch {
            Some(m) => format!("message of micro-batch {m}"),
            None => "message".to_owned(),
        },
    };
    let StageId(stage) = stage;
    format!("{action}: stage {stage}, {what}\n{} from {}", span.time(), span.start)
}
