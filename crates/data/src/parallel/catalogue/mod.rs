//! Gettext catalogues: English messages with their translations into one language.
//!
//! - `mo`: compiled catalogues; `po`: catalogues as translators write them;
//! - `charset`: bytes as text, in the charset that the catalogue names;
//! - `plurals`: which of a message's forms stands for one thing, and which for several;
//! - `language`: which language a folder or a header names;
//! - `folder`: the catalogues below a folder.
//!
//! A catalogue comes from anywhere, so nothing in it is trusted: every offset is checked, no allocation is larger than
//! the file justifies, and what is wrong is an error with its place.

mod charset;
pub(super) mod folder;
mod language;
mod mo;
mod plurals;
mod po;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use charset::Charset;
pub(super) use plurals::{Number, Plurals};

/// No catalogue larger than this is read: 64 MiB.
pub const CATALOGUE_BYTES_MAX: u64 = 64 << 20;

/// No string of a catalogue is longer than this: 1 MiB.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// No language has more plural forms than this; 6 is the most known.
const FORMS_MAX: usize = 16;

/// A message of a program and its translations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Message {
    /// What tells it from other messages of the same text: `msgctxt`.
    pub context: Option<String>,
    /// The English text, of one thing where there is a plural: `msgid`.
    pub id: String,
    /// The English text of several things: `msgid_plural`.
    pub plural: Option<String>,
    /// The translation, or with a plural one for each of the language's forms: `msgstr`.
    pub strings: Vec<String>,
}

/// The translated messages of a program (or a part of one) in one language.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalogue {
    /// `Language` of the header, as it is written there.
    pub language: Option<String>,
    /// `Plural-Forms` of the header, as it is written there.
    pub plural_forms: Option<String>,
    /// The messages with a translation, in the file's order; those that the translators marked fuzzy are left out.
    pub messages: Vec<Message>,
    /// How many were marked fuzzy. A compiled catalogue does not hold them.
    pub fuzzy: usize,
}

/// Where in a catalogue something is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// An offset, from 0.
    Byte(usize),
    /// A line, from 1.
    Line(usize),
}

/// What is wrong with a catalogue, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct CatalogueError {
    /// Where.
    pub place: Place,
    /// What.
    pub reason: String,
}

impl Catalogue {
    /// A compiled catalogue (`.mo`), of either byte order and any revision 0.x or 1.x. Strings that depend on the
    /// system, which revisions x.1 keep apart, are passed over.
    ///
    /// # Errors
    /// It has another magic number or revision; an offset or a length is out of the file; strings overlap; its charset
    /// is unknown, or a string is not of that charset. With the offset.
    pub fn from_mo(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
        mo::read(bytes)
    }

    /// A catalogue as text (`.po`). Comments and obsolete messages are passed over, fuzzy ones counted.
    ///
    /// # Errors
    /// A line is not of the format, or stands where it may not; the charset is unknown, or a byte is not of that charset.
    /// With the line.
    pub fn from_po(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
        po::read(bytes)
    }

    /// A catalogue by its ending, or what is wrong with it in words.
    pub(super) fn open(path: &Path) -> Result<Catalogue, String> {
        let bytes = bytes(path)?;
        let is_po = path.extension().is_some_and(|ending| ending == "po");
        let catalogue = if is_po { Self::from_po(&bytes) } else { Self::from_mo(&bytes) };
        catalogue.map_err(|error| error.to_string())
    }

    fn with_header(header: &str) -> Catalogue {
        let field = |name| field(header, name).map(str::to_owned);
        Catalogue {
            language: field("Language").filter(|language| !language.is_empty()),
            plural_forms: field("Plural-Forms"),
            ..Catalogue::default()
        }
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    let too_large = || format!("has more than {} MiB", CATALOGUE_BYTES_MAX >> 20);
    let cannot = |error: std::io::Error| format!("cannot be read: {error}");
    let file = File::open(path).map_err(cannot)?;
    let size = file.metadata().map_err(cannot)?.len();
    if size > CATALOGUE_BYTES_MAX {
        return Err(too_large());
    }
    let mut content = Vec::new();
    // The file may grow meanwhile: the limit holds for what is read, too.
    file.take(CATALOGUE_BYTES_MAX + 1).read_to_end(&mut content).map_err(cannot)?;
    if content.len() as u64 > CATALOGUE_BYTES_MAX { Err(too_large()) } else { Ok(content) }
}

/// A field of a header, which is lines of `Name: value`.
fn field<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    header.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.trim().eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

/// The charset that a header names. Without one it is UTF-8, and so it is with the word that templates have in its place.
fn charset_of(header: &str) -> Result<Charset, String> {
    let content = field(header, "Content-Type").unwrap_or_default();
    let label = (content.split(';'))
        .find_map(|part| part.trim().strip_prefix("charset="))
        .map_or("", |label| label.trim().trim_matches('"'));
    Charset::named(label).ok_or_else(|| {
        format!("the charset {label:?} is not known here; convert it with `msgconv -t UTF-8`")
    })
}

fn error(place: Place, reason: impl Into<String>) -> CatalogueError {
    CatalogueError { place, reason: reason.into() }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(f, "byte {byte}"),
            Self::Line(line) => write!(f, "line {line}"),
        }
    }
}
