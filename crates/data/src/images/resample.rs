//! Scaling a part of an image, with antialiasing.
//!
//! Each output pixel weights the input with a triangle as wide as two output pixels, and at least
//! two input pixels. The result is bilinear interpolation where an image grows, and an average
//! where it shrinks. PIL and torchvision call this bilinear with antialiasing, but they also round
//! to 8 bits.
//!
//! Why not a library: `image::imageops` builds the whole scaled image. A strip of 1 x 1,000,000
//! pixels scaled to a shorter side of 256 is practically endless. This module computes only the
//! requested window, with one row of memory. Sums use a fixed order and no fused operations, so
//! every machine gets the same bits.

use super::Image;

/// One axis of a resampling: `scaled` output pixels cover `len` input pixels from `start`. The
/// caller wants `window` output pixels from `first`. A window must not reach outside the output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) scaled: u64,
    pub(super) first: u64,
    pub(super) window: usize,
}

/// The input pixels of one output pixel: the index of the first, and the weights of it and its
/// successors. The weights sum to 1.
struct Taps {
    first: usize,
    weights: Vec<f32>,
}

impl Axis {
    /// The taps of a pixel in the window.
    fn taps(&self, pixel: usize) -> Taps {
        let scale = self.len as f64 / self.scaled as f64;
        let support = scale.max(1.0);
        let centre = ((self.first + pixel as u64) as f64 + 0.5) * scale;
        let last = self.len - 1;
        let from = ((centre - support).max(0.0) as usize).min(last);
        let to = ((centre + support).ceil() as usize).clamp(from + 1, self.len);
        let weight = |input: usize| {
            let distance = ((input as f64 + 0.5) - centre).abs() / support;
            (1.0 - distance).max(0.0)
        };
        let sum: f64 = (from..to).map(weight).sum();
        let weights = (from..to).map(|input| (weight(input) / sum) as f32).collect();
        Taps { first: self.start + from, weights }
    }
}

/// Resamples the windows of both axes. The axes must fit the image. Returns values in 0 to 255 with
/// shape `[rows, columns, 3]`.
pub(super) fn resample(image: &Image, rows: Axis, columns: Axis) -> Vec<f32> {
    let columns: Vec<Taps> = (0..columns.window).map(|column| columns.taps(column)).collect();
    // Only these columns are read.
    let left = columns.iter().map(|taps| taps.first).min().unwrap_or(0);
    let right = columns.iter().map(|taps| taps.first + taps.weights.len()).max().unwrap_or(left);
    let mut out = Vec::with_capacity(rows.window * columns.len() * 3);
    let mut mixed = vec![0f32; (right - left) * 3];
    for row in 0..rows.window {
        let taps = rows.taps(row);
        mixed.fill(0.0);
        for (input, &weight) in (taps.first..).zip(&taps.weights) {
            let start = (input * image.width + left) * 3;
            let pixels = image.pixels.get(start..).unwrap_or_default();
            for (to, &value) in mixed.iter_mut().zip(pixels) {
                *to += weight * f32::from(value);
            }
        }
        for taps in &columns {
            let inputs = mixed.get((taps.first - left) * 3..).unwrap_or_default();
            let mut pixel = [0f32; 3];
            for (input, &weight) in inputs.chunks_exact(3).zip(&taps.weights) {
                for (to, &value) in pixel.iter_mut().zip(input) {
                    *to += weight * value;
                }
            }
            out.extend(pixel);
        }
    }
    out
}
