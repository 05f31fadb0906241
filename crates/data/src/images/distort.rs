//! Random affine maps and tones, for images whose content may be turned, slanted, moved or
//! inverted, such as letters, digits and satellite images.
//!
//! These are torchvision's `RandomAffine`, `RandomInvert` and `ColorJitter` as functions of a key.

use super::Image;

/// Maximum rotation, scaling, shear and translation in training. The default changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine {
    /// Maximum rotation in degrees, in either direction. At most 45.
    pub degrees: f64,
    /// Minimum and maximum scale. 1 leaves the size unchanged.
    pub scale: (f64, f64),
    /// Minimum and maximum shear: the shift of the top to the right, relative to the height.
    pub shear: (f64, f64),
    /// Maximum translation along each axis, in either direction, as a fraction of the image's side.
    pub translate: f64,
}

/// Changes to the range of an image's values in training. The default changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tone {
    /// Minimum width of the range that `[0, 1]` is mapped to. 1 leaves values unchanged.
    pub contrast: f64,
    /// Probability of inverting dark and light.
    pub invert: f64,
}

impl Default for Affine {
    fn default() -> Self {
        Self { degrees: 0.0, scale: (1.0, 1.0), shear: (0.0, 0.0), translate: 0.0 }
    }
}

impl Default for Tone {
    fn default() -> Self {
        Self { contrast: 1.0, invert: 0.0 }
    }
}

impl Affine {
    /// The first invalid field with the reason, if there is one.
    pub(super) fn wrong(&self) -> Option<(&'static str, String)> {
        let Self { degrees, scale, shear, translate } = *self;
        if !(0.0..=45.0).contains(&degrees) {
            return Some(("degrees", format!("{degrees}: use 0 (none) to 45")));
        }
        let (least, most) = scale;
        if !(least >= 0.1 && least <= most && most <= 10.0) {
            let reason = format!("[{least}, {most}]: use 0.1 to 10, in order");
            return Some(("scale", reason));
        }
        let (least, most) = shear;
        if !(least >= -1.0 && least <= most && most <= 1.0) {
            let reason = format!("[{least}, {most}]: use -1 to 1, in order");
            return Some(("shear", reason));
        }
        if !(0.0..=1.0).contains(&translate) {
            let reason = format!("{translate}: use a share of the side, 0 (none) to 1");
            return Some(("translate", reason));
        }
        None
    }

    /// Maps an image as the five draws in `[0, 1)` say. Returns `None` for the default, which
    /// changes nothing. Pixels from outside the image repeat the nearest border pixel.
    pub(super) fn apply(&self, image: &Image, draws: [f64; 5]) -> Option<Image> {
        if *self == Self::default() {
            return None;
        }
        let [turn, scale, shear, right, down] = draws;
        let between = |(least, most): (f64, f64), draw: f64| least + (most - least) * draw;
        let either_way = |most: f64, draw: f64| most * (2.0 * draw - 1.0);
        // Sine and cosine are rational functions of the half angle's tangent, because the system's
        // own functions may differ in the last bit. For so small an angle, the tangent is nearly
        // the angle itself.
        let half = either_way(self.degrees, turn).to_radians() / 2.0;
        let (cosine, sine) =
            ((1.0 - half * half) / (1.0 + half * half), 2.0 * half / (1.0 + half * half));
        let (scale, slant) = (between(self.scale, scale), between(self.shear, shear));
        let side = image.height.min(image.width) as f64;
        let (right, down) =
            (either_way(self.translate, right) * side, either_way(self.translate, down) * side);
        let (middle_x, middle_y) = (image.width as f64 / 2.0, image.height as f64 / 2.0);
        let mut pixels = Vec::with_capacity(image.pixels.len());
        for row in 0..image.height {
            for column in 0..image.width {
                // The source position of this pixel: the inverse map, about the centre.
                let (x, y) = (
                    (column as f64 + 0.5 - middle_x - right) / scale,
                    (row as f64 + 0.5 - middle_y - down) / scale,
                );
                let (x, y) = (cosine * x + sine * y, cosine * y - sine * x);
                let x = x + slant * y;
                pixels.extend(sample(image, x + middle_x - 0.5, y + middle_y - 0.5));
            }
        }
        Some(Image { height: image.height, width: image.width, pixels })
    }
}

/// An image's value between pixels, interpolated from the four pixels around it.
fn sample(image: &Image, x: f64, y: f64) -> [u8; 3] {
    let split = |at: f64, len: usize| {
        let at = at.clamp(0.0, (len - 1) as f64);
        let first = at as usize;
        (first, (first + 1).min(len - 1), at - first as f64)
    };
    let (left, right, across) = split(x, image.width);
    let (top, bottom, along) = split(y, image.height);
    let pixel = |row: usize, column: usize| {
        let from = (row * image.width + column) * 3;
        image.pixels.get(from..from + 3).unwrap_or(&[0; 3])
    };
    let corners = [pixel(top, left), pixel(top, right), pixel(bottom, left), pixel(bottom, right)];
    let weights = [
        (1.0 - along) * (1.0 - across),
        (1.0 - along) * across,
        along * (1.0 - across),
        along * across,
    ];
    [0, 1, 2].map(|channel| {
        let values = corners.iter().zip(weights);
        let sum: f64 = values
            .map(|(corner, weight)| {
                f64::from(corner.get(channel).copied().unwrap_or_default()) * weight
            })
            .sum();
        sum.round() as u8
    })
}

impl Tone {
    /// The first invalid field with the reason, if there is one.
    pub(super) fn wrong(&self) -> Option<(&'static str, String)> {
        let Self { contrast, invert } = *self;
        if !(contrast > 0.0 && contrast <= 1.0) {
            let reason = format!("{contrast}: use more than 0, up to 1 (unchanged)");
            return Some(("contrast", reason));
        }
        if !(0.0..=1.0).contains(&invert) {
            return Some(("invert", format!("{invert}: use a probability, 0 to 1")));
        }
        None
    }

    /// The factor and the summand that map a value in `[0, 1]`, from three draws in `[0, 1)`.
    pub(super) fn map(&self, draws: [f64; 3]) -> (f32, f32) {
        let [width, low, invert] = draws;
        let width = self.contrast + (1.0 - self.contrast) * width;
        let low = (1.0 - width) * low;
        match invert < self.invert {
            true => (-width as f32, (low + width) as f32),
            false => (width as f32, low as f32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws in the middle of every range.
    const MIDDLE: [f64; 5] = [0.5; 5];

    fn image(height: usize, width: usize, value: impl Fn(usize, usize) -> u8) -> Image {
        let places = (0..height).flat_map(|row| (0..width).map(move |column| (row, column)));
        let pixels = places.flat_map(|(row, column)| [value(row, column); 3]).collect();
        Image { height, width, pixels }
    }

    /// The centre of the dark pixels, as columns and rows from the image's centre.
    fn centre(image: &Image) -> (f64, f64) {
        let (mut sum, mut x, mut y) = (0.0, 0.0, 0.0);
        for (place, pixel) in image.pixels.chunks_exact(3).enumerate() {
            let ink = f64::from(255 - pixel[0]);
            sum += ink;
            x += ink * ((place % image.width) as f64 + 0.5 - image.width as f64 / 2.0);
            y += ink * ((place / image.width) as f64 + 0.5 - image.height as f64 / 2.0);
        }
        (x / sum, y / sum)
    }

    /// A dark square of 4 pixels, centred `right` and `up` of the image's centre.
    fn spot(right: isize, up: isize) -> Image {
        image(40, 40, |row, column| {
            let is_in = (20 - up - 2..20 - up + 2).contains(&(row as isize))
                && (20 + right - 2..20 + right + 2).contains(&(column as isize));
            if is_in { 0 } else { 255 }
        })
    }

    fn near(found: (f64, f64), expected: (f64, f64)) {
        // A twentieth of a pixel, because values are rounded to 8 bits.
        let distance = (found.0 - expected.0).abs().max((found.1 - expected.1).abs());
        assert!(distance < 0.05, "{found:?} is not {expected:?}");
    }

    #[test]
    fn oracle_a_spot_goes_where_the_map_sends_it() {
        let only = |change: fn(&mut Affine)| {
            let mut affine = Affine::default();
            change(&mut affine);
            affine
        };
        let moved = only(|affine| affine.translate = 0.1);
        near(centre(&moved.apply(&spot(0, 0), [0.5, 0.5, 0.5, 1.0, 0.0]).unwrap()), (4.0, -4.0));
        let larger = only(|affine| affine.scale = (1.5, 1.5));
        near(centre(&larger.apply(&spot(6, 4), MIDDLE).unwrap()), (9.0, -6.0));
        let slanted = only(|affine| affine.shear = (0.25, 0.25));
        near(centre(&slanted.apply(&spot(0, 8), MIDDLE).unwrap()), (2.0, -8.0));
        let turned = only(|affine| affine.degrees = 30.0);
        let (cosine, sine) = (30_f64.to_radians().cos(), 30_f64.to_radians().sin());
        let found = centre(&turned.apply(&spot(10, 0), [1.0, 0.5, 0.5, 0.5, 0.5]).unwrap());
        // The rational approximation from the half angle is 2% off at 30 degrees.
        assert!((found.0 - 10.0 * cosine).abs() < 0.2, "{found:?}");
        assert!((found.1.abs() - 10.0 * sine).abs() < 0.2, "{found:?}");
    }

    #[test]
    fn oracle_nothing_is_changed_by_default_and_borders_are_continued() {
        assert_eq!(Affine::default().apply(&spot(0, 0), [0.9; 5]), None);
        assert_eq!(Tone::default().map([0.3, 0.7, 0.0]), (1.0, 0.0));
        let grey = image(9, 5, |_, _| 77);
        let all = Affine { degrees: 45.0, scale: (0.1, 0.1), shear: (1.0, 1.0), translate: 1.0 };
        assert_eq!(all.apply(&grey, [1.0; 5]), Some(grey));
    }

    #[test]
    fn property_tones_stay_in_range_and_keep_the_contrast() {
        let tone = Tone { contrast: 0.4, invert: 0.5 };
        for step in 0..1000 {
            let draw = |nth: u64| crate::hash::unit(crate::hash::mix(3 * step + nth));
            let (factor, summand) = tone.map([draw(0), draw(1), draw(2)]);
            let (dark, light) = (summand, factor + summand);
            assert!(dark.min(light) >= -1e-6 && dark.max(light) <= 1.0 + 1e-6, "{dark} {light}");
            assert!((0.399..=1.0).contains(&factor.abs()));
            assert_eq!(factor < 0.0, draw(2) < 0.5);
        }
    }
}
