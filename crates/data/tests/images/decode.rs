//! Tests of decoding files to pixels.

use std::fs;
use std::path::Path;

use gpipe_data::images::{IMAGE_FILE_BYTES_MAX, Image, decode};
use image::{ColorType, ExtendedColorType, ImageEncoder};
use tempfile::tempdir;

use super::{drawn, varied, write_jpeg, write_png};

fn write_as(path: &Path, bytes: &[u8], width: u32, height: u32, color: ExtendedColorType) {
    let format = image::ImageFormat::Png;
    image::save_buffer_with_format(path, bytes, width, height, color, format).unwrap();
}

fn error(path: &Path) -> String {
    let message = decode(path).unwrap_err().to_string();
    assert!(message.contains(&path.display().to_string()), "{message}");
    message
}

#[test]
fn oracle_png_is_lossless_and_jpeg_nearly() {
    let folder = tempdir().unwrap();
    let image = varied(13, 9);
    // The content decides the format of a file. These names are swapped.
    let (png, jpeg) = (folder.path().join("a.jpg"), folder.path().join("b.png"));
    write_png(&png, &image);
    assert_eq!(decode(&png).unwrap(), image);

    let smooth = drawn(24, 40, |row, column, channel| (row * 3 + column * 2 + channel * 20) as u8);
    write_jpeg(&jpeg, &smooth, 100);
    let decoded = decode(&jpeg).unwrap();
    assert_eq!((decoded.height, decoded.width), (24, 40));
    let worst = decoded.pixels.iter().zip(&smooth.pixels).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst.unwrap() <= 6, "{worst:?}");
}

#[test]
fn oracle_other_colours_become_rgb() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("image.png");
    let pixels = |bytes: &[u8], color| {
        write_as(&path, bytes, 2, 1, color);
        decode(&path).unwrap().pixels
    };
    assert_eq!(pixels(&[10, 200], ExtendedColorType::L8), [10, 10, 10, 200, 200, 200]);
    assert_eq!(pixels(&[10, 0, 200, 255], ExtendedColorType::La8), [10, 10, 10, 200, 200, 200]);
    assert_eq!(pixels(&[1, 2, 3, 0, 4, 5, 6, 255], ExtendedColorType::Rgba8), [1, 2, 3, 4, 5, 6]);
    let sixteen: Vec<u8> = [257u16, 2 * 257, 65535, 0, 128 * 257, 77 * 257]
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    assert_eq!(pixels(&sixteen, ExtendedColorType::Rgb16), [1, 2, 255, 0, 128, 77]);
}

/// A PNG of two pixels with a palette, which the encoder above does not write.
#[test]
fn oracle_a_palette_becomes_rgb() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("palette.png");
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_palette(vec![9, 8, 7, 30, 20, 10]);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&[1, 0]).unwrap();
    writer.finish().unwrap();
    fs::write(&path, bytes).unwrap();
    assert_eq!(decode(&path).unwrap().pixels, [30, 20, 10, 9, 8, 7]);
}

/// A handwritten JPEG of 8 x 8 pixels in which cyan, magenta, yellow and black are all 128, because
/// every coefficient is 0.
#[test]
fn oracle_cmyk_becomes_rgb() {
    let mut bytes = vec![0xff, 0xd8];
    let mut segment = |marker: u8, content: &[u8]| {
        bytes.extend([0xff, marker]);
        bytes.extend((content.len() as u16 + 2).to_be_bytes());
        bytes.extend(content);
    };
    segment(0xdb, &[&[0][..], &[1; 64]].concat());
    segment(0xc0, &[8, 0, 8, 0, 8, 4, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0, 4, 0x11, 0]);
    for table in [0x00, 0x10] {
        // One code of one bit, for "no difference" and for "end of block".
        segment(0xc4, &[&[table, 1][..], &[0; 15], &[0]].concat());
    }
    segment(0xda, &[4, 1, 0, 2, 0, 3, 0, 4, 0, 0, 63, 0]);
    bytes.extend([0x00, 0xff, 0xd9]);
    let folder = tempdir().unwrap();
    let path = folder.path().join("cmyk.jpg");
    fs::write(&path, bytes).unwrap();
    let image = decode(&path).unwrap();
    assert_eq!((image.height, image.width), (8, 8));
    // By the plain formula, 128 of 255 of ink is as far from black, whether inverted (as Adobe
    // writes it) or not.
    assert!(image.pixels.iter().all(|value| (62..=66).contains(value)), "{:?}", image.pixels);
}

#[test]
fn oracle_up_is_where_exif_says() {
    // Orientation 6 means to turn clockwise, so the left half comes to the top.
    let mut exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0".to_vec();
    exif.extend([0; 4]);
    let wide = drawn(8, 16, |_, column, _| if column < 8 { 255 } else { 0 });
    let tall = drawn(16, 8, |row, _, _| if row < 8 { 255 } else { 0 });
    let folder = tempdir().unwrap();

    let path = folder.path().join("turned.png");
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::png::PngEncoder::new(&mut bytes);
    encoder.set_exif_metadata(exif.clone()).unwrap();
    encoder.write_image(&wide.pixels, 16, 8, ColorType::Rgb8.into()).unwrap();
    fs::write(&path, bytes).unwrap();
    assert_eq!(decode(&path).unwrap(), tall);

    let path = folder.path().join("turned.jpg");
    write_jpeg(&path, &wide, 100);
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xe1, 0, 8 + exif.len() as u8];
    bytes.extend(b"Exif\0\0");
    bytes.extend(&exif);
    bytes.extend(&fs::read(&path).unwrap()[2..]);
    fs::write(&path, bytes).unwrap();
    let turned = decode(&path).unwrap();
    assert_eq!((turned.height, turned.width), (16, 8));
    assert!(turned.pixels.iter().zip(&tall.pixels).all(|(a, b)| a.abs_diff(*b) < 4));
}

#[test]
fn fault_truncated_files_are_refused_wherever_they_are_cut() {
    let folder = tempdir().unwrap();
    let image = varied(40, 40);
    let (png, jpeg) = (folder.path().join("a.png"), folder.path().join("b.jpg"));
    write_png(&png, &image);
    write_jpeg(&jpeg, &image, 90);
    let (whole_png, whole_jpeg) = (fs::read(&png).unwrap(), fs::read(&jpeg).unwrap());
    for part in 1..20 {
        fs::write(&jpeg, &whole_jpeg[..whole_jpeg.len() * part / 20]).unwrap();
        assert!(error(&jpeg).contains("replace the file"));
        // The last chunk of a PNG is empty, and the preceding chunk ends in a checksum.
        fs::write(&png, &whole_png[..(whole_png.len() - 20) * part / 20]).unwrap();
        error(&png);
    }
}

#[test]
fn fault_a_thumbnail_does_not_pass_for_the_end_of_a_jpeg() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jpg");
    write_jpeg(&path, &varied(40, 40), 90);
    let whole = fs::read(&path).unwrap();
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xe1, 0, 10];
    bytes.extend([0xff, 0xd8, 1, 2, 3, 4, 0xff, 0xd9]);
    bytes.extend(&whole[2..]);
    fs::write(&path, &bytes).unwrap();
    assert!(decode(&path).is_ok());
    fs::write(&path, &bytes[..bytes.len() - 50]).unwrap();
    assert!(error(&path).contains("cut off"));
}

#[test]
fn fault_files_that_are_no_images() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.png");
    fs::write(&path, "").unwrap();
    assert!(error(&path).contains("empty"));
    fs::write(&path, "this is text\n".repeat(100)).unwrap();
    assert!(error(&path).contains("neither JPEG nor PNG"));
    fs::write(&path, b"GIF89a and so on").unwrap();
    assert!(error(&path).contains("neither JPEG nor PNG"));
    assert!(error(&folder.path().join("absent.png")).contains("cannot read"));
    assert!(error(folder.path()).contains("not a regular file"));
    fs::File::create(&path).unwrap().set_len(IMAGE_FILE_BYTES_MAX + 1).unwrap();
    assert!(error(&path).contains("64 MiB"));
}

#[test]
fn fault_a_file_that_claims_to_be_huge_takes_no_memory() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("huge.png");
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 100_000, 100_000);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, &[0; 8]).unwrap();
    drop(writer);
    fs::write(&path, bytes).unwrap();
    assert!(error(&path).contains("100000 x 100000 pixels"));
    // A JPEG's sides are 16 bits each, so patch the frame header.
    let path = folder.path().join("huge.jpg");
    write_jpeg(&path, &varied(16, 16), 90);
    let mut bytes = fs::read(&path).unwrap();
    let frame = bytes.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    bytes[frame + 5..frame + 9].copy_from_slice(&[0xff; 4]);
    fs::write(&path, bytes).unwrap();
    assert!(error(&path).contains("65535 x 65535 pixels"));
}

#[test]
fn property_damaged_bytes_never_panic() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("image");
    for encode in [write_png, |path: &Path, image: &Image| write_jpeg(path, image, 80)] {
        encode(&path, &varied(20, 20));
        let whole = fs::read(&path).unwrap();
        for case in 0..300u64 {
            let mut bytes = whole.clone();
            for change in 0..3 {
                let bits = gpipe_core::splitmix::key(&[case, change]);
                let at = bits as usize % bytes.len();
                bytes[at] = (bits >> 32) as u8;
            }
            fs::write(&path, bytes).unwrap();
            if let Ok(image) = decode(&path) {
                assert_eq!(image.pixels.len(), image.height * image.width * 3);
            } else {
                assert!(!error(&path).contains("panicked"), "case {case}");
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn fault_what_has_no_end_is_not_waited_for() {
    // Uses a device, because a named pipe cannot be created without a system command.
    let error = decode(Path::new("/dev/null")).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}
