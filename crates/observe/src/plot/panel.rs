//! Draws one panel: a title, a legend, axes with ticks, and curves.

use std::ops::Range;

use plotters::{
    coord::types::{RangedCoordf64, RangedCoordi64},
    prelude::*,
};

use super::{Area, FONT, GREY, PlotError, TEXT, series::Series, text_style};

/// An axis has at most this many ticks.
const TICKS_MAX: f64 = 12.0;
/// A curve with at most this many points also shows each point.
const DOTTED_MAX: usize = 40;
const GRID: RGBColor = RGBColor(225, 225, 225);

/// The content of a panel.
pub(super) struct Panel {
    /// The title, with the unit.
    pub(super) title: String,
    /// Curves in drawing order.
    pub(super) curves: Vec<Curve>,
    /// Single points, drawn over the curves. Many of them become a line.
    pub(super) dots: Vec<(Series, RGBColor)>,
    /// The legend beneath the title.
    pub(super) keys: Vec<Key>,
    /// Whether the value axis starts at 0.
    pub(super) from_zero: bool,
}

/// A line.
pub(super) struct Curve {
    pub(super) series: Series,
    pub(super) color: RGBColor,
    /// Whether the curve is thin and pale, behind its mean.
    pub(super) is_faint: bool,
}

/// A legend entry.
pub(super) struct Key {
    text: String,
    sign: Sign,
    color: RGBColor,
}

#[derive(Clone, Copy, PartialEq)]
enum Sign {
    Line,
    FaintLine,
    Dot,
    Cross,
}

impl Key {
    pub(super) fn line(text: impl Into<String>, color: RGBColor) -> Self {
        Self { text: text.into(), sign: Sign::Line, color }
    }

    pub(super) fn faint_line(text: impl Into<String>, color: RGBColor) -> Self {
        Self { text: text.into(), sign: Sign::FaintLine, color }
    }

    pub(super) fn dot(text: impl Into<String>, color: RGBColor) -> Self {
        Self { text: text.into(), sign: Sign::Dot, color }
    }
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordi64, RangedCoordf64>>;

impl Panel {
    pub(super) fn draw(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let not_finite: Vec<i64> =
            self.curves.iter().flat_map(|curve| curve.series.not_finite()).collect();
        self.draw_keys(area, !not_finite.is_empty())?;
        let (steps, values) = (self.steps(), self.values());
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .margin_top(68)
            .x_label_area_size(44)
            .y_label_area_size(62)
            .build_cartesian_2d(steps.clone(), values.clone())?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(GREY)
            .x_desc("step")
            .x_labels(8)
            .y_labels(7)
            .x_label_formatter(&|step| match steps.end < 10_000 {
                true => step.to_string(),
                false => tick(*step as f64, &(steps.start as f64..steps.end as f64)),
            })
            .y_label_formatter(&|value| tick(*value, &values))
            .label_style((FONT, 15).into_font().color(&TEXT))
            .axis_desc_style((FONT, 15).into_font().color(&TEXT))
            .draw()?;
        for curve in &self.curves {
            curve.draw(&mut chart)?;
        }
        for (series, color) in &self.dots {
            let points = series.pieces().concat();
            if points.len() > DOTTED_MAX {
                chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
                continue;
            }
            // Rings, so that the line behind them can be seen.
            chart.draw_series(
                points.into_iter().map(|point| Circle::new(point, 4, color.stroke_width(2))),
            )?;
        }
        let top = values.end - 0.03 * (values.end - values.start);
        let crosses = not_finite.iter().map(|step| Cross::new((*step, top), 5, TEXT));
        chart.draw_series(crosses)?;
        if self.curves.iter().all(|curve| curve.series.finite().next().is_none())
            && self.dots.iter().all(|(dots, _)| dots.finite().next().is_none())
        {
            let (width, height) = area.dim_in_pixel();
            let place = (width as i32 / 2 - 12, height as i32 / 2);
            area.draw_text("no data", &text_style(18, GREY), place)?;
        }
        Ok(())
    }

    /// Draws the title and the legend entries, side by side.
    fn draw_keys(&self, area: &Area<'_>, has_crosses: bool) -> Result<(), PlotError> {
        area.draw_text(&self.title, &text_style(19, TEXT), (22, 20))?;
        let cross = Key { text: "not finite".into(), sign: Sign::Cross, color: TEXT };
        let (mut x, y) = (22, 44);
        for key in self.keys.iter().chain(has_crosses.then_some(&cross)) {
            let line = |style: ShapeStyle| PathElement::new(vec![(x, y), (x + 18, y)], style);
            match key.sign {
                Sign::Line => area.draw(&line(key.color.stroke_width(3)))?,
                Sign::FaintLine => area.draw(&line(key.color.mix(0.35).stroke_width(2)))?,
                Sign::Dot => area.draw(&Circle::new((x + 12, y), 4, key.color.stroke_width(2)))?,
                Sign::Cross => area.draw(&Cross::new((x + 12, y), 5, key.color))?,
            }
            area.draw_text(&key.text, &text_style(15, GREY), (x + 24, y))?;
            // The backend does not measure text; 7 pixels suffice for an average character of this
            // size.
            x += 34 + 7 * key.text.chars().count() as i32;
        }
        Ok(())
    }

    /// The range of all steps, widened around a single one.
    fn steps(&self) -> Range<i64> {
        let curves = self.curves.iter().map(|curve| &curve.series);
        let all = || curves.clone().chain(self.dots.iter().map(|(dots, _)| dots));
        let low = all().flat_map(Series::steps).min().unwrap_or(0);
        let high = all().flat_map(Series::steps).max().unwrap_or(1);
        if low < high { low..high } else { low.saturating_sub(1)..high.saturating_add(1) }
    }

    /// The range of all finite values, with a margin above and below.
    fn values(&self) -> Range<f64> {
        let curves = self.curves.iter().map(|curve| &curve.series);
        let all = curves.chain(self.dots.iter().map(|(dots, _)| dots));
        let (low, high) = all
            .flat_map(Series::finite)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (v.min(low), v.max(high)));
        if low > high {
            return 0.0..1.0;
        }
        let low = if self.from_zero { low.min(0.0) } else { low };
        let room = match (high - low) * 0.06 {
            0.0 => low.abs().max(1.0) * 0.1,
            // Ticks must differ numerically.
            room => room.max(low.abs().max(high.abs()) * 1e-6),
        };
        let bottom = if self.from_zero && low == 0.0 { 0.0 } else { low - room };
        bottom..high + room
    }
}

impl Curve {
    fn draw(&self, chart: &mut Chart<'_, '_>) -> Result<(), PlotError> {
        let style = match self.is_faint {
            true => self.color.mix(0.35).stroke_width(1),
            false => self.color.stroke_width(2),
        };
        for piece in self.series.pieces() {
            // A point between two gaps has no line, so draw a dot.
            if self.series.len() <= DOTTED_MAX || piece.len() == 1 {
                let dots = piece.iter().map(|point| Circle::new(*point, 3, self.color.filled()));
                chart.draw_series(dots)?;
            }
            chart.draw_series(LineSeries::new(piece, style))?;
        }
        Ok(())
    }
}

/// Formats a tick of an axis, with as many decimals as ticks need to differ from one another.
fn tick(value: f64, axis: &Range<f64>) -> String {
    let largest = axis.start.abs().max(axis.end.abs());
    let apart = (axis.end - axis.start) / TICKS_MAX;
    if value.abs() < apart * 1e-6 {
        return "0".into();
    }
    if !(1e-4..1e15).contains(&largest) {
        let digits = (largest.log10().floor() - apart.log10().floor()).clamp(1.0, 8.0) as usize;
        return format!("{value:.digits$e}");
    }
    let (scale, unit) = match largest {
        1e9..1e15 => (1e9, "G"),
        1e6..1e9 => (1e6, "M"),
        1e4..1e6 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let decimals = (-(apart / scale).log10()).ceil().clamp(0.0, 9.0) as usize;
    format!("{:.decimals$}{unit}", value / scale)
}

/// Formats a number briefly: `0.25`, `3`, `12k`, `1.5M`, `2.00e-7`.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    let (scaled, unit) = match size {
        1e9..1e15 => (value / 1e9, "G"),
        1e6..1e9 => (value / 1e6, "M"),
        1e3..1e6 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    if size != 0.0 && !(1e-4..1e15).contains(&size) {
        return format!("{value:.2e}");
    }
    let text = format!("{scaled:.4}");
    let short = text.trim_end_matches('0').trim_end_matches('.');
    format!("{}{unit}", if short == "-0" { "0" } else { short })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_ticks_differ_from_one_another() {
        for (low, high) in [
            (0.0, 1.0),
            (2.3012, 2.3019),
            (0.0, 3e-4),
            (1e6, 1e6 + 9.0),
            (0.0, 125_000.0),
            (-4.0, 4.0),
            (3e-7, 3.1e-7),
        ] {
            let axis = low..high;
            let at = |place: u32| low + (high - low) * f64::from(place) / 7.0;
            let mut all: Vec<String> = (0..8).map(|place| tick(at(place), &axis)).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{axis:?}: {all:?}");
        }
    }
}
