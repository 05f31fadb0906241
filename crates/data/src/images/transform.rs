//! Converts an image to the values that a network sees.
//!
//! ```text
//!            distort ──► crop ──► scale ──► (pad, shift) ──► flip ──► tone, normalise ──► cut out
//! training    x           x         x            x             x          x                 x
//! evaluation              centre    x                                     normalise
//! ```
//!
//! Augmentation is a pure function of (image, key): a draw is a hash of the key and the draw's
//! purpose, not the next number of a generator. The obvious design, one random generator per
//! thread, would make an image's crop depend on which thread reads it.

use super::distort::{Affine, Tone};
use super::resample::{Axis, resample};
use super::{Image, unit};
use crate::hash::mix;
use crate::{Error, Result};

/// Maximum side of the output, in pixels.
pub const IMAGE_SIZE_MAX: usize = 4096;

/// Number of crops that [`Crop::RandomResized`] tries before it falls back to the centre.
const CROP_TRIES: u64 = 10;

/// How training crops an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Crop {
    /// The centre crop of evaluation.
    None,
    /// The centre crop of evaluation, then a shift by up to `pixels` in each direction (He et al.,
    /// "Deep residual learning", 2016, section 4.2, for CIFAR). Pixels from outside are 0 after
    /// normalisation, which is the mean colour.
    Padded {
        /// Padding on each side.
        pixels: usize,
    },
    /// A random part, scaled to the output's size (Szegedy et al., "Going deeper with
    /// convolutions", 2015, section 6). As in torchvision, after 10 failed tries the crop is the
    /// largest centred part with an allowed ratio.
    RandomResized {
        /// Minimum and maximum fraction of the image's area.
        scale: (f64, f64),
        /// Minimum and maximum ratio of width to height.
        ratio: (f64, f64),
    },
}

/// How an image becomes values of shape `[3, size, size]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Transform {
    /// Rows and columns of the output.
    pub size: usize,
    /// Evaluation scales the shorter side to this, then crops the centre of `size`. Not less than
    /// `size`.
    pub resize: usize,
    /// Subtracted from each channel, as red, green, blue in `[0, 1]`.
    pub mean: [f32; 3],
    /// Divides each channel after the subtraction.
    pub std: [f32; 3],
    /// How training crops.
    pub crop: Crop,
    /// Probability that training mirrors the image left to right.
    pub flip: f64,
    /// Side of the square that training sets to 0, in pixels, or 0 for none. The centre lies
    /// anywhere in the image, so part of the square may lie outside (DeVries and Taylor, "Improved
    /// regularization of convolutional neural networks with cutout", 2017).
    pub cutout: usize,
    /// How training rotates, scales, shears and translates.
    pub affine: Affine,
    /// How training changes contrast and inverts.
    pub tone: Tone,
}

/// The purpose of a draw. Each try of a crop uses four draws, starting at [`Draw::Tries`].
#[derive(Clone, Copy)]
enum Draw {
    Flip = 0,
    ShiftRows = 1,
    ShiftColumns = 2,
    CutRow = 3,
    CutColumn = 4,
    /// Uses five draws.
    Affine = 5,
    /// Uses three draws.
    Tone = 10,
    Tries = 16,
}

/// All random decisions for one key.
#[derive(Clone, Copy)]
struct Draws(u64);

impl Draws {
    fn bits(self, number: u64) -> u64 {
        mix(self.0 ^ mix(number))
    }

    /// A number in `[0, 1)`.
    fn unit(self, number: u64) -> f64 {
        unit(self.bits(number))
    }

    /// `N` numbers in `[0, 1)`, starting with that of `first`.
    fn units<const N: usize>(self, first: Draw) -> [f64; N] {
        std::array::from_fn(|nth| self.unit(first as u64 + nth as u64))
    }

    /// An integer less than `bound`, which must not be 0.
    fn below(self, number: u64, bound: usize) -> usize {
        ((u128::from(self.bits(number)) * bound as u128) >> 64) as usize
    }
}

impl Transform {
    /// A transform without augmentation, which evaluates without a margin.
    pub fn plain(size: usize, mean: [f32; 3], std: [f32; 3]) -> Self {
        Self {
            size,
            resize: size,
            mean,
            std,
            crop: Crop::None,
            flip: 0.0,
            cutout: 0,
            affine: Affine::default(),
            tone: Tone::default(),
        }
    }

    /// Number of values per image: `3 * size * size`.
    pub fn values(&self) -> usize {
        self.size.saturating_mul(self.size).saturating_mul(3)
    }

    /// Checks that all fields are in range.
    ///
    /// # Errors
    /// Fails if a field is out of range. The message names it.
    pub fn check(&self) -> Result<()> {
        let wrong = |field, reason: String| Err(Error::Transform { field, reason });
        let Self { size, resize, mean, std, crop, flip, cutout, affine, tone } = self;
        if !(1..=IMAGE_SIZE_MAX).contains(size) {
            return wrong("size", format!("{size}: use 1 to {IMAGE_SIZE_MAX}"));
        }
        if !(*size..=2 * IMAGE_SIZE_MAX).contains(resize) {
            let most = 2 * IMAGE_SIZE_MAX;
            return wrong("resize", format!("{resize}: use {size} (the size) to {most}"));
        }
        if !mean.iter().all(|mean| mean.is_finite()) {
            return wrong("mean", format!("{mean:?}: use finite numbers"));
        }
        if !std.iter().all(|std| std.is_normal() && *std > 0.0) {
            return wrong("std", format!("{std:?}: use finite numbers greater than 0"));
        }
        if !(0.0..=1.0).contains(flip) {
            return wrong("flip", format!("{flip}: use a probability, 0 to 1"));
        }
        if cutout > size {
            return wrong("cutout", format!("{cutout}: use 0 (none) to {size} (the size)"));
        }
        if let Some((field, reason)) = affine.wrong().or_else(|| tone.wrong()) {
            return wrong(field, reason);
        }
        match crop {
            Crop::None => Ok(()),
            Crop::Padded { pixels } if pixels < size => Ok(()),
            Crop::Padded { pixels } => {
                wrong("crop", format!("padded:{pixels}: use less than {size} (the size)"))
            }
            Crop::RandomResized { scale: (least, most), .. }
                if !(*least > 0.0 && least <= most && *most <= 1.0) =>
            {
                let reason = format!(
                    "resized:{least} (to {most}): use shares of the area, greater than 0, up to 1 \
                    and in order"
                );
                wrong("crop", reason)
            }
            Crop::RandomResized { ratio: (least, most), .. }
                if !(least.is_normal() && *least > 0.0 && least <= most && most.is_finite()) =>
            {
                let reason = format!(
                    "resized, with a ratio of {least} to {most}: use finite numbers greater than \
                    0, in order"
                );
                wrong("crop", reason)
            }
            Crop::RandomResized { .. } => Ok(()),
        }
    }

    /// Writes an image to `out` as `[3, size, size]`, where each value is (value / 255 - mean) /
    /// std. With a key, applies the training augmentation, which the key alone determines. Without
    /// a key, applies the evaluation transform.
    ///
    /// # Errors
    /// Fails if [`Transform::check`] fails, if the image is empty, if the number of its pixels does
    /// not match its sides, or if the length of `out` is not [`Transform::values`].
    pub fn apply(&self, image: &Image, key: Option<u64>, out: &mut [f32]) -> Result<()> {
        self.check()?;
        let sides = image.height.checked_mul(image.width).and_then(|pixels| pixels.checked_mul(3));
        if image.pixels.is_empty()
            || sides != Some(image.pixels.len())
            || out.len() != self.values()
        {
            return Err(Error::ImageShape {
                height: image.height,
                width: image.width,
                bytes: image.pixels.len(),
                out: out.len(),
                size: self.size,
            });
        }
        let draws = key.map(Draws);
        let distorted = draws.and_then(|draws| self.affine.apply(image, draws.units(Draw::Affine)));
        let image = distorted.as_ref().unwrap_or(image);
        let (factor, summand) = match draws {
            Some(draws) => self.tone.map(draws.units(Draw::Tone)),
            None => (1.0, 0.0),
        };
        let (rows, columns) = match (self.crop, draws) {
            (Crop::RandomResized { scale, ratio }, Some(draws)) => {
                let part = random_part(image, scale, ratio, draws);
                (self.squeezed(part.top, part.height), self.squeezed(part.left, part.width))
            }
            _ => self.centred(image),
        };
        let scaled = resample(image, rows, columns);
        let (row_shift, column_shift) = match (self.crop, draws) {
            (Crop::Padded { pixels }, Some(draws)) => (
                draws.below(Draw::ShiftRows as u64, 2 * pixels + 1) as isize - pixels as isize,
                draws.below(Draw::ShiftColumns as u64, 2 * pixels + 1) as isize - pixels as isize,
            ),
            _ => (0, 0),
        };
        let is_flipped = draws.is_some_and(|draws| draws.unit(Draw::Flip as u64) < self.flip);
        let from_column = |column: usize| {
            let unflipped = if is_flipped { self.size - 1 - column } else { column };
            unflipped.checked_add_signed(column_shift)
        };
        let planes = out.chunks_exact_mut(self.size * self.size);
        for (channel, (plane, (mean, std))) in
            planes.zip(self.mean.iter().zip(&self.std)).enumerate()
        {
            for (row, to) in plane.chunks_exact_mut(self.size).enumerate() {
                let from = row.checked_add_signed(row_shift).filter(|from| *from < self.size);
                for (column, to) in to.iter_mut().enumerate() {
                    let at = from_column(column).filter(|from| *from < self.size);
                    *to = match from.zip(at) {
                        Some((row, column)) => {
                            let value = scaled.get((row * self.size + column) * 3 + channel);
                            let value = value.copied().unwrap_or(0.0) / 255.0;
                            (value * factor + summand - mean) / std
                        }
                        None => 0.0,
                    };
                }
            }
        }
        if let Some(draws) = draws {
            self.cut_out(draws, out);
        }
        Ok(())
    }

    /// One axis of a part that is scaled to the output's size, regardless of its aspect ratio.
    fn squeezed(&self, start: usize, len: usize) -> Axis {
        Axis { start, len, scaled: self.size as u64, first: 0, window: self.size }
    }

    /// Rows and columns in evaluation: scales the shorter side to `resize`, then takes the centre.
    fn centred(&self, image: &Image) -> (Axis, Axis) {
        let shorter = image.height.min(image.width) as u128;
        let axis = |len: usize| {
            // The product needs 128 bits. The quotient fits 64 bits for every image that fits in
            // memory.
            let scaled = (self.resize as u128 * len as u128 / shorter) as u64;
            let margin = scaled.saturating_sub(self.size as u64);
            Axis { start: 0, len, scaled, first: half_to_even(margin), window: self.size }
        };
        (axis(image.height), axis(image.width))
    }

    fn cut_out(&self, draws: Draws, out: &mut [f32]) {
        let range = |draw: Draw| {
            let first = draws.below(draw as u64, self.size) as isize - (self.cutout / 2) as isize;
            let end = (first + self.cutout as isize).clamp(0, self.size as isize);
            first.max(0) as usize..end as usize
        };
        let (rows, columns) = (range(Draw::CutRow), range(Draw::CutColumn));
        for plane in out.chunks_exact_mut(self.size * self.size) {
            for row in plane.chunks_exact_mut(self.size).take(rows.end).skip(rows.start) {
                row.get_mut(columns.clone()).into_iter().for_each(|cut| cut.fill(0.0));
            }
        }
    }
}

/// Half of a margin, rounded half to even, which is where torchvision's centre crop begins.
fn half_to_even(margin: u64) -> u64 {
    (margin / 2) + u64::from(margin % 4 == 3)
}

/// A part of an image.
struct Part {
    top: usize,
    left: usize,
    height: usize,
    width: usize,
}

fn random_part(image: &Image, scale: (f64, f64), ratio: (f64, f64), draws: Draws) -> Part {
    let (height, width) = (image.height, image.width);
    let (log_least, log_most) = (ratio.0.ln(), ratio.1.ln());
    for attempt in 0..CROP_TRIES {
        let draw = Draw::Tries as u64 + 4 * attempt;
        let share = scale.0 + (scale.1 - scale.0) * draws.unit(draw);
        let area = height as f64 * width as f64 * share;
        let ratio = (log_least + (log_most - log_least) * draws.unit(draw + 1)).exp();
        // A cast that overflows saturates at the greatest integer, which is also too large for the
        // image.
        let part_width = (area * ratio).sqrt().round_ties_even() as usize;
        let part_height = (area / ratio).sqrt().round_ties_even() as usize;
        if (1..=width).contains(&part_width) && (1..=height).contains(&part_height) {
            return Part {
                top: draws.below(draw + 2, height - part_height + 1),
                left: draws.below(draw + 3, width - part_width + 1),
                height: part_height,
                width: part_width,
            };
        }
    }
    let whole = width as f64 / height as f64;
    let nearest = whole.clamp(ratio.0, ratio.1);
    let round = |side: f64, most: usize| (side.round_ties_even() as usize).clamp(1, most);
    let part_width = if whole > nearest { round(height as f64 * nearest, width) } else { width };
    let part_height = if whole < nearest { round(width as f64 / nearest, height) } else { height };
    Part {
        top: (height - part_height) / 2,
        left: (width - part_width) / 2,
        height: part_height,
        width: part_width,
    }
}
