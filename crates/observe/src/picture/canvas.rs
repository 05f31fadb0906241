//! Writes SVG text: shapes, rounded numbers, escaped text, and light and dark styles.

use std::fmt::Write;

/// The style sheet. It uses the colour-blind-safe colours of Okabe and Ito. Dark letters are
/// legible on each colour, and each colour is visible on both backgrounds. Viewers without a dark
/// mode show the light one.
const STYLE: &str = "
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu \
Sans',sans-serif;font-size:12px;fill:#24292f}
.ground{fill:#fff}.row{fill:#f2f4f7}
.title{font-size:19px;font-weight:600}.name{font-weight:600;font-size:13px}.dim{fill:#5b6470}\
.right{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:#d5dae1;stroke-width:1;fill:none}.axis{stroke:#8b949e;stroke-width:1;fill:none}
.l{text-anchor:middle;fill:#111;pointer-events:none}
.f{fill:#56b4e9}.r{fill:#e69f00}.b{fill:#12a97f}.w{fill:#f0e442}.o{fill:#cc79a7}.c{fill:#9aa1ab}
.area{fill:#aab4c0;fill-opacity:.45}.line{fill:none;stroke:#d55e00;stroke-width:1.5}
.series{fill:none;stroke-width:1.5}.thin{fill:none;stroke-width:.7}.pale{stroke-opacity:.4}\
.cap{fill:none;stroke-width:1.5;stroke-dasharray:7 4}\
.peak{fill:none;stroke-width:1.5;stroke-dasharray:1.5 2.5}
.caps{stroke:#24292f}
@media (prefers-color-scheme:dark){
text{fill:#e6e9ed}.ground{fill:#15181c}.row{fill:#1f242a}.dim{fill:#9ba5b0}.l{fill:#111}
.grid{stroke:#353c45}.axis{stroke:#6e7781}.c{fill:#7d8590}.area{fill:#8a95a3}\
.line{stroke:#ff8a3d}.caps{stroke:#e6e9ed}
}
";

/// An SVG document being written.
pub(super) struct Canvas {
    text: String,
}

impl Canvas {
    /// Starts a document with colours for `stages` stages.
    pub(super) fn new(width: f64, height: f64, title: &str, stages: usize) -> Self {
        let (w, h, title) = (num(width), num(height), escaped(title));
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"100%\" viewBox=\"0 0 {w} {h}\" \
            role=\"img\">\n<title>{title}</title>\n<style>{STYLE}"
        );
        let colors = |lightness| {
            let all = (0..stages).map(|stage| {
                let color = stage_color(stage, stages, lightness);
                format!(".s{stage}{{stroke:{color}}}.t{stage}{{fill:{color}}}")
            });
            all.collect::<String>()
        };
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{}\n@media (prefers-color-scheme:dark){{{}}}\n</style>\n<rect class=\"ground\" \
            width=\"{w}\" height=\"{h}\"/>\n",
            colors(42),
            colors(66)
        );
        Self { text }
    }

    pub(super) fn finished(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }

    /// Opens a group that is shifted down by `y`.
    pub(super) fn open(&mut self, y: f64) {
        let _ = writeln!(self.text, "<g transform=\"translate(0,{})\">", num(y));
    }

    pub(super) fn close(&mut self) {
        self.text.push_str("</g>\n");
    }

    /// Draws a rectangle with hover text `title`, if that is not empty.
    pub(super) fn rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], title: &str) {
        let [x, y, width, height] = [x, y, width, height].map(num);
        let _ = write!(
            self.text,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\""
        );
        let _ = match title {
            "" => writeln!(self.text, "/>"),
            _ => writeln!(self.text, "><title>{}</title></rect>", escaped(title)),
        };
    }

    pub(super) fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let (x, y, text) = (num(x), num(y), escaped(text));
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let _ = writeln!(self.text, "<text{class} x=\"{x}\" y=\"{y}\">{text}</text>");
    }

    /// Writes a bold name followed by a grey note.
    pub(super) fn heading(&mut self, x: f64, y: f64, name: &str, note: &str) {
        let (x, y, name, note) = (num(x), num(y), escaped(name), escaped(note));
        let _ = writeln!(
            self.text,
            "<text x=\"{x}\" y=\"{y}\"><tspan class=\"name\">{name}</tspan><tspan class=\"dim\" \
            dx=\"10\">{note}</tspan></text>"
        );
    }

    /// Writes centred text of a given size.
    pub(super) fn label(&mut self, size: f64, x: f64, y: f64, text: &str) {
        let (x, y, text) = (num(x), num(y), escaped(text));
        let size = num(size);
        let _ = writeln!(
            self.text,
            "<text class=\"l\" style=\"font-size:{size}px\" x=\"{x}\" y=\"{y}\">{text}</text>"
        );
    }

    pub(super) fn path(&mut self, class: &str, path: &str, title: &str) {
        let _ = write!(self.text, "<path class=\"{class}\" d=\"{path}\"");
        let _ = match title {
            "" => writeln!(self.text, "/>"),
            _ => writeln!(self.text, "><title>{}</title></path>", escaped(title)),
        };
    }

    pub(super) fn line(&mut self, class: &str, [x0, y0]: [f64; 2], [x1, y1]: [f64; 2]) {
        let [x0, y0, x1, y1] = [x0, y0, x1, y1].map(num);
        let _ = writeln!(self.text, "<path class=\"{class}\" d=\"M{x0} {y0}L{x1} {y1}\"/>");
    }
}

/// The colour of a stage: from blue over violet and red to orange, spaced as far apart as `stages`
/// allows. Yellow is left out because it is pale on white.
pub(super) fn stage_color(stage: usize, stages: usize, lightness: u32) -> String {
    let share = stage as f64 / stages.saturating_sub(1).max(1) as f64;
    let hue = (205.0 + 195.0 * share) % 360.0;
    format!("hsl({hue:.0},70%,{lightness}%)")
}

/// Formats a number of pixels with at most two decimals.
pub(super) fn num(number: f64) -> String {
    let text = format!("{number:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

/// Escapes text for XML and removes the control characters that XML cannot represent.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' => out.push_str("&#10;"),
            '\u{fffe}' | '\u{ffff}' => {}
            control if control.is_control() => {}
            other => out.push(other),
        }
    }
    out
}
