//! Finding fonts, and leaving out those that cannot teach the characters asked for.
//!
//! A font's place among others depends on what is in its file, never on the folder it lies in or on the order in which
//! the system lists folders.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use skrifa::raw::{FileRef, TableProvider};
use skrifa::string::StringId;
use skrifa::{FontRef, MetadataProvider};

use super::alike::{self, Thumbnails};
use super::outline::Outline;
use super::render::{self, Fit, Style};
use super::{LeftOut, family};
use crate::hash::StableHasher;
use crate::{Error, Result};

/// No larger file is read: fonts of all Chinese characters have 20 MB.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// No more font files are read.
const FILES_MAX: usize = 20_000;

/// No more files and folders are looked at.
const ENTRIES_MAX: usize = 1_000_000;

/// No more faces of one file are looked at.
const FACES_MAX: u32 = 256;

/// All outlines together take no more memory.
const OUTLINE_BYTES_MAX: usize = 1 << 30;

/// No longer name is kept.
const NAME_CHARS_MAX: usize = 120;

/// Side of the images by which a font is judged, whatever size it is asked for: the choice must not hang on it.
const PROBE_SIZE: usize = 32;

/// Less ink is not seen, in 255ths of a pixel of the probe.
const INK_MIN: u64 = 255;

/// Words in the names of fonts whose letters are pictures. Their file often does not say so in another way.
const PICTURE_WORDS: [&str; 15] = [
    "awesome",
    "barcode",
    "braille",
    "dingbat",
    "dingbats",
    "emoji",
    "icon",
    "icons",
    "music",
    "opensymbol",
    "ornaments",
    "redacted",
    "symbol",
    "symbols",
    "webdings",
];

/// First digit of PANOSE, and high byte of the family class, of a font that says it has symbols for letters.
const PANOSE_SYMBOL: u8 = 5;
const CLASS_SYMBOL: u8 = 12;

/// A font that has every character.
#[derive(Debug)]
pub(super) struct Face {
    /// What all styles of a design are called; see [`family`].
    pub(super) family: String,
    /// What the font calls itself: "DejaVu Serif Bold".
    pub(super) name: String,
    /// Hash of the file, and which of its faces.
    pub(super) hash: u64,
    /// One for each character.
    pub(super) outlines: Vec<Outline>,
    pub(super) fit: Fit,
    /// Hash of how its characters look.
    pub(super) looks: u64,
    pub(super) thumbnails: Thumbnails,
}

/// All fonts below some folders.
#[derive(Debug)]
pub(super) struct Fonts {
    /// Sorted by family, name and hash.
    pub(super) faces: Vec<Face>,
    /// The others, by name.
    pub(super) left_out: Vec<LeftOut>,
}

/// Reads every font below the folders; a folder that does not exist has none.
pub(super) fn read(folders: &[PathBuf], characters: &[char]) -> Result<Fonts> {
    let too_many = |limit: String| Error::TooManyFonts { folders: folders.to_vec(), limit };
    let mut left_out = Vec::new();
    let files = walk(folders, &mut left_out).map_err(too_many)?;
    let (mut faces, mut seen, mut bytes) = (Vec::new(), BTreeSet::new(), 0);
    for path in files {
        let content = match content(&path) {
            Ok(content) => content,
            Err(reason) => {
                left_out.push(LeftOut { name: path.display().to_string(), reason });
                continue;
            }
        };
        let mut hasher = StableHasher::new();
        hasher.field(&content);
        if !seen.insert((hasher.finish(), content.len())) {
            continue;
        }
        for (index, font) in fonts(&content) {
            match font.and_then(|font| face(&font, &path, characters)) {
                Ok(mut face) => {
                    face.hash = gpipe_core::splitmix::key(&[hasher.finish(), u64::from(index)]);
                    bytes += face.outlines.iter().map(Outline::bytes).sum::<usize>();
                    faces.push(face);
                }
                Err(reason) => left_out.push(LeftOut { name: path.display().to_string(), reason }),
            }
            if bytes > OUTLINE_BYTES_MAX {
                return Err(too_many(format!("{} MiB of outlines", OUTLINE_BYTES_MAX >> 20)));
            }
        }
    }
    faces.sort_by(|a, b| (&a.family, &a.name, a.hash).cmp(&(&b.family, &b.name, b.hash)));
    let mut faces = alike::without_twins(faces, &mut left_out);
    alike::join_families(&mut faces);
    Ok(Fonts { faces, left_out })
}

/// Every file below the folders that is called a font; or what there are too many of. Links to files are followed, links
/// to folders are not, so the walk ends.
fn walk(folders: &[PathBuf], left_out: &mut Vec<LeftOut>) -> Result<Vec<PathBuf>, String> {
    let mut files = BTreeSet::new();
    let mut entries = 0;
    let mut waiting: Vec<PathBuf> =
        folders.iter().filter(|folder| folder.exists()).cloned().collect();
    while let Some(folder) = waiting.pop() {
        let unlisted = |error| LeftOut {
            name: folder.display().to_string(),
            reason: format!("cannot be listed: {error}"),
        };
        let listed = match fs::read_dir(&folder) {
            Ok(listed) => listed,
            Err(error) => {
                left_out.push(unlisted(error));
                continue;
            }
        };
        for entry in listed {
            let (path, kind) = match entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))
            {
                Ok(entry) => entry,
                Err(error) => {
                    left_out.push(unlisted(error));
                    break;
                }
            };
            entries += 1;
            if entries > ENTRIES_MAX {
                return Err(format!("{ENTRIES_MAX} files and folders"));
            }
            if kind.is_dir() {
                waiting.push(path);
            } else if is_font_name(&path) && path.is_file() {
                files.insert(path);
            }
        }
        if files.len() > FILES_MAX {
            return Err(format!("{FILES_MAX} font files"));
        }
    }
    Ok(files.into_iter().collect())
}

fn is_font_name(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
    extension.is_some_and(|extension| {
        ["ttf", "otf", "ttc", "otc"].iter().any(|known| extension == *known)
    })
}

/// A file's bytes, or why not.
fn content(path: &Path) -> Result<Vec<u8>, String> {
    let mut content = Vec::new();
    let read = File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content))
        .map_err(|error| format!("cannot be read: {error}"))?;
    if read as u64 > FILE_BYTES_MAX {
        return Err(format!("has more than {} MiB", FILE_BYTES_MAX >> 20));
    }
    Ok(content)
}

/// The fonts in a file, each with its place; one error where it is no font file at all.
fn fonts(content: &[u8]) -> Vec<(u32, Result<FontRef<'_>, String>)> {
    let broken = |error| format!("is no font: {error}");
    match FileRef::new(content) {
        Ok(FileRef::Font(font)) => vec![(0, Ok(font))],
        Ok(FileRef::Collection(fonts)) => {
            let faces = 0..fonts.len().min(FACES_MAX);
            faces.map(|index| (index, fonts.get(index).map_err(broken))).collect()
        }
        Err(error) => vec![(0, Err(broken(error)))],
    }
}

/// As [`crate::fuzzing::font`].
pub(crate) fn fuzzed(content: &[u8]) -> Vec<String> {
    let face = |font: FontRef<'_>| face(&font, Path::new("fuzzed"), &['A', 'b', '3']).map(drop);
    fonts(content).into_iter().filter_map(|(_, font)| font.and_then(face).err()).collect()
}

/// A font with outlines of all characters, or why it is left out.
fn face(font: &FontRef<'_>, path: &Path, characters: &[char]) -> Result<Face, String> {
    let string = |id: StringId| {
        let text = font.localized_strings(id).english_or_first()?;
        let text: String = text.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    let stem = || path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let family_name =
        string(StringId::TYPOGRAPHIC_FAMILY_NAME).or_else(|| string(StringId::FAMILY_NAME));
    let family_name = family_name.unwrap_or_else(stem);
    let name = string(StringId::FULL_NAME).unwrap_or_else(|| family_name.clone());
    if is_of_pictures(font, &family_name) {
        return Err("has pictures for letters".to_owned());
    }
    let outlines = characters.iter().map(|&character| Outline::of(font, character));
    let outlines = outlines.collect::<Result<Vec<_>, _>>()?;
    let fit = Fit::of(&outlines);
    let (looks, thumbnails) = looks(&outlines, fit, characters)?;
    Ok(Face { family: family(&family_name), name, hash: 0, outlines, fit, looks, thumbnails })
}

/// Whether a font says that it has no letters, as far as it can be told.
fn is_of_pictures(font: &FontRef<'_>, family: &str) -> bool {
    let is_named = family
        .to_lowercase()
        .split(|c: char| !c.is_alphanumeric())
        .any(|word| PICTURE_WORDS.contains(&word));
    let is_classed = font.os2().is_ok_and(|os2| {
        os2.panose_10().first() == Some(&PANOSE_SYMBOL)
            || os2.s_family_class().to_be_bytes()[0] == CLASS_SYMBOL
    });
    is_named || is_classed || font.charmap().is_symbol()
}

/// How the characters look, as a hash and in small, where all can be seen and no two look the same.
fn looks(outlines: &[Outline], fit: Fit, characters: &[char]) -> Result<(u64, Thumbnails), String> {
    let mut hasher = StableHasher::new();
    let mut thumbnails = Thumbnails::default();
    let mut seen = BTreeMap::new();
    for (outline, &character) in outlines.iter().zip(characters) {
        let coverage = render::coverage(outline, fit, Style::PLAIN, PROBE_SIZE);
        if coverage.iter().map(|&ink| u64::from(ink)).sum::<u64>() < INK_MIN {
            return Err(format!("draws next to nothing for {character:?}"));
        }
        hasher.field(&coverage);
        thumbnails.add(&coverage, PROBE_SIZE);
        if let Some(same) = seen.insert(coverage, character) {
            return Err(format!("draws {same:?} and {character:?} alike"));
        }
    }
    Ok((hasher.finish(), thumbnails))
}
