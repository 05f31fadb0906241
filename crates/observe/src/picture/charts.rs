//! Draws what is below the rows: the time axis, the share of idle devices, and the bytes of each
//! device.

use gpipe_core::Bytes;

use super::{
    Scene,
    canvas::{Canvas, num},
    layout::{Layout, ticks},
    series,
    spans::spans,
};

/// Heights of a chart's name, the idle chart, the bytes chart, and the time axis below each.
const NAME: f64 = 30.0;
const IDLE: f64 = 96.0;
const BYTES: f64 = 170.0;
const AXIS: f64 = 30.0;
/// Maximum number of points of all byte curves together.
const POINTS_MAX: usize = 16_000;
/// If there are more devices than this, only the first, the last and the fullest are named.
const NAMED_MAX: usize = 10;
/// A cap is drawn if it is at most this multiple of the bytes held.
const CAP_MAX: f64 = 2.5;

/// Number of devices whose bytes are known.
pub(super) fn devices(scene: &Scene<'_>) -> usize {
    let each = |panel: &super::Panel<'_>| panel.bytes.len().max(panel.peaks.len());
    scene.panels.iter().map(each).max().unwrap_or(0)
}

/// Height of everything below the rows.
pub(super) fn height(scene: &Scene<'_>) -> f64 {
    let bytes = if devices(scene) > 0 { NAME + BYTES + AXIS } else { 0.0 };
    AXIS + NAME + IDLE + AXIS + bytes
}

/// Draws the grid lines of the time ticks from `top` to `bottom`.
pub(super) fn grid(canvas: &mut Canvas, layout: &Layout, top: f64, bottom: f64) {
    for (time, _) in layout.time_ticks() {
        let x = layout.x(time);
        canvas.line("grid", [x, top], [x, bottom]);
    }
}

pub(super) fn draw(canvas: &mut Canvas, layout: &Layout, scene: &Scene<'_>, top: f64) {
    axis(canvas, layout, top);
    let mut y = top + AXIS + NAME;
    canvas.heading(16.0, y - 12.0, "Idle devices", &idle_note(scene));
    idle(canvas, layout, scene, y);
    y += IDLE;
    axis(canvas, layout, y);
    y += AXIS;
    if devices(scene) > 0 {
        y += NAME;
        bytes(canvas, layout, scene, y);
        axis(canvas, layout, y + BYTES);
    }
}

/// Draws a time axis with ticks at `y`.
fn axis(canvas: &mut Canvas, layout: &Layout, y: f64) {
    canvas.line("axis", [layout.left, y], [layout.right(), y]);
    for (time, text) in layout.time_ticks() {
        let x = layout.x(time);
        canvas.line("axis", [x, y], [x, y + 5.0]);
        canvas.text("dim mid", x, y + 18.0, &text);
    }
}

/// Explains which line is which timeline.
fn idle_note(scene: &Scene<'_>) -> String {
    let what = "share of them that do not compute, over time";
    match &scene.panels[..] {
        [first, second] => format!("{what}: {} grey area, {} line", first.name, second.name),
        _ => what.to_owned(),
    }
}

fn idle(canvas: &mut Canvas, layout: &Layout, scene: &Scene<'_>, top: f64) {
    let bottom = top + IDLE;
    grid(canvas, layout, top, bottom);
    for share in [0.0, 0.5, 1.0] {
        let y = bottom - IDLE * share;
        canvas.line("grid", [layout.left, y], [layout.right(), y]);
        canvas.text("dim right", layout.left - 10.0, y + 4.0, &format!("{:.0}%", 100.0 * share));
    }
    let bins = (layout.plot / 2.0) as usize;
    for (index, panel) in scene.panels.iter().enumerate() {
        let makespan = panel.timeline.makespan;
        let shares = series::idle(&spans(panel.timeline), layout.time, makespan, bins);
        let mut path = String::new();
        let mut last = String::new();
        for (bin, share) in shares.iter().enumerate() {
            let y = num(bottom - IDLE * share);
            let x = |bin: usize| num(layout.left + layout.plot * bin as f64 / bins as f64);
            if path.is_empty() {
                path = format!("M{} {y}", x(bin));
            } else if y != last {
                path += &format!("H{}V{y}", x(bin));
            }
            last = y;
        }
        if path.is_empty() {
            continue;
        }
        path += &format!("H{}", num(layout.x(makespan)));
        let is_area = index == 0 || scene.panels.len() > 2;
        if is_area {
            let closed = format!("{path}V{}H{}Z", num(bottom), num(layout.left));
            canvas.path("area", &closed, "");
        } else {
            canvas.path("line", &path, "");
        }
    }
}

/// A unit of memory for values up to `most`, and its size in bytes.
fn unit(most: u64) -> (&'static str, f64) {
    match most {
        0..0x40_0000 => ("KiB", 1024.0),
        0x40_0000..0x1_0000_0000 => ("MiB", 1048576.0),
        _ => ("GiB", 1073741824.0),
    }
}

fn bytes(canvas: &mut Canvas, layout: &Layout, scene: &Scene<'_>, top: f64) {
    let bottom = top + BYTES;
    let most = |bytes: &mut dyn Iterator<Item = Bytes>| bytes.max().unwrap_or_default().0;
    let held = most(&mut scene.panels.iter().flat_map(|panel| {
        let series = panel.bytes.iter().flatten().map(|point| point.1);
        series.chain(panel.peaks.iter().copied())
    }));
    let caps: Vec<Option<Bytes>> = scene
        .panels
        .iter()
        .map(|panel| panel.caps)
        .find(|c| !c.is_empty())
        .unwrap_or_default()
        .to_vec();
    let drawn = |cap: &Bytes| cap.0 as f64 <= CAP_MAX * held as f64;
    let end = held.max(most(&mut caps.iter().flatten().copied().filter(drawn))).max(1);
    let end = end as f64 * 1.05;
    let y = |bytes: Bytes| bottom - BYTES * (bytes.0 as f64 / end).min(1.0);

    heading(canvas, scene, &caps, held, top);
    grid(canvas, layout, top, bottom);
    let (name, size) = unit(held);
    let marks = ticks(end / size, 5);
    let count = marks.len();
    for (index, (value, text)) in marks.into_iter().enumerate() {
        let y = bottom - BYTES * value * size / end;
        canvas.line("grid", [layout.left, y], [layout.right(), y]);
        let unit = if index + 1 == count { format!(" {name}") } else { String::new() };
        canvas.text("dim right", layout.left - 10.0, y + 4.0, &(text + &unit));
    }
    let devices = devices(scene);
    let points_max = POINTS_MAX / devices.max(1);
    for (number, panel) in scene.panels.iter().enumerate() {
        let pale = if is_pale(scene, number) { " pale" } else { "" };
        for (device, all) in panel.bytes.iter().enumerate() {
            let mut path = String::new();
            for (time, bytes) in series::thinned(all, points_max.max(20)) {
                let (x, y) = (num(layout.x(time)), num(y(bytes)));
                path += &if path.is_empty() { format!("M{x} {y}") } else { format!("H{x}V{y}") };
            }
            if !path.is_empty() {
                path += &format!("H{}", num(layout.x(panel.timeline.makespan)));
                let weight = if devices > NAMED_MAX { "thin" } else { "series" };
                let class = format!("{weight} s{device}{pale}");
                canvas.path(&class, &path, &format!("device {device}, {}", panel.name));
            }
        }
        for (device, peak) in panel.peaks.iter().enumerate() {
            let (x, y) = (layout.x(panel.timeline.makespan), y(*peak));
            let path = format!("M{} {}H{}", num(layout.left), num(y), num(x));
            let title = format!("device {device} held at most {peak}");
            canvas.path(&format!("peak s{device}"), &path, &title);
        }
    }
    let same = caps.iter().all(|cap| *cap == caps[0]);
    for (device, cap) in caps.iter().enumerate().take(if same { 1 } else { caps.len() }) {
        let Some(cap) = cap.filter(drawn) else { continue };
        let class = if same { "cap caps".to_owned() } else { format!("cap s{device}") };
        let path = format!("M{} {}H{}", num(layout.left), num(y(cap)), num(layout.right()));
        canvas.path(&class, &path, &format!("cap: {cap}"));
    }
    names(canvas, layout, scene, devices, &y);
}

/// Whether a later panel's bytes are drawn over this panel's.
fn is_pale(scene: &Scene<'_>, number: usize) -> bool {
    scene.panels.iter().skip(number + 1).any(|later| !later.bytes.is_empty())
}

/// Writes the legend of the byte curves, and names a cap too far above to be drawn.
fn heading(canvas: &mut Canvas, scene: &Scene<'_>, caps: &[Option<Bytes>], held: u64, top: f64) {
    let mut parts = Vec::new();
    for (number, panel) in scene.panels.iter().enumerate() {
        if !panel.bytes.is_empty() {
            let line = if is_pale(scene, number) { "pale" } else { "solid" };
            parts.push(format!("{line}: {} over time", panel.name));
        }
        if !panel.peaks.is_empty() {
            parts.push(format!("dotted: most that was held, {}", panel.name));
        }
    }
    let least = caps.iter().flatten().min();
    match least {
        Some(cap) if cap.0 as f64 > CAP_MAX * held as f64 => {
            parts.push(format!("cap: {cap}, far above"))
        }
        Some(cap) if caps.iter().all(|other| *other == Some(*cap)) => {
            parts.push(format!("dashed: cap, {cap}"))
        }
        Some(_) => parts.push("dashed: caps".to_owned()),
        None => {}
    }
    canvas.heading(16.0, top - 12.0, "Bytes of each device", &parts.join("; "));
}

/// Names the curves at their peaks, and moves names apart where they would overlap.
fn names(
    canvas: &mut Canvas,
    layout: &Layout,
    scene: &Scene<'_>,
    devices: usize,
    y: &dyn Fn(Bytes) -> f64,
) {
    let peak_of = |device: usize| {
        let peaks = scene.panels.iter().filter_map(|panel| {
            let series = panel.bytes.get(device).and_then(|all| all.iter().map(|p| p.1).max());
            panel.peaks.get(device).copied().max(series)
        });
        peaks.max().unwrap_or_default()
    };
    let fullest = (0..devices).max_by_key(|device| peak_of(*device)).unwrap_or(0);
    let named = |device: &usize| {
        devices <= NAMED_MAX || *device == 0 || *device + 1 == devices || *device == fullest
    };
    let mut all: Vec<(f64, usize)> =
        (0..devices).filter(named).map(|device| (y(peak_of(device)), device)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least = f64::NEG_INFINITY;
    for (y, _) in &mut all {
        *y = y.max(least);
        least = *y + 14.0;
    }
    for (y, device) in all {
        let x = layout.right() + 10.0;
        canvas.rect(&format!("t{device}"), [x, y - 2.0, 12.0, 4.0], "");
        canvas.text("dim", x + 17.0, y + 4.0, &format!("device {device}: {}", peak_of(device)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_units_are_such_that_numbers_are_short() {
        for (bytes, expected) in [(0, "KiB"), (4 << 20, "MiB"), (3 << 30, "MiB"), (4 << 30, "GiB")]
        {
            assert_eq!(unit(bytes).0, expected);
        }
    }
}
