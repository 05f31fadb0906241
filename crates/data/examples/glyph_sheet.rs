//! Draws the characters of fonts on one sheet, a font a row, to look at.
//!
//! ```text
//! cargo run --release --example glyph_sheet -- SHEET.png CHARACTERS VARIATIONS FOLDER...
//! ```
//!
//! Prints which font is in which row, which are left out and why, and how long it took. With more than one variation a
//! row repeats, in another style each time.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::time::Instant;

use gpipe_data::images::ImageSet;
use gpipe_data::images::glyphs::{GlyphSettings, Glyphs};

const SIZE: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next =
        || arguments.next().ok_or("arguments: SHEET.png CHARACTERS VARIATIONS FOLDER...");
    let (sheet, characters, variations) = (next()?, next()?, next()?.parse()?);
    let folders: Vec<PathBuf> = arguments.map(PathBuf::from).collect();

    let settings = GlyphSettings { characters, variations, size: SIZE, ..GlyphSettings::default() };
    let start = Instant::now();
    let (train, validation) = Glyphs::open(&folders, &settings)?;
    println!("{} (opened in {:?})", train.summary(), start.elapsed());
    for left_out in train.left_out() {
        println!("left out: {} {}", left_out.name, left_out.reason);
    }

    let columns = train.classes().len();
    let rows = (train.len() + validation.len()) / columns;
    let mut pixels = vec![0; rows * SIZE * columns * SIZE];
    let start = Instant::now();
    let images =
        [&train, &validation].into_iter().flat_map(|side| (0..side.len()).map(move |i| (side, i)));
    for (place, (side, index)) in images.enumerate() {
        let (row, column) = (place / columns, place % columns);
        if column == 0 {
            println!("row {row}: {}", side.name(index));
        }
        let image = side.image(index)?;
        for y in 0..SIZE {
            let to = ((row * SIZE + y) * columns + column) * SIZE;
            for x in 0..SIZE {
                pixels[to + x] = image.pixels[3 * (y * SIZE + x)];
            }
        }
    }
    println!("{} images in {:?}", rows * columns, start.elapsed());

    let file = BufWriter::new(File::create(sheet)?);
    let mut encoder = png::Encoder::new(file, (columns * SIZE) as u32, (rows * SIZE) as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(())
}
