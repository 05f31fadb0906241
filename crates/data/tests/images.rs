//! Tests of images, from files to batches. Families: `oracle_` (values by hand and plain formulas),
//! `property_` (order, threads, restarts), `fault_` (damaged files, wrong folders, wrong settings).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

#[path = "images/batches.rs"]
mod batches;
#[path = "images/cifar.rs"]
mod cifar;
#[path = "images/decode.rs"]
mod decode;
#[path = "images/folder.rs"]
mod folder;
#[path = "images/transform.rs"]
mod transform;

use std::fs;
use std::path::Path;

use gpipe_data::Error;
use gpipe_data::Result;
use gpipe_data::images::{Image, ImageSet};

/// An image whose values are a function of (row, column, channel).
fn drawn(height: usize, width: usize, value: impl Fn(usize, usize, usize) -> u8) -> Image {
    let mut pixels = Vec::new();
    for row in 0..height {
        for column in 0..width {
            pixels.extend((0..3).map(|channel| value(row, column, channel)));
        }
    }
    Image { height, width, pixels }
}

/// An image in which neighbouring pixels differ.
fn varied(height: usize, width: usize) -> Image {
    drawn(height, width, |row, column, channel| (row * 7 + column * 3 + channel * 50) as u8)
}

fn write_png(path: &Path, image: &Image) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let (width, height) = (image.width as u32, image.height as u32);
    let color = image::ExtendedColorType::Rgb8;
    let format = image::ImageFormat::Png;
    image::save_buffer_with_format(path, &image.pixels, width, height, color, format).unwrap();
}

fn write_jpeg(path: &Path, image: &Image, quality: u8) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut bytes = Vec::new();
    image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, quality)
        .encode(
            &image.pixels,
            image.width as u32,
            image.height as u32,
            image::ExtendedColorType::Rgb8,
        )
        .unwrap();
    fs::write(path, bytes).unwrap();
}

/// Images in memory. All values of image `i` are `i`, and its class is `i % 3`. Images in `bad`
/// cannot be read.
#[derive(Debug)]
struct Numbered {
    classes: Vec<String>,
    len: usize,
    side: usize,
    bad: Vec<usize>,
}

impl Numbered {
    fn new(len: usize, side: usize, bad: &[usize]) -> Self {
        let classes = ["a", "b", "c"].map(str::to_owned).to_vec();
        Self { classes, len, side, bad: bad.to_vec() }
    }
}

impl ImageSet for Numbered {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.len
    }

    fn class(&self, index: usize) -> usize {
        index % 3
    }

    fn name(&self, index: usize) -> String {
        format!("image {index}")
    }

    fn image(&self, index: usize) -> Result<Image> {
        if self.bad.contains(&index) {
            return Err(Error::Image { path: self.name(index).into(), reason: "bad".into() });
        }
        Ok(drawn(self.side, self.side, |_, _, _| index as u8))
    }

    fn fingerprint(&self) -> u64 {
        self.len as u64
    }
}
