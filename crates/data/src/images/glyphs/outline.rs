//! A character's outline as polygons, in parts of the em and with y upwards.
//!
//! Curves become straight lines once, when a font is opened. What is left to do for an image is an affine map and a
//! fill, and the font's file is not needed any more.

use skrifa::outline::{DrawSettings, OutlinePen};
use skrifa::prelude::{LocationRef, Size};
use skrifa::{FontRef, MetadataProvider};

/// No outline is drawn with more points: letters have some hundred, traced drawings and mistakes have more.
const POINTS_MAX: usize = 20_000;

/// No letter reaches further from its origin, in ems.
const REACH_MAX: f32 = 8.0;

/// How far a line may be from its curve, in ems: an eighth of a pixel where the em has 256.
const TOLERANCE: f32 = 1.0 / 2048.0;

/// No curve is cut into more lines.
const LINES_MAX: f32 = 64.0;

/// A point; in outlines y points upwards, in images downwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) x: f32,
    pub(super) y: f32,
}

/// The least upright rectangle around points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bounds {
    pub(super) min: Point,
    pub(super) max: Point,
}

impl Bounds {
    /// Around nothing: whatever is added is the bounds.
    pub(super) const EMPTY: Bounds = Bounds {
        min: Point { x: f32::INFINITY, y: f32::INFINITY },
        max: Point { x: f32::NEG_INFINITY, y: f32::NEG_INFINITY },
    };

    pub(super) fn of(points: impl IntoIterator<Item = Point>) -> Bounds {
        points.into_iter().fold(Bounds::EMPTY, |bounds, p| bounds.with(Bounds { min: p, max: p }))
    }

    pub(super) fn with(self, other: Bounds) -> Bounds {
        Bounds {
            min: Point { x: self.min.x.min(other.min.x), y: self.min.y.min(other.min.y) },
            max: Point { x: self.max.x.max(other.max.x), y: self.max.y.max(other.max.y) },
        }
    }

    pub(super) fn width(self) -> f32 {
        self.max.x - self.min.x
    }

    pub(super) fn height(self) -> f32 {
        self.max.y - self.min.y
    }

    pub(super) fn centre(self) -> Point {
        Point { x: (self.min.x + self.max.x) / 2.0, y: (self.min.y + self.max.y) / 2.0 }
    }
}

/// Closed polygons, one after the other.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Outline {
    points: Vec<Point>,
    /// Where each polygon ends in `points`.
    ends: Vec<u32>,
}

impl Outline {
    /// The outline of a character, or why there is none.
    pub(super) fn of(font: &FontRef<'_>, character: char) -> Result<Outline, String> {
        let glyph = font.charmap().map(character).filter(|glyph| glyph.to_u32() != 0);
        let glyph = glyph.ok_or_else(|| format!("has no glyph for {character:?}"))?;
        let drawing = font.outline_glyphs().get(glyph);
        let drawing = drawing.ok_or_else(|| format!("has no outline for {character:?}"))?;
        let mut pen = Pen::default();
        // One pixel per em: the points come in ems, unhinted, as the designer set them.
        let settings = DrawSettings::unhinted(Size::new(1.0), LocationRef::default());
        let drawn = drawing.draw(settings, &mut pen);
        drawn.map_err(|error| format!("has a damaged outline for {character:?} ({error})"))?;
        let outline = pen.finish();
        if outline.points.is_empty() {
            return Err(format!("draws nothing for {character:?}"));
        }
        if outline.points.len() > POINTS_MAX {
            return Err(format!("draws {character:?} with more than {POINTS_MAX} points"));
        }
        // Said so that a coordinate that is not a number fails, too.
        if !outline.points.iter().all(|p| p.x.abs() <= REACH_MAX && p.y.abs() <= REACH_MAX) {
            return Err(format!(
                "draws {character:?} further than {REACH_MAX} ems from its origin"
            ));
        }
        Ok(outline)
    }

    /// Its points, of all polygons.
    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }

    /// Its polygons.
    pub(super) fn polygons(&self) -> impl Iterator<Item = &[Point]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .filter_map(|(start, &end)| self.points.get(start as usize..end as usize))
    }

    pub(super) fn bounds(&self) -> Bounds {
        Bounds::of(self.points.iter().copied())
    }

    /// What it takes in memory, about.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(self) + size_of_val(&*self.points) + size_of_val(&*self.ends)
    }
}

/// Draws polygons.
#[derive(Default)]
struct Pen {
    outline: Outline,
    start: usize,
}

impl Pen {
    fn finish(mut self) -> Outline {
        self.close();
        self.outline.points.shrink_to_fit();
        self.outline.ends.shrink_to_fit();
        self.outline
    }

    fn push(&mut self, point: Point) {
        // One more than the limit, by which the caller sees that there are too many.
        let points = &mut self.outline.points;
        let is_new = points.len() == self.start || points.last() != Some(&point);
        if is_new && points.len() <= POINTS_MAX {
            points.push(point);
        }
    }

    /// Where the pen is.
    fn at(&self) -> Point {
        self.outline.points.last().copied().unwrap_or(Point { x: 0.0, y: 0.0 })
    }

    /// Lines along a curve. Cut into n lines, one whose second derivative is at most `bend` is missed by no more than
    /// bend / 8 n^2.
    fn curve(&mut self, bend: f32, at: impl Fn(f32) -> Point, end: Point) {
        let lines = (bend / (8.0 * TOLERANCE)).sqrt().ceil().min(LINES_MAX);
        for line in 1..lines as usize {
            self.push(at(line as f32 / lines));
        }
        self.push(end);
    }
}

impl OutlinePen for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        self.close();
        self.push(Point { x, y });
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.push(Point { x, y });
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let (a, b, c) = (self.at(), Point { x: x1, y: y1 }, Point { x, y });
        let on = |t: f32| {
            let (p, q, r) = ((1.0 - t) * (1.0 - t), 2.0 * t * (1.0 - t), t * t);
            Point { x: p * a.x + q * b.x + r * c.x, y: p * a.y + q * b.y + r * c.y }
        };
        self.curve(2.0 * bend(a, b, c), on, c);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (a, b) = (self.at(), Point { x: x1, y: y1 });
        let (c, d) = (Point { x: x2, y: y2 }, Point { x, y });
        let on = |t: f32| {
            let s = 1.0 - t;
            let (p, q, r, v) = (s * s * s, 3.0 * s * s * t, 3.0 * s * t * t, t * t * t);
            Point {
                x: p * a.x + q * b.x + r * c.x + v * d.x,
                y: p * a.y + q * b.y + r * c.y + v * d.y,
            }
        };
        self.curve(6.0 * bend(a, b, c).max(bend(b, c, d)), on, d);
    }

    /// Ends the polygon; one of two points has no inside.
    fn close(&mut self) {
        let points = self.outline.points.len();
        if points - self.start < 3 {
            self.outline.points.truncate(self.start);
        } else {
            self.outline.ends.push(points as u32);
            self.start = points;
        }
    }
}

/// Length of the second difference of three points. No `hypot`: the system's may differ in the last bit.
fn bend(a: Point, b: Point, c: Point) -> f32 {
    let (x, y) = (a.x - 2.0 * b.x + c.x, a.y - 2.0 * b.y + c.y);
    (x * x + y * y).sqrt()
}
