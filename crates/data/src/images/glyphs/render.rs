//! One character as an image.
//!
//! Every font is scaled and placed once for all its characters, so that the tallest of them just fits: an `o` is smaller
//! than an `O`, and a `p` hangs lower than a `b`. Sideways a character is centred.
//!
//! All arithmetic is addition, multiplication, division and square roots of `f32`, which IEEE 754 fixes to the last
//! bit. Rotations are rational for that reason: sines differ between systems.

use gpipe_core::splitmix;
use zeno::{Command, Fill, Mask, Stroke, Vector};

use super::outline::{Bounds, Outline, Point};
use crate::images::Image;

/// Part of an image's side that stays free at each edge.
const MARGIN: f32 = 1.0 / 16.0;

/// Ink and background differ by no less.
const CONTRAST_MIN: u8 = 96;

/// How a character is drawn: changes on top of what its font says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Style {
    /// Of the angle's half: 0.087 is 10 degrees.
    half_tangent: f32,
    /// To the right, per height.
    slant: f32,
    /// Of the size that just fits.
    scale: f32,
    /// To the right and downwards, in sides of the image.
    shift: Point,
    /// Added to each side of every stroke, in sides of the image.
    embolden: f32,
    ink: u8,
    background: u8,
}

impl Style {
    /// As the font has it, black on white.
    pub(super) const PLAIN: Style = Style {
        half_tangent: 0.0,
        slant: 0.0,
        scale: 1.0,
        shift: Point { x: 0.0, y: 0.0 },
        embolden: 0.0,
        ink: 0,
        background: 255,
    };

    /// One of many, chosen by a key.
    pub(super) fn drawn(key: u64) -> Style {
        let uniform = |nth: u64, from: f32, to: f32| {
            // 24 bits are a float without rounding.
            let unit = (splitmix::at(key, nth) >> 40) as f32 / (1u32 << 24) as f32;
            from + (to - from) * unit
        };
        let distance = uniform(0, f32::from(CONTRAST_MIN), 255.0);
        let low = uniform(1, 0.0, 255.0 - distance);
        let (dark, light) = (low as u8, (low + distance) as u8);
        let is_inverted = splitmix::at(key, 2).is_multiple_of(2);
        let (ink, background) = if is_inverted { (light, dark) } else { (dark, light) };
        Style {
            half_tangent: uniform(3, -0.087, 0.087),
            slant: uniform(4, -0.15, 0.25),
            scale: uniform(5, 0.7, 1.0),
            shift: Point { x: uniform(6, -0.12, 0.12), y: uniform(7, -0.12, 0.12) },
            // Half of the styles leave strokes alone.
            embolden: uniform(8, -0.02, 0.02).max(0.0),
            ink,
            background,
        }
    }
}

/// How a font's characters come into a square: pixels per em, and the height that is in the middle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Fit {
    /// Images' sides per em.
    scale: f32,
    /// In ems above the baseline.
    middle: f32,
}

impl Fit {
    /// The largest at which all characters of a font are within the margins.
    pub(super) fn of(outlines: &[Outline]) -> Fit {
        let bounds = outlines.iter().map(Outline::bounds);
        let all = bounds.clone().fold(Bounds::EMPTY, Bounds::with);
        let widest = bounds.map(Bounds::width).fold(0.0, f32::max);
        let extent = all.height().max(widest).max(f32::MIN_POSITIVE);
        Fit { scale: (1.0 - 2.0 * MARGIN) / extent, middle: all.centre().y }
    }
}

/// Draws a character in a square of `size` pixels.
pub(super) fn image(outline: &Outline, fit: Fit, style: Style, size: usize) -> Image {
    let (ink, background) = (i32::from(style.ink), i32::from(style.background));
    let mut pixels = Vec::with_capacity(size * size * 3);
    for coverage in coverage(outline, fit, style, size) {
        let grey = background + ((ink - background) * i32::from(coverage) + 127) / 255;
        pixels.extend([grey.clamp(0, 255) as u8; 3]);
    }
    Image { height: size, width: size, pixels }
}

/// How much of each pixel is ink, of 255.
pub(super) fn coverage(outline: &Outline, fit: Fit, style: Style, size: usize) -> Vec<u8> {
    let side = size as f32;
    let path = path(outline, &placed(outline, fit, style, side));
    let mut mask = filled(&path, Fill::NonZero, size);
    if style.embolden > 0.0 {
        let stroke = filled(&path, Stroke::new(2.0 * style.embolden * side), size);
        mask.iter_mut().zip(stroke).for_each(|(mask, stroke)| *mask = (*mask).max(stroke));
    }
    mask
}

fn filled<'a>(path: &'a [Command], style: impl Into<zeno::Style<'a>>, size: usize) -> Vec<u8> {
    Mask::new(path).style(style).size(size as u32, size as u32).render().0
}

fn path(outline: &Outline, points: &[Point]) -> Vec<Command> {
    let mut path = Vec::with_capacity(points.len() + 8);
    let mut points = points.iter().map(|p| Vector::new(p.x, p.y));
    for polygon in outline.polygons() {
        path.extend(points.next().map(Command::MoveTo));
        path.extend(points.by_ref().take(polygon.len() - 1).map(Command::LineTo));
        path.push(Command::Close);
    }
    path
}

/// An outline's points in pixels, all of them within the margins.
fn placed(outline: &Outline, fit: Fit, style: Style, side: f32) -> Vec<Point> {
    let centre = outline.bounds().centre();
    let t = style.half_tangent;
    let (cosine, sine) = ((1.0 - t * t) / (1.0 + t * t), 2.0 * t / (1.0 + t * t));
    let scale = fit.scale * style.scale * side;
    let mut points: Vec<Point> = outline.points().to_vec();
    for point in &mut points {
        let (x, y) = (point.x - centre.x, point.y - fit.middle);
        let x = x + style.slant * y;
        *point = Point { x: scale * (cosine * x - sine * y), y: -scale * (sine * x + cosine * y) };
    }
    // Turning and slanting reach out of the square: what is too large shrinks, and what is off the edge comes back.
    let bounds = Bounds::of(points.iter().copied());
    let room = side * (1.0 - 2.0 * (MARGIN + style.embolden));
    let shrink = (room / bounds.width().max(bounds.height())).min(1.0);
    let offset = |min: f32, max: f32, shift: f32| {
        let (min, max) = (min * shrink, max * shrink);
        side / 2.0 + (shift * side).min(room / 2.0 - max).max(-room / 2.0 - min)
    };
    let x = offset(bounds.min.x, bounds.max.x, style.shift.x);
    let y = offset(bounds.min.y, bounds.max.y, style.shift.y);
    for point in &mut points {
        *point = Point { x: point.x * shrink + x, y: point.y * shrink + y };
    }
    points
}
