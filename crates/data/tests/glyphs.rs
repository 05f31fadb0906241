//! Families: `oracle_` (numbers, names and pixels that can be told), `property_` (what holds for any fonts), `fault_` (broken
//! fonts and settings). Most draw from fonts made here; the last draw from what is installed, or say in the file that
//! GPIPE_SKIP_LOG names that nothing is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod made_font;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use gpipe_core::splitmix::Stream;
use gpipe_data::Error;
use gpipe_data::images::glyphs::{GlyphSettings, Glyphs};
use gpipe_data::images::{Image, ImageSet};
use made_font::{bars, collection, font};
use tempfile::TempDir;

const LETTERS: &str = "abcdefgh";
const FAMILIES: [(&str, i16); 6] =
    [("Ash", 100), ("Beech", 160), ("Cedar", 240), ("Elm", 360), ("Fir", 540), ("Oak", 800)];

fn settings() -> GlyphSettings {
    GlyphSettings { characters: LETTERS.to_owned(), ..GlyphSettings::default() }
}

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// A folder with a font of each family.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (family, width) in FAMILIES {
        write(folder.path(), &format!("{family}.ttf"), bars(family, LETTERS, width));
    }
    folder
}

fn open(folder: &Path, settings: &GlyphSettings) -> (Glyphs, Glyphs) {
    Glyphs::open(&[folder.to_path_buf()], settings).unwrap()
}

fn both(sides: &(Glyphs, Glyphs)) -> BTreeSet<String> {
    sides.0.fonts().chain(sides.1.fonts()).map(str::to_owned).collect()
}

/// Why a file is left out; panics if it is not.
fn reason(sides: &(Glyphs, Glyphs), file: &str) -> String {
    let found = sides.1.left_out().iter().find(|left_out| left_out.name.ends_with(file));
    found.unwrap_or_else(|| panic!("{file} is used")).reason.clone()
}

/// Darkest, lightest and background grey, after a look at what holds for every image.
fn greys(image: &Image, size: usize) -> (u8, u8, u8) {
    assert_eq!((image.height, image.width, image.pixels.len()), (size, size, size * size * 3));
    assert!(image.pixels.chunks(3).all(|rgb| rgb[0] == rgb[1] && rgb[1] == rgb[2]));
    let grey = |x: usize, y: usize| image.pixels[3 * (y * size + x)];
    let background = grey(0, 0);
    for i in 0..size {
        let edges = [grey(i, 0), grey(i, size - 1), grey(0, i), grey(size - 1, i)];
        assert_eq!(edges, [background; 4], "ink on the edge");
    }
    let (least, most) = (image.pixels.iter().min().unwrap(), image.pixels.iter().max().unwrap());
    assert!(least < most, "no ink");
    (*least, *most, background)
}

#[test]
fn oracle_numbers_classes_and_names() {
    let folder = folder();
    let (train, validation) = open(folder.path(), &GlyphSettings { variations: 3, ..settings() });
    assert_eq!(train.classes(), ["a", "b", "c", "d", "e", "f", "g", "h"]);
    let fonts: Vec<&str> = train.fonts().collect();
    assert_eq!(train.len(), 3 * fonts.len() * 8);
    assert_eq!(validation.len(), (6 - fonts.len()) * 8);
    let mut index = 0;
    for variation in ["", ", variation 1", ", variation 2"] {
        for font in &fonts {
            for (class, letter) in LETTERS.chars().enumerate() {
                assert_eq!(train.class(index), class);
                assert_eq!(train.name(index), format!("{font}: '{letter}'{variation}"));
                index += 1;
            }
        }
    }
    for beyond in [index, index + 1, usize::MAX] {
        let error = train.image(beyond).unwrap_err();
        assert!(matches!(error, Error::NoSuchImage { images, .. } if images == index), "{error}");
        assert_eq!(train.class(beyond), 0);
    }
    let (fonts, other) = (fonts.len(), 6 - fonts.len());
    let known = format!(
        "6 fonts of 6 families: {fonts} of {fonts} to train on, {other} of {other} to validate on"
    );
    assert_eq!(train.summary(), known);
    assert_eq!(validation.summary(), known);
}

#[test]
fn oracle_pixels_of_a_square() {
    let square = |side: i16| vec![vec![(0, 0), (side, 0), (side, side), (0, side)]];
    let folder = TempDir::new().unwrap();
    for (family, half) in [("Whole", 500), ("Part", 250)] {
        write(folder.path(), family, ""); // Not called a font.
        let font = font(family, &[('a', square(1000)), ('b', square(half))]);
        write(folder.path(), &format!("{family}.TTF"), font);
    }
    let settings = GlyphSettings { characters: "ab".to_owned(), size: 32, ..settings() };
    let sides = open(folder.path(), &settings);
    assert_eq!(sides.0.left_out(), []);
    // The larger fills all but a margin of 2; the smaller stands on the same line, in the middle.
    let side = if sides.0.fonts().any(|font| font == "Whole") { &sides.0 } else { &sides.1 };
    for (index, columns, rows) in [(0, 2..30, 2..30), (1, 9..23, 16..30)] {
        let image = side.image(index).unwrap();
        for (place, rgb) in image.pixels.chunks(3).enumerate() {
            let is_ink = columns.contains(&(place % 32)) && rows.contains(&(place / 32));
            // Edges lie on pixels but for 256ths.
            let known: u8 = if is_ink { 0 } else { 255 };
            assert!(rgb[0].abs_diff(known) <= 2, "{index} at {place}: {} for {known}", rgb[0]);
        }
    }
}

#[test]
fn oracle_a_collection_is_several_fonts() {
    let (one, apart) = (TempDir::new().unwrap(), folder());
    let fonts = FAMILIES.map(|(family, width)| bars(family, LETTERS, width));
    write(one.path(), "all.ttc", collection(&fonts));
    let (one, apart) = (open(one.path(), &settings()), open(apart.path(), &settings()));
    assert_eq!(both(&one), both(&apart));
    assert_eq!(one.0.families(), apart.0.families());
    assert!((0..one.0.len()).all(|i| one.0.image(i).unwrap() == apart.0.image(i).unwrap()));
}

#[test]
fn property_no_family_is_on_both_sides() {
    let folder = folder();
    for (family, width) in FAMILIES {
        for (style, more) in [("Bold", 20), ("Light Italic", -20)] {
            let name = format!("{family} {style}");
            write(folder.path(), &format!("{name}.ttf"), bars(&name, LETTERS, width + more));
        }
    }
    let mut splits = BTreeSet::new();
    for seed in 0..20 {
        let (train, validation) = open(folder.path(), &GlyphSettings { seed, ..settings() });
        assert!(train.families().is_disjoint(&validation.families()));
        assert_eq!(train.families().len() + validation.families().len(), 6);
        assert_eq!(train.fonts().count(), 3 * train.families().len());
        assert!(!validation.is_empty() && !train.is_empty());
        splits.insert(validation.fingerprint());
    }
    assert!(splits.len() > 3, "the seed does not split");
}

#[test]
fn property_a_copy_under_another_name_is_of_the_same_family() {
    let folder = folder();
    write(folder.path(), "copy.ttf", bars("Zelkova", LETTERS, 246));
    write(folder.path(), "twin.ttf", bars("Yew", LETTERS, 360));
    let sides = open(folder.path(), &settings());
    let families: BTreeSet<&str> = sides.0.families().union(&sides.1.families()).copied().collect();
    assert_eq!(families, BTreeSet::from(["ash", "beech", "cedar", "elm", "fir", "oak"]));
    assert!(both(&sides).contains("Zelkova"));
    assert_eq!(reason(&sides, "Yew"), "looks like `Elm` to the last pixel");
}

#[test]
fn property_where_files_lie_and_what_they_are_called_changes_nothing() {
    let (one, other) = (folder(), TempDir::new().unwrap());
    for (i, (family, width)) in FAMILIES.iter().rev().enumerate() {
        let font = bars(family, LETTERS, *width);
        write(other.path(), &format!("{i}/again.ttf"), &font);
        write(other.path(), &format!("{}/x{i}.OTF", 9 - i), &font);
    }
    let settings = GlyphSettings { variations: 2, ..settings() };
    let (a, b) = (open(one.path(), &settings), open(other.path(), &settings));
    for (a, b) in [(&a.0, &b.0), (&a.1, &b.1)] {
        assert_eq!(a.fingerprint(), b.fingerprint());
        assert_eq!(a.fonts().collect::<Vec<_>>(), b.fonts().collect::<Vec<_>>());
        assert!((0..a.len()).all(|i| a.image(i).unwrap() == b.image(i).unwrap()));
    }
    assert_ne!(a.0.fingerprint(), a.1.fingerprint());
    // The same glyphs, drawn larger.
    let larger = GlyphSettings { size: 33, ..settings.clone() };
    assert_eq!(open(one.path(), &larger).0.fingerprint(), a.0.fingerprint());
    for changed in [
        GlyphSettings { seed: 1, ..settings.clone() },
        GlyphSettings { variations: 3, ..settings.clone() },
        GlyphSettings { characters: "abcdefg".to_owned(), ..settings.clone() },
    ] {
        assert_ne!(open(one.path(), &changed).0.fingerprint(), a.0.fingerprint(), "{changed:?}");
    }
}

#[test]
fn property_variations_stay_inside_and_can_be_seen() {
    let folder = folder();
    for size in [8, 32, 65] {
        let settings = GlyphSettings { variations: 40, size, ..settings() };
        let (train, validation) = open(folder.path(), &settings);
        let plain = train.len() / 40;
        let mut different = BTreeSet::new();
        for index in 0..train.len() {
            let image = train.image(index).unwrap();
            if size > 8 {
                let (least, most, background) = greys(&image, size);
                assert!(index >= plain || background == 255);
                assert!(background == least || background == most);
            }
            different.insert(image.pixels);
        }
        assert!(different.len() > train.len() * 99 / 100);
        for index in 0..validation.len() {
            assert_eq!(validation.image(index).unwrap().pixels[0], 255);
        }
    }
}

#[test]
fn property_contrast_is_enough() {
    let folder = folder();
    let (train, _) = open(folder.path(), &GlyphSettings { variations: 60, size: 64, ..settings() });
    let mut light = 0;
    for index in 0..train.len() {
        let (least, most, background) = greys(&train.image(index).unwrap(), 64);
        // One less for what rounding takes; a bar of these is thicker than a pixel.
        assert!(most - least >= 90, "{}: {least} to {most}", train.name(index));
        light += usize::from(background == most);
    }
    let part = light as f64 / train.len() as f64;
    assert!((0.4..0.6).contains(&part), "{part} are dark on light");
}

#[test]
fn property_threads_draw_the_same() {
    let folder = folder();
    let (train, _) = open(folder.path(), &GlyphSettings { variations: 20, ..settings() });
    let alone: Vec<Image> = (0..train.len()).map(|i| train.image(i).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (train, alone) = (&train, &alone);
            scope.spawn(move || {
                for i in (0..train.len()).rev() {
                    let i = (i + thread * 37) % train.len();
                    assert_eq!(train.image(i).unwrap(), alone[i]);
                }
            });
        }
    });
}

#[test]
fn fault_broken_fonts_are_left_out_by_name() {
    let folder = folder();
    let good = bars("Willow", LETTERS, 400);
    write(folder.path(), "empty.ttf", "");
    write(folder.path(), "text.ttf", "This is no font.\n".repeat(100));
    write(folder.path(), "collection.ttc", b"ttcf\0\x01\0\0\xff\xff\xff\xff\0\0\0\x0c");
    write(folder.path(), "few.ttf", bars("Few", "abcdefg", 400));
    write(folder.path(), "symbols.ttf", bars("Tree Symbols", LETTERS, 400));
    let square = || vec![vec![(0, 0), (500, 0), (500, 500), (0, 500)]];
    let of = |polygons: fn(char) -> Option<made_font::Polygon>| {
        let polygons = |c| polygons(c).map_or_else(square, |polygon| vec![polygon]);
        LETTERS.chars().map(|c| (c, polygons(c))).collect::<Vec<_>>()
    };
    write(folder.path(), "alike.ttf", font("Alike", &of(|_| None)));
    write(folder.path(), "line.ttf", font("Line", &of(|_| Some(vec![(0, 0), (500, 0)]))));
    write(folder.path(), "thin.ttf", font("Thin", &of(|_| Some(vec![(0, 0), (500, 0), (250, 1)]))));
    let far = |_| Some(vec![(0, 0), (9000, 0), (250, 1000)]);
    write(folder.path(), "far.ttf", font("Far", &of(far)));
    fs::create_dir(folder.path().join("folder.ttf")).unwrap();
    let sides = open(folder.path(), &settings());
    assert_eq!(both(&sides), FAMILIES.map(|(family, _)| family.to_owned()).into());
    for (file, known) in [
        ("empty.ttf", "is no font: "),
        ("text.ttf", "is no font: "),
        ("few.ttf", "has no glyph for 'h'"),
        ("symbols.ttf", "has pictures for letters"),
        ("alike.ttf", "draws 'a' and 'b' alike"),
        ("line.ttf", "draws nothing for 'a'"),
        ("thin.ttf", "draws next to nothing for 'a'"),
        ("far.ttf", "draws 'a' further than 8 ems"),
    ] {
        let reason = reason(&sides, file);
        assert!(reason.starts_with(known), "{file} {reason}");
    }
    // Last are the name, without which a font is called by its file, and counts that it can do without.
    for length in (0..good.len() - 80).step_by(7) {
        write(folder.path(), "cut.ttf", &good[..length]);
        let sides = open(folder.path(), &settings());
        assert!(reason(&sides, "cut.ttf").len() > 5, "{length} of {}", good.len());
    }
}

#[test]
fn fault_damaged_bytes_end_in_a_font_or_a_reason() {
    let good = bars("Willow", LETTERS, 400);
    let mut random = Stream::new(7);
    let mut left_out = 0;
    for _ in 0..60 {
        let folder = folder();
        for file in 0..10 {
            let mut bytes = good.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.next_u64() as u8;
            }
            write(folder.path(), &format!("{file}.ttf"), bytes);
        }
        let (train, validation) = open(folder.path(), &settings());
        left_out += train.left_out().len();
        for side in [train, validation] {
            (0..side.len()).for_each(|i| drop(side.image(i).unwrap()));
        }
    }
    assert!((50..600).contains(&left_out), "{left_out} of 600 are left out");
}

#[test]
fn fault_too_few_families() {
    let (folder, gone) = (TempDir::new().unwrap(), PathBuf::from("/nowhere/to/be/found"));
    let folders = [folder.path().to_path_buf(), gone];
    for (style, width) in [("", 100), (" Bold", 200), (" Mono", 300)] {
        let found = Glyphs::open(&folders, &settings()).unwrap_err();
        assert!(matches!(found, Error::TooFewFonts { .. }));
        let message = found.to_string();
        assert!(
            message.contains("`make fonts`") && message.contains("/nowhere/to/be/found"),
            "{message}"
        );
        let name = format!("Ash{style}");
        write(folder.path(), &format!("{name}.ttf"), bars(&name, LETTERS, width));
    }
    let message = Glyphs::open(&folders, &settings()).unwrap_err().to_string();
    assert!(message.starts_with("there are 3 usable fonts of 1 families"), "{message}");
}

#[test]
fn fault_settings_out_of_range() {
    let folder = folder();
    let plain = settings();
    let of =
        |characters: &str| GlyphSettings { characters: characters.to_owned(), ..plain.clone() };
    for (refused, field) in [
        (of(""), "characters"),
        (of("a"), "characters"),
        (of("aba"), "characters"),
        (of("a b"), "characters"),
        (of(&('\u{4e00}'..'\u{6000}').collect::<String>()), "characters"),
        (GlyphSettings { size: 7, ..plain.clone() }, "size"),
        (GlyphSettings { size: 1025, ..plain.clone() }, "size"),
        (GlyphSettings { variations: 0, ..plain.clone() }, "variations"),
        (GlyphSettings { variations: 10_001, ..plain.clone() }, "variations"),
        (GlyphSettings { validation_share: 0.0, ..plain.clone() }, "validation_share"),
        (GlyphSettings { validation_share: 1.0, ..plain.clone() }, "validation_share"),
        (GlyphSettings { validation_share: f64::NAN, ..plain.clone() }, "validation_share"),
    ] {
        let error = Glyphs::open(&[folder.path().to_path_buf()], &refused).unwrap_err();
        assert!(
            matches!(error, Error::GlyphSetting { setting, .. } if setting == field),
            "{error}"
        );
        assert!(error.to_string().contains("; use "), "{error}");
    }
}

/// Both sides of what is installed; `None`, and a line in the log, where that is too little.
fn installed(test: &str, settings: &GlyphSettings) -> Option<(Glyphs, Glyphs)> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let gpipe = std::env::var_os("GPIPE_HOME").map_or(home.join(".cache/gpipe"), PathBuf::from);
    match Glyphs::open(&[gpipe.join("fonts"), PathBuf::from("/usr/share/fonts")], settings) {
        Ok(sides) => Some(sides),
        Err(Error::TooFewFonts { .. }) => {
            if let Some(path) = std::env::var_os("GPIPE_SKIP_LOG") {
                let mut file = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
                // In one write: tests run side by side.
                file.write_all(format!("{test}: too few fonts are installed\n").as_bytes())
                    .unwrap();
            }
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn property_installed_fonts_have_ink_inside_and_no_two_letters_alike() {
    let test = "property_installed_fonts_have_ink_inside_and_no_two_letters_alike";
    let Some((train, validation)) = installed(test, &GlyphSettings::default()) else { return };
    assert!(train.families().is_disjoint(&validation.families()));
    for side in [&train, &validation] {
        for font in 0..side.len() / 26 {
            let images = (0..26).map(|i| side.image(font * 26 + i).unwrap());
            let pixels: BTreeSet<Vec<u8>> = images
                .map(|image| {
                    greys(&image, 32);
                    image.pixels
                })
                .collect();
            assert_eq!(pixels.len(), 26, "{}", side.name(font * 26));
        }
    }
}

#[test]
fn property_installed_fonts_vary_inside() {
    let settings = GlyphSettings {
        characters: ('a'..='z').chain('A'..='Z').collect(),
        variations: 4,
        size: 40,
        ..GlyphSettings::default()
    };
    let Some((train, _)) = installed("property_installed_fonts_vary_inside", &settings) else {
        return;
    };
    // A few thousand of all, far apart.
    for index in (0..train.len()).step_by((train.len() / 5000).max(1)) {
        greys(&train.image(index).unwrap(), 40);
    }
}
