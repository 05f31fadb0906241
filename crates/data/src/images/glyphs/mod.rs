//! Images of characters, drawn from fonts: real data wherever there are fonts, without a download.
//!
//! The class of an image is its character. What makes one `g` unlike another is its font, so whole families are split
//! into training and validation: a network is judged by designs of which it has seen no weight and no slope.
//!
//! Everything is drawn when it is asked for, from outlines that are read once: [`Glyphs::image`](ImageSet::image) reads
//! no file and keeps nothing.

mod alike;
mod fonts;
mod outline;
mod render;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use gpipe_core::splitmix;

pub(crate) use self::fonts::fuzzed;
use self::fonts::{Face, Fonts};
use self::render::Style;
use super::{Image, ImageSet};
use crate::hash::{self, StableHasher};
use crate::{Error, Result};

/// The least side of an image; letters are told apart down to about here.
pub const SIZE_MIN: usize = 8;

/// The largest side of an image.
pub const SIZE_MAX: usize = 1024;

/// The most characters.
pub const CHARACTERS_MAX: usize = 4096;

/// The most images of one character in one font.
pub const VARIATIONS_MAX: usize = 10_000;

/// What to draw.
#[derive(Debug, Clone, PartialEq)]
pub struct GlyphSettings {
    /// The classes: 2 to [`CHARACTERS_MAX`] characters that leave ink, none twice.
    pub characters: String,
    /// Rows and columns of an image.
    pub size: usize,
    /// Training images of one character in one font. The first is plain: as the font has it, black on white. The others
    /// are turned by up to 10 degrees, slanted, smaller, off the centre, bolder, and in other greys, also light on dark.
    /// Validation images are all plain.
    pub variations: usize,
    /// Part of the families to validate on, about; between 0 and 1.
    pub validation_share: f64,
    /// Of the split and of the variations.
    pub seed: u64,
}

impl Default for GlyphSettings {
    /// The letters a to z in 32 by 32 pixels, plain; a fifth of the families to validate on.
    fn default() -> Self {
        GlyphSettings {
            characters: ('a'..='z').collect(),
            size: 32,
            variations: 1,
            validation_share: 0.2,
            seed: 0,
        }
    }
}

impl GlyphSettings {
    /// The characters, where all settings are in range.
    fn checked(&self) -> Result<Vec<char>> {
        let characters: Vec<char> = self.characters.chars().collect();
        let distinct: BTreeSet<char> = characters.iter().copied().collect();
        let refuse = |setting, value: String, allowed: String| {
            Err(Error::GlyphSetting { setting, value, allowed })
        };
        if !(2..=CHARACTERS_MAX).contains(&characters.len()) || distinct.len() < characters.len() {
            let value = format!("{} ({} different ones)", characters.len(), distinct.len());
            return refuse("characters", value, format!("2 to {CHARACTERS_MAX}, none twice"));
        }
        if let Some(blank) = characters.iter().find(|c| c.is_whitespace() || c.is_control()) {
            return refuse(
                "characters",
                format!("{blank:?}"),
                "characters that leave ink".to_owned(),
            );
        }
        if !(SIZE_MIN..=SIZE_MAX).contains(&self.size) {
            return refuse(
                "size",
                self.size.to_string(),
                format!("{SIZE_MIN} to {SIZE_MAX} pixels"),
            );
        }
        if !(1..=VARIATIONS_MAX).contains(&self.variations) {
            return refuse(
                "variations",
                self.variations.to_string(),
                format!("1 to {VARIATIONS_MAX}"),
            );
        }
        if !(self.validation_share > 0.0 && self.validation_share < 1.0) {
            let allowed = "a part between 0 and 1, without these".to_owned();
            return refuse("validation_share", self.validation_share.to_string(), allowed);
        }
        Ok(characters)
    }
}

/// A font, or a file that is called one, that is not drawn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its file, or its name where another font looks the same.
    pub name: String,
    /// Why: "has no glyph for 'a'".
    pub reason: String,
}

/// What both sides know.
#[derive(Debug)]
struct Shared {
    faces: Vec<Face>,
    left_out: Vec<LeftOut>,
    characters: Vec<char>,
    classes: Vec<String>,
    settings: GlyphSettings,
    /// How many fonts there are to train on, and to validate on.
    fonts: [usize; 2],
    /// And families.
    families: [usize; 2],
}

/// One side of the characters drawn from fonts: those to train on, or those to validate on.
///
/// Image `(variation * fonts + font) * characters + character`: the first `fonts * characters` are plain.
#[derive(Debug, Clone)]
pub struct Glyphs {
    shared: Arc<Shared>,
    /// Places in `shared.faces`.
    faces: Vec<usize>,
    variations: usize,
}

impl Glyphs {
    /// Reads every font (ttf, otf, and all in a ttc) below the folders, and splits them: (training, validation).
    ///
    /// A font is used that draws every character, no two of them alike, and that does not call itself a font of pictures;
    /// [`Glyphs::left_out`] has the others. A file that is there twice counts once. A variable font counts once, as it is by
    /// default. A folder that does not exist counts as empty.
    ///
    /// The split is by family: all weights, slopes and widths of a design, its monospaced and its slab sister, and its
    /// copies under other names, are on one side. Which one hangs on the seed and the name of the family's first font; one
    /// family is moved where a side would be empty. So fonts that are added may move a family: its images are then others, which
    /// [`ImageSet::fingerprint`] shows.
    ///
    /// # Errors
    /// A setting out of range; fonts of fewer than two families; too many of them.
    pub fn open(folders: &[PathBuf], settings: &GlyphSettings) -> Result<(Glyphs, Glyphs)> {
        let characters = settings.checked()?;
        let Fonts { faces, left_out } = fonts::read(folders, &characters)?;
        let families: BTreeSet<&str> = faces.iter().map(|face| face.family.as_str()).collect();
        if families.len() < 2 {
            let (fonts, families) = (faces.len(), families.len());
            return Err(Error::TooFewFonts { folders: folders.to_vec(), fonts, families });
        }
        let validation = validation_families(&families, settings);
        let families = [families.len() - validation.len(), validation.len()];
        let (validate, train): (Vec<usize>, Vec<usize>) = (0..faces.len())
            .partition(|&i| faces.get(i).is_some_and(|face| validation.contains(&face.family)));
        let shared = Arc::new(Shared {
            fonts: [train.len(), validate.len()],
            families,
            left_out,
            classes: characters.iter().map(char::to_string).collect(),
            characters,
            settings: settings.clone(),
            faces,
        });
        let variations = settings.variations;
        let train = Glyphs { shared: Arc::clone(&shared), faces: train, variations };
        Ok((train, Glyphs { shared, faces: validate, variations: 1 }))
    }

    /// Both sides in a line: "312 fonts of 74 families: 250 of 59 to train on, 62 of 15 to validate on".
    pub fn summary(&self) -> String {
        let Shared { fonts: [f, g], families: [m, n], .. } = &*self.shared;
        format!(
            "{} fonts of {} families: {f} of {m} to train on, {g} of {n} to validate on",
            f + g,
            m + n
        )
    }

    /// Names of this side's fonts, in order.
    pub fn fonts(&self) -> impl Iterator<Item = &str> {
        self.faces().map(|face| face.name.as_str())
    }

    /// The families of this side's fonts: their names in small letters, without words for a style.
    pub fn families(&self) -> BTreeSet<&str> {
        self.faces().map(|face| face.family.as_str()).collect()
    }

    /// Fonts of neither side, and why.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.shared.left_out
    }

    fn faces(&self) -> impl Iterator<Item = &Face> {
        self.faces.iter().filter_map(|&place| self.shared.faces.get(place))
    }
}

/// What an image is of.
struct Subject<'a> {
    face: &'a Face,
    /// A place among the characters.
    class: usize,
    variation: usize,
}

impl Glyphs {
    fn subject(&self, index: usize) -> Option<Subject<'_>> {
        let (fonts, characters) = (self.faces.len(), self.shared.characters.len());
        let (row, class) = (index / characters, index % characters);
        let (variation, font) = (row / fonts, row % fonts);
        let face = self.shared.faces.get(*self.faces.get(font)?)?;
        (variation < self.variations).then_some(Subject { face, class, variation })
    }
}

impl ImageSet for Glyphs {
    fn classes(&self) -> &[String] {
        &self.shared.classes
    }

    fn len(&self) -> usize {
        self.faces.len() * self.shared.characters.len() * self.variations
    }

    fn class(&self, index: usize) -> usize {
        self.subject(index).map_or(0, |subject| subject.class)
    }

    /// "DejaVu Serif Bold: 'g'", and ", variation 3" where it is not plain.
    fn name(&self, index: usize) -> String {
        let Some(Subject { face, class, variation }) = self.subject(index) else {
            return format!("glyph {index}");
        };
        let character = self.shared.classes.get(class).map_or("", String::as_str);
        let variation = match variation {
            0 => String::new(),
            variation => format!(", variation {variation}"),
        };
        format!("{}: '{character}'{variation}", face.name)
    }

    fn image(&self, index: usize) -> Result<Image> {
        let none = || Error::NoSuchImage { index, images: self.len() };
        let Subject { face, class, variation } = self.subject(index).ok_or_else(none)?;
        let outline = face.outlines.get(class).ok_or_else(none)?;
        let settings = &self.shared.settings;
        let style = match variation {
            0 => Style::PLAIN,
            // Of the font and the character, not of the index: another font in the folder changes no image.
            _ => {
                let character = self.shared.characters.get(class).map_or(0, |&c| u64::from(c));
                let variation = variation as u64;
                Style::drawn(splitmix::key(&[settings.seed, face.hash, character, variation]))
            }
        };
        Ok(render::image(outline, face.fit, style, settings.size))
    }

    fn fingerprint(&self) -> u64 {
        let settings = &self.shared.settings;
        let mut hasher = StableHasher::new();
        hasher.field(b"glyphs");
        hasher.field(settings.characters.as_bytes());
        // Not the size: the same glyphs are drawn at any.
        for number in [self.variations as u64, settings.seed] {
            hasher.field(&number.to_le_bytes());
        }
        // Which fonts are on this side says what the share did.
        self.faces().for_each(|face| hasher.field(&face.hash.to_le_bytes()));
        hasher.finish()
    }
}

/// The families to validate on: some, but not all.
fn validation_families(families: &BTreeSet<&str>, settings: &GlyphSettings) -> BTreeSet<String> {
    let number = |family: &str| splitmix::key(&[settings.seed, hash::stable(family)]) >> 11;
    // 53 bits are a double without rounding.
    let limit = (settings.validation_share * (1u64 << 53) as f64) as u64;
    let mut validation: BTreeSet<&str> =
        families.iter().copied().filter(|family| number(family) < limit).collect();
    let by_number = |family: &&str| number(family);
    if validation.is_empty() {
        validation.extend(families.iter().copied().min_by_key(by_number));
    } else if validation.len() == families.len()
        && let Some(last) = families.iter().copied().max_by_key(by_number)
    {
        validation.remove(last);
    }
    validation.into_iter().map(str::to_owned).collect()
}

/// Words that tell a style of a design from the design. Many a font has its weight in its family's name.
const STYLE_WORDS: [&str; 61] = [
    "black",
    "bold",
    "book",
    "caps",
    "caption",
    "code",
    "compressed",
    "cond",
    "condensed",
    "demi",
    "demibold",
    "display",
    "expanded",
    "extended",
    "extra",
    "extrabold",
    "extracondensed",
    "extralight",
    "fat",
    "hairline",
    "headline",
    "heavy",
    "italic",
    "light",
    "medium",
    "mono",
    "monospace",
    "monospaced",
    "narrow",
    "no2",
    "no3",
    "normal",
    "oblique",
    "otf",
    "poster",
    "regular",
    "roman",
    "sans",
    "sc",
    "semi",
    "semibold",
    "semicondensed",
    "serif",
    "slab",
    "slanted",
    "smallcaps",
    "std",
    "subhead",
    "text",
    "thin",
    "title",
    "titling",
    "ttf",
    "typewriter",
    "ultra",
    "ultrabold",
    "ultralight",
    "unhinted",
    "variable",
    "vf",
    "wide",
];

/// A family's name in small letters, without words for styles and without numbers (optical sizes).
///
/// "DejaVu Sans Mono" and "DejaVu Serif Condensed" are both "dejavu": too alike in their letters to be on two sides.
fn family(name: &str) -> String {
    let name = name.to_lowercase();
    let words = name.split(|c: char| c.is_whitespace() || c == '-' || c == '_');
    let design: Vec<&str> = words
        .filter(|word| {
            let is_number = word.chars().all(|c| c.is_ascii_digit() || c == '.');
            !is_number && !STYLE_WORDS.contains(word)
        })
        .collect();
    if design.is_empty() { name } else { design.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_families_of_known_names() {
        for (name, known) in [
            ("DejaVu Sans Mono", "dejavu"),
            ("DejaVu Serif Condensed", "dejavu"),
            ("Lato Semibold", "lato"),
            ("LM Roman 10", "lm"),
            ("LM Mono Light 10", "lm"),
            ("EB Garamond 08", "eb garamond"),
            ("Comic Neue", "comic neue"),
            ("Sans", "sans"),
            ("10", "10"),
        ] {
            assert_eq!(family(name), known);
        }
    }

    #[test]
    fn property_both_sides_have_a_family_and_growth_moves_none() {
        let names: Vec<String> = (0..40).map(|i| format!("design {i}")).collect();
        for seed in 0..50 {
            for validation_share in [0.001, 0.2, 0.5, 0.999] {
                let settings = GlyphSettings { seed, validation_share, ..GlyphSettings::default() };
                let of = |count: usize| {
                    let names = names.iter().take(count).map(String::as_str);
                    validation_families(&names.collect(), &settings)
                };
                for count in 2..40 {
                    assert!((1..count).contains(&of(count).len()), "{seed} {validation_share}");
                }
                if validation_share == 0.2 && of(20).len() > 1 {
                    assert!(of(20).is_subset(&of(40)));
                }
            }
        }
    }
}
