//! Labelled points in panels that are stacked above a shared, logarithmic x axis.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Area, FONT, GREY, PALETTE, PlotError, TEXT, text_style};

const WIDTH: u32 = 1000;
const PANEL_HEIGHT: u32 = 380;
const TITLE_HEIGHT: u32 = 50;
const GRID: RGBColor = RGBColor(225, 225, 225);

/// A labelled point.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The x value, above 0.
    pub x: f64,
    /// The y value.
    pub y: f64,
    /// The text beside the point.
    pub label: String,
}

/// A page of points.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Scatter {
    /// The title of the page.
    pub title: String,
    /// The label of the x axis.
    pub x: String,
    /// The y axis label and the points of each panel.
    pub panels: Vec<(String, Vec<Point>)>,
}

impl Scatter {
    /// Draws the page as SVG text. Points that are not finite or have no logarithm are left out.
    ///
    /// # Errors
    /// The drawing library reports an error.
    pub fn svg(&self) -> Result<String, PlotError> {
        let mut text = String::new();
        {
            let height = TITLE_HEIGHT + PANEL_HEIGHT * self.panels.len() as u32;
            let page = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
            page.fill(&WHITE)?;
            let (title, below) = page.split_vertically(TITLE_HEIGHT);
            title.draw_text(&self.title, &text_style(24, TEXT), (22, 26))?;
            let areas = below.split_evenly((self.panels.len().max(1), 1));
            for ((area, (y, points)), color) in areas.iter().zip(&self.panels).zip(PALETTE) {
                self.panel(area, y, points, color)?;
            }
            page.present()?;
        }
        Ok(text)
    }

    fn panel(
        &self,
        area: &Area<'_>,
        y: &str,
        points: &[Point],
        color: RGBColor,
    ) -> Result<(), PlotError> {
        let can_be_drawn =
            |point: &&Point| point.x > 0.0 && point.x.is_finite() && point.y.is_finite();
        let points: Vec<&Point> = points.iter().filter(can_be_drawn).collect();
        if points.is_empty() {
            area.draw_text(&format!("{y}: no data"), &text_style(18, GREY), (22, 30))?;
            return Ok(());
        }
        let of = |value: fn(&Point) -> f64, start: f64, pick: fn(f64, f64) -> f64| {
            points.iter().map(|point| value(point)).fold(start, pick)
        };
        // Leave room for labels on the right and above.
        let (low, high) = (of(|p| p.x, f64::MAX, f64::min), of(|p| p.x, 0.0, f64::max));
        let top = of(|p| p.y, f64::MIN, f64::max);
        let bottom = of(|p| p.y, 0.0, f64::min);
        let top = top + 0.1 * (top - bottom).max(1e-9);
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(62)
            .build_cartesian_2d((low / 1.3..high * 1.6).log_scale(), bottom..top)?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(GREY)
            .x_desc(&self.x)
            .y_desc(y)
            .x_label_formatter(&|x| super::panel::number(*x))
            .label_style((FONT, 15).into_font().color(&TEXT))
            .axis_desc_style((FONT, 16).into_font().color(&TEXT))
            .draw()?;
        let label = (FONT, 14).into_font().color(&TEXT).pos(Pos::new(HPos::Left, VPos::Center));
        for point in points {
            let place = (point.x, point.y);
            let text = Text::new(point.label.clone(), (8, 0), label.clone());
            let dot = Circle::new((0, 0), 5, color.filled());
            chart.draw_series([EmptyElement::at(place) + dot + text])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_every_point_has_its_label_and_what_cannot_be_drawn_is_left_out() {
        let point = |x, y, label: &str| Point { x, y, label: label.into() };
        let points = vec![
            point(1e3, 20.0, "de"),
            point(5e4, 35.5, "pt_BR"),
            point(0.0, 1.0, "none"),
            point(9.0, f64::NAN, "nan"),
        ];
        let scatter = Scatter {
            title: "all".into(),
            x: "pairs".into(),
            panels: vec![("BLEU".into(), points), ("chrF".into(), Vec::new())],
        };
        let svg = scatter.svg().unwrap();
        for text in ["all", "pairs", "BLEU", "de", "pt_BR", "chrF: no data"] {
            assert!(svg.contains(text), "{text}");
        }
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(!svg.contains("none") || svg.contains("\"none\""));
        assert_eq!(svg, scatter.svg().unwrap());
    }
}
