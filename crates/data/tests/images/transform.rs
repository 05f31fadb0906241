//! Tests of transforms from pixels to values.

use gpipe_data::Error;
use gpipe_data::images::{Crop, IMAGE_SIZE_MAX, Image, Transform};

use super::{drawn, varied};

/// A transform whose output values are the pixel values.
fn identity(size: usize) -> Transform {
    Transform::plain(size, [0.0; 3], [1.0 / 255.0; 3])
}

fn apply(transform: &Transform, image: &Image, key: Option<u64>) -> Vec<f32> {
    let mut out = vec![f32::NAN; transform.values()];
    transform.apply(image, key, &mut out).unwrap();
    out
}

/// One value of the output of a transform of `size`.
fn at(out: &[f32], size: usize, channel: usize, row: usize, column: usize) -> f32 {
    out[(channel * size + row) * size + column]
}

fn assert_near(a: f32, b: f32) {
    assert!((a - b).abs() < 1e-3, "{a} is not {b}");
}

#[test]
fn oracle_an_image_of_the_right_size_is_only_normalised() {
    let image = varied(8, 8);
    let (mean, std) = ([0.1, 0.2, 0.3], [0.5, 0.25, 2.0]);
    let out = apply(&Transform::plain(8, mean, std), &image, None);
    for (place, &value) in out.iter().enumerate() {
        let (channel, pixel) = (place / 64, place % 64);
        let byte = f32::from(image.pixels[pixel * 3 + channel]);
        assert_eq!(value, (byte / 255.0 - mean[channel]) / std[channel]);
    }
}

#[test]
fn oracle_a_constant_image_stays_constant_at_every_size() {
    for (height, width, size) in [(1, 1, 5), (3, 50, 7), (50, 3, 7), (200, 300, 11), (5, 5, 64)] {
        let image = drawn(height, width, |_, _, channel| 100 + channel as u8);
        let out = apply(&identity(size), &image, None);
        out.chunks(size * size).enumerate().for_each(|(channel, plane)| {
            plane.iter().for_each(|&value| assert_near(value, 100.0 + channel as f32));
        });
    }
}

#[test]
fn oracle_scaling_by_hand() {
    // At twice the size, an output pixel is three quarters of the near pixel and one quarter of the
    // next. At the border it is the pixel itself.
    let ramp = drawn(2, 2, |_, column, _| if column == 0 { 0 } else { 100 });
    let out = apply(&identity(4), &ramp, None);
    for row in 0..4 {
        let expected = [0.0, 25.0, 75.0, 100.0];
        (0..4).for_each(|column| assert_near(at(&out, 4, 0, row, column), expected[column]));
    }
    // At half the size, the triangle is 4 pixels wide, with weights 1/8, 3/8, 3/8, 1/8. At the
    // border they are 3/7, 3/7 and 1/7.
    let line = drawn(4, 4, |_, column, _| [0, 70, 140, 210][column]);
    let out = apply(&identity(2), &line, None);
    assert_near(at(&out, 2, 0, 0, 0), (3.0 * 70.0 + 140.0) / 7.0);
    assert_near(at(&out, 2, 0, 1, 1), (70.0 + 3.0 * 140.0 + 3.0 * 210.0) / 7.0);
}

/// Compares with `image::imageops`, which rounds to 8 bits.
#[test]
fn oracle_scaling_is_what_another_library_does() {
    for (height, width, size) in [(31, 31, 8), (50, 50, 49), (20, 20, 33), (100, 100, 7)] {
        let image = varied(height, width);
        let buffer = image::RgbImage::from_raw(width as u32, height as u32, image.pixels.clone());
        let filter = image::imageops::FilterType::Triangle;
        let expected =
            image::imageops::resize(&buffer.unwrap(), size as u32, size as u32, filter).into_raw();
        let out = apply(&identity(size), &image, None);
        for (place, byte) in expected.into_iter().enumerate() {
            let (pixel, channel) = (place / 3, place % 3);
            let value = out[channel * size * size + pixel];
            assert!((value - f32::from(byte)).abs() < 0.51, "{size}: {value} is not {byte}");
        }
    }
}

#[test]
fn oracle_evaluation_cuts_the_centre() {
    // The shorter side is already 8, so the 4 x 4 centre is a slice.
    let image = varied(8, 12);
    let out = apply(&Transform { resize: 8, ..identity(4) }, &image, None);
    for (row, column) in [(0, 0), (0, 3), (3, 1), (2, 2)] {
        let byte = image.pixels[((row + 2) * 12 + column + 4) * 3 + 1];
        assert_near(at(&out, 4, 1, row, column), f32::from(byte));
    }
}

#[test]
fn oracle_padding_shifts_and_fills_with_the_mean() {
    let image = varied(6, 6);
    let transform = Transform { crop: Crop::Padded { pixels: 2 }, ..identity(6) };
    let mut shifts = std::collections::BTreeSet::new();
    for key in 0..400 {
        let out = apply(&transform, &image, Some(key));
        let shifted = |down: isize, right: isize| {
            (0..36).all(|pixel| {
                let (row, column) = (pixel / 6 + down, pixel % 6 + right);
                let inside = (0..6).contains(&row) && (0..6).contains(&column);
                let byte = if inside { image.pixels[(row * 6 + column) as usize * 3] } else { 0 };
                (out[pixel as usize] - f32::from(byte)).abs() < 1e-3
            })
        };
        let found = (-2..=2).flat_map(|down| (-2..=2).map(move |right| (down, right)));
        let found: Vec<_> = found.filter(|(down, right)| shifted(*down, *right)).collect();
        assert_eq!(found.len(), 1, "key {key}: {found:?}");
        shifts.extend(found);
    }
    assert_eq!(shifts.len(), 25, "every shift happens");
    // Padding is 0 after normalisation, whatever the mean.
    let white = drawn(6, 6, |_, _, _| 255);
    let out = apply(&Transform { mean: [0.5; 3], ..transform }, &white, Some(0));
    assert!(out.contains(&0.0) && !out.iter().any(|value| *value < 0.0));
}

#[test]
fn oracle_flips_mirror_half_of_the_time() {
    let image = varied(5, 5);
    let plain = apply(&identity(5), &image, None);
    let mirrored: Vec<f32> = plain.chunks(5).flat_map(|row| row.iter().rev().copied()).collect();
    let always = Transform { flip: 1.0, ..identity(5) };
    assert_eq!(apply(&always, &image, Some(3)), mirrored);
    let twice =
        drawn(5, 5, |row, column, channel| image.pixels[(row * 5 + 4 - column) * 3 + channel]);
    assert_eq!(apply(&always, &twice, Some(3)), plain, "flipped twice");
    let half = Transform { flip: 0.5, ..identity(5) };
    let flips = (0..1000).filter(|key| apply(&half, &image, Some(*key)) == mirrored).count();
    assert!((430..570).contains(&flips), "{flips}"); // More than 4 standard deviations each way.
    assert_eq!(apply(&always, &image, None), plain, "evaluation does not flip");
}

#[test]
fn oracle_cutout_is_a_square_clipped_at_the_border() {
    let white = drawn(16, 16, |_, _, _| 255);
    for side in [1, 4, 5, 16] {
        let transform = Transform { cutout: side, ..identity(16) };
        let (mut least, mut most) = (usize::MAX, 0);
        for key in 0..600 {
            let out = apply(&transform, &white, Some(key));
            let plane = |channel: usize| out[channel * 256..(channel + 1) * 256].to_vec();
            assert_eq!(plane(0), plane(1));
            assert_eq!(plane(0), plane(2));
            let cut: Vec<usize> = (0..256).filter(|pixel| out[*pixel] == 0.0).collect();
            let rows: std::collections::BTreeSet<_> = cut.iter().map(|pixel| pixel / 16).collect();
            let columns: std::collections::BTreeSet<_> =
                cut.iter().map(|pixel| pixel % 16).collect();
            assert_eq!(cut.len(), rows.len() * columns.len(), "a rectangle");
            assert!(rows.len() <= side && columns.len() <= side);
            (least, most) = (least.min(cut.len()), most.max(cut.len()));
        }
        assert_eq!(most, side * side);
        // With its centre in a corner, the square keeps at least half of each side, rounded up.
        assert_eq!(least, side.div_ceil(2) * side.div_ceil(2));
    }
}

#[test]
fn oracle_random_parts_have_the_asked_share_and_ratio() {
    // Red encodes the column and green the row, so the output shows where it came from.
    let image = drawn(200, 240, |row, column, channel| [column, row, 0][channel] as u8);
    let crop = Crop::RandomResized { scale: (0.1, 0.5), ratio: (0.75, 4.0 / 3.0) };
    let transform = Transform { crop, ..identity(8) };
    let (mut least, mut most) = (f32::MAX, f32::MIN);
    for key in 0..500 {
        let out = apply(&transform, &image, Some(key));
        // Inner pixels of a ramp are exact, so the difference of two of them measures a fraction of
        // the side.
        let width = (at(&out, 8, 0, 3, 6) - at(&out, 8, 0, 3, 1)) * 8.0 / 5.0;
        let height = (at(&out, 8, 1, 6, 3) - at(&out, 8, 1, 1, 3)) * 8.0 / 5.0;
        let share = width * height / (200.0 * 240.0);
        assert!((0.09..0.51).contains(&share), "{share}");
        assert!((0.73..1.37).contains(&(width / height)), "{width} x {height}");
        (least, most) = (least.min(share), most.max(share));
    }
    assert!(least < 0.12 && most > 0.47, "{least} {most}");
}

#[test]
fn oracle_the_whole_image_where_scale_and_ratio_leave_no_choice() {
    let image = varied(12, 12);
    let crop = Crop::RandomResized { scale: (1.0, 1.0), ratio: (1.0, 1.0) };
    let transform = Transform { crop, ..identity(12) };
    assert_eq!(apply(&transform, &image, Some(5)), apply(&identity(12), &image, None));
    // No part of this strip has an allowed ratio and share. The fallback is the centre, 10 x 10 of
    // 10 x 1000.
    let strip = drawn(10, 1000, |_, column, _| if (495..505).contains(&column) { 200 } else { 0 });
    let out = apply(&Transform { size: 10, resize: 10, ..transform }, &strip, Some(5));
    out.iter().for_each(|value| assert_near(*value, 200.0));
}

#[test]
fn property_the_key_alone_decides() {
    let image = varied(40, 30);
    let crop = Crop::RandomResized { scale: (0.2, 1.0), ratio: (0.75, 1.33) };
    let transform = Transform { crop, flip: 0.5, cutout: 4, ..identity(16) };
    let of = |key| apply(&transform, &image, Some(key));
    assert_eq!(of(9), of(9));
    let different: std::collections::BTreeSet<Vec<u32>> =
        (0..50).map(|key| of(key).iter().map(|value| value.to_bits()).collect()).collect();
    assert_eq!(different.len(), 50);
}

#[test]
fn regression_a_strip_takes_no_memory_for_what_is_cut_off() {
    // Scaling the whole strip to a shorter side of 256 would take 200 GB.
    for (height, width) in [(1, 1_000_000), (1_000_000, 1)] {
        let strip = drawn(height, width, |_, _, _| 50);
        let out = apply(&identity(256), &strip, None);
        out.iter().for_each(|value| assert_near(*value, 50.0));
    }
}

#[test]
fn fault_fields_out_of_range_are_named() {
    let fine = identity(8);
    let resized = |scale, ratio| Crop::RandomResized { scale, ratio };
    let with_crop = |crop| Transform { crop, ..fine.clone() };
    let cases = [
        ("size", Transform { size: 0, ..fine.clone() }),
        ("size", Transform { size: IMAGE_SIZE_MAX + 1, resize: 5000, ..fine.clone() }),
        ("resize", Transform { resize: 7, ..fine.clone() }),
        ("resize", Transform { resize: usize::MAX, ..fine.clone() }),
        ("mean", Transform { mean: [0.0, f32::NAN, 0.0], ..fine.clone() }),
        ("std", Transform { std: [1.0, 0.0, 1.0], ..fine.clone() }),
        ("std", Transform { std: [1.0, -1.0, 1.0], ..fine.clone() }),
        ("flip", Transform { flip: 1.1, ..fine.clone() }),
        ("flip", Transform { flip: f64::NAN, ..fine.clone() }),
        ("cutout", Transform { cutout: 9, ..fine.clone() }),
        ("crop", with_crop(Crop::Padded { pixels: 8 })),
        ("crop", with_crop(resized((0.0, 1.0), (1.0, 1.0)))),
        ("crop", with_crop(resized((0.5, 0.4), (1.0, 1.0)))),
        ("crop", with_crop(resized((0.5, 1.1), (1.0, 1.0)))),
        ("crop", with_crop(resized((0.5, 1.0), (1.0, 0.5)))),
        ("crop", with_crop(resized((0.5, 1.0), (0.0, 0.5)))),
        ("crop", with_crop(resized((0.5, 1.0), (1.0, f64::INFINITY)))),
        ("crop", with_crop(resized((f64::NAN, 1.0), (1.0, 1.0)))),
    ];
    for (name, transform) in cases {
        match transform.check() {
            Err(Error::Transform { field, .. }) => assert_eq!(field, name),
            other => panic!("{transform:?}: {other:?}"),
        }
    }
}

#[test]
fn fault_images_and_outputs_of_the_wrong_length() {
    let transform = identity(8);
    let mut out = vec![0.0; transform.values()];
    let image = varied(8, 8);
    let cases = [
        Image { height: 0, width: 8, pixels: vec![] },
        Image { height: 9, ..image.clone() },
        Image { height: usize::MAX, width: usize::MAX, ..image.clone() },
    ];
    for image in cases {
        let result = transform.apply(&image, None, &mut out);
        assert!(matches!(result, Err(Error::ImageShape { .. })), "{result:?}");
    }
    assert!(transform.apply(&image, None, &mut out[1..]).is_err());
    assert!(transform.apply(&image, None, &mut out).is_ok());
}
